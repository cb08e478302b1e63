"""Copies of an export: folders, buckets, and a hub that speaks its protocol."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dflash_core.errors import CorruptError, InputError, StorageError
from dflash_core.manifest import Dataset, sha256
from dflash_core.publish import check_destination, publish
from dflash_core.storage import Storage

FILES = {"config.json": b"{}", "model.safetensors": b"\x00\x01weights", "README.md": b"# card"}


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path / "root"))


def sealed_export(root, layouts=("z-lab",)):
    dataset = Dataset.create(root, "exports", "demo", version=1, config={}, inputs={})
    for layout in layouts:
        for name, data in FILES.items():
            dataset.storage.put(f"{layout}/{name}", data)
    files = {name: {"size": len(data), "sha256": sha256(data)} for name, data in FILES.items()}
    dataset.seal([], {"layouts": list(layouts), "files": dict.fromkeys(layouts, files)})
    return dataset


def test_one_layout_goes_to_the_folder_itself_and_several_below_it(root, tmp_path):
    publish(sealed_export(root), str(tmp_path / "one"))
    assert {file.name: file.read_bytes() for file in (tmp_path / "one").iterdir()} == FILES
    other = Storage.from_url(str(tmp_path / "other"))
    places = publish(sealed_export(other, ("z-lab", "speculators")), str(tmp_path / "two"))
    assert [place.rpartition("/")[2] for place in places] == ["z-lab", "speculators"]
    assert (tmp_path / "two/speculators/config.json").read_bytes() == b"{}"


def test_an_altered_export_is_not_copied(root, tmp_path):
    export = sealed_export(root)
    export.storage.put("z-lab/model.safetensors", b"other")
    with pytest.raises(CorruptError, match=r"model\.safetensors is not what was written"):
        publish(export, str(tmp_path / "copy"))
    assert not list((tmp_path / "copy").iterdir())


@pytest.mark.parametrize("destination", ["hf://name", "hf://a/b/c", "hf:///name", "ftp://host/x"])
def test_destinations_that_cannot_be_meant_are_refused(destination):
    with pytest.raises(InputError, match=r"expected hf://owner/name|is not known"):
        check_destination(destination)


class Hub(ThreadingHTTPServer):
    """The hub's requests for making a repository and committing small files to it."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories, self.refuse = {}, False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refuse:
            self._answer(403, {"error": "you have no write access"})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repositories.setdefault(
                name, {"visibility": asked["visibility"], "files": {}}
            )
            self._answer(200, {"url": f"{self.server.url}/{name}"})
        elif self.path == "/api/validate-yaml":  # of a README.md
            self._answer(200, {"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif "/commit/" in self.path:
            name = "/".join(self.path.split("/")[3:5])
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    data = base64.b64decode(value["content"])
                    self.server.repositories[name]["files"][value["path"]] = data
            answer = {"commitUrl": f"{self.server.url}/{name}/commit/c0ffee", "commitOid": "c0ffee"}
            self._answer(200, {**answer, "success": True})
        else:
            self._answer(404, {"error": self.path})

    def _answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    from huggingface_hub import HfApi

    server = Hub()
    genuine = HfApi.__init__

    def here(self, *args, **options):
        genuine(self, *args, **{**options, "endpoint": server.url, "token": "hf_test"})

    monkeypatch.setattr(HfApi, "__init__", here)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()


def test_the_hub_gets_one_private_repository_a_layout_in_one_commit(root, hub):
    places = publish(sealed_export(root, ("z-lab", "speculators")), "hf://owner/drafter")
    assert places == ["hf://owner/drafter-z-lab@c0ffee", "hf://owner/drafter-speculators@c0ffee"]
    assert set(hub.repositories) == {"owner/drafter-z-lab", "owner/drafter-speculators"}
    for repository in hub.repositories.values():
        assert repository == {"visibility": "private", "files": FILES}


def test_a_hub_that_refuses_and_one_that_is_away_are_told_apart(root, hub, monkeypatch):
    export = sealed_export(root)
    hub.refuse = True
    with pytest.raises(InputError, match="refused by the hub"):
        publish(export, "hf://owner/drafter")
    hub.shutdown()
    hub.server_close()
    with pytest.raises(StorageError, match="cannot be reached"):
        publish(export, "hf://owner/drafter")
