"""The storage rules on a real S3 server, and each way it can refuse us told apart."""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dflash_core.errors import StorageError
from dflash_core.storage import Storage
from tests.s3 import BUCKET, KEY, SECRET, S3Server

pytestmark = pytest.mark.server


def test_put_get_list_delete_and_create_only(s3_url):
    storage = Storage.from_url(s3_url)
    storage.preflight()
    assert list(storage.list()) == []
    assert storage.put_new("a/b", b"mine")
    assert storage.put_new("a/b", b"mine")
    assert not storage.put_new("a/b", b"other")
    assert storage.get("a/b") == b"mine"
    assert bytes(storage.get_range("a/b", 1, 2)) == b"in"
    assert [(info.key, info.size) for info in storage.list()] == [("a/b", 4)]
    storage.delete(["a/b"])
    with pytest.raises(FileNotFoundError):
        storage.get("a/b")


def test_a_version_is_replaced_once(s3_url):
    storage = Storage.from_url(s3_url)
    storage.put("k", b"damaged")
    data, version = storage.get_version("k")
    assert data == b"damaged"
    assert storage.replace("k", [b"wh", b"ole"], version)
    assert not storage.replace("k", b"late", version)
    assert storage.get("k") == b"whole"


def test_of_many_writers_of_one_key_one_wins(s3_url):
    storage, wins, barrier = Storage.from_url(s3_url), [], threading.Barrier(8)

    def write(i):
        barrier.wait()
        if storage.put_new("k", f"writer {i}".encode()):
            wins.append(i)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert len(wins) == 1
    assert storage.get("k") == f"writer {wins[0]}".encode()


@pytest.mark.parametrize(
    ("variable", "value", "url", "words"),
    [
        ("AWS_SECRET_ACCESS_KEY", "wrong", None, "check AWS_SECRET_ACCESS_KEY"),
        ("AWS_ACCESS_KEY_ID", "nobody", None, "check AWS_ACCESS_KEY_ID"),
        ("AWS_REGION", "us-east-1", "s3://no-such-bucket-here/x", "bucket does not exist"),
        (
            "AWS_ENDPOINT_URL",
            "http://127.0.0.1:9",
            None,
            "cannot be reached; check AWS_ENDPOINT_URL",
        ),
    ],
    ids=["wrong secret", "wrong key", "missing bucket", "unreachable endpoint"],
)
def test_preflight_tells_refusals_apart_and_keeps_the_secret(
    s3_url, monkeypatch, variable, value, url, words
):
    monkeypatch.setenv(variable, value)
    with pytest.raises(StorageError, match=words) as caught:
        Storage.from_url(url or s3_url).preflight()
    assert SECRET not in str(caught.value)


@pytest.fixture
def bucket(s3_url):
    """A bucket of its own, and what makes and deletes it."""
    import boto3

    client, name = boto3.client("s3"), "comes-and-goes"
    client.create_bucket(Bucket=name)
    yield (
        Storage.from_url(f"s3://{name}/folder"),
        lambda: client.create_bucket(Bucket=name),
        lambda: client.delete_bucket(Bucket=name),
    )
    with contextlib.suppress(client.exceptions.NoSuchBucket):
        client.delete_bucket(Bucket=name)


@pytest.mark.parametrize(
    "call",
    [
        lambda storage: storage.exists("key"),
        lambda storage: storage.child("below").put("key", b"data"),
        lambda storage: list(storage.list()),
    ],
)
def test_a_bucket_that_was_there_may_come_back(bucket, call):
    storage, make, delete = bucket
    assert not storage.exists("key")
    delete()
    back = threading.Timer(2, make)
    back.start()
    call(storage)
    back.join()
    storage.child("below").delete(["key"])


def test_a_bucket_that_never_was_is_refused_at_once(bucket, monkeypatch):
    storage, _, delete = bucket
    monkeypatch.setattr("dflash_core.storage.time.sleep", lambda _: pytest.fail("it waited"))
    delete()
    for call in (lambda: storage.get("key"), lambda: list(storage.list())):
        with pytest.raises(StorageError, match="the bucket does not exist"):
            call()


@pytest.mark.timeout(180)
def test_preflight_says_that_a_key_may_not_list(tmp_path, monkeypatch):
    def identity(name: str, secret: str, actions: list[str]) -> dict:
        credentials = [{"accessKey": name, "secretKey": secret}]
        return {"name": name, "credentials": credentials, "actions": actions}

    identities = [
        identity(KEY, SECRET, ["Admin", "Read", "List", "Tagging", "Write"]),
        identity("writer", "writersecret", ["Read", "Write"]),
    ]
    config = tmp_path / "s3.json"
    config.write_text(json.dumps({"identities": identities}))
    server = S3Server(tmp_path, [f"-s3.config={config}"])
    server.start()
    try:
        environment = {"AWS_ACCESS_KEY_ID": "writer", "AWS_SECRET_ACCESS_KEY": "writersecret"}
        for name, value in {**server.environment, **environment}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(StorageError, match=r"cannot list .* 'writer' lacks the permission"):
            Storage.from_url(f"s3://{BUCKET}/x").preflight()
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("RequestTimeTooSkewed", "set the clock"),
        ("ExpiredToken", "renew AWS_SESSION_TOKEN"),
        ("AccessDenied", "lacks the permission"),
    ],
)
def test_preflight_understands_refusals_that_our_server_never_sends(monkeypatch, code, words):
    class Refuse(BaseHTTPRequestHandler):
        def do_PUT(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(StorageError, match=f"cannot write .*{words}.*{code}") as caught:
            Storage.from_url("s3://bucket/x").preflight()
        assert SECRET not in str(caught.value)
        server.shutdown()
