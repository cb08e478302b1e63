"""A real Prefect server and real workers for tests: processes of their own, killed and started at will."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from flows import SETTINGS
from tests.ports import free_ports

HOME = Path(__file__).parents[1]
RUNS = ("prefect.engine", "prefect.flow_engine")  # words in the command of a run's process
PREFECT = str(Path(sys.executable).parent / "prefect")


def ready_home(folder: Path) -> Path:
    """The folder as a home of Prefect with an empty database, whose making takes 10 s and more.

    It is made once for each version of Prefect on this machine, and copied.
    """
    kept = Path(tempfile.gettempdir()) / f"dflash-tests-prefect-{version('prefect')}.db"
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            with tempfile.TemporaryDirectory(dir=kept.parent) as home:
                command = [PREFECT, "server", "database", "upgrade", "-y"]
                environment = os.environ | {"PREFECT_HOME": home}
                subprocess.run(command, env=environment, check=True, capture_output=True)
                Path(home, "prefect.db").replace(kept)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "prefect.db").exists():
        shutil.copyfile(kept, folder / "prefect.db")
    return folder


class PrefectServer:
    """One server on one database; `kill` and `start` again make an outage."""

    def __init__(self, folder: Path) -> None:
        self.folder = ready_home(folder)
        (self.port,) = free_ports(1)
        self.api_url = f"http://127.0.0.1:{self.port}/api"
        self._process: subprocess.Popen | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What a client or a worker needs to find it."""
        return SETTINGS | {
            "PREFECT_HOME": str(self.folder),
            "PREFECT_API_URL": self.api_url,
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": str(HOME),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, wait_s: float = 240) -> None:
        command = [sys.executable, "-m", "flows.cli", "server", "--port", str(self.port)]
        self._process = start_logged(command, self.environment, self.folder / "server.log")
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.api_url}/health", timeout=2).close()
                return
            except OSError:
                time.sleep(0.3)
        raise RuntimeError((self.folder / "server.log").read_text()[-3000:])

    def kill(self) -> None:
        end(self._process, signal.SIGKILL)

    def stop(self) -> None:
        end(self._process, signal.SIGTERM)

    def deploy(self, *options: str) -> str:
        """`dflash deploy` against it; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "deploy", *options],
            env=os.environ | self.environment,
            cwd=HOME,
            capture_output=True,
            text=True,
            check=False,
            timeout=400,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def worker(self, name: str, queue: str, limit: str = "1") -> subprocess.Popen:
        """A worker of a queue in a process group of its own."""
        command = [PREFECT, "worker", "start", "--pool", "dflash", "--work-queue", queue]
        command += ["--name", name, "--limit", limit]
        return start_logged(command, self.environment, self.folder / f"{name}.log")


def start_logged(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen:
    """A process in a group of its own that writes to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=out, env=os.environ | environment, start_new_session=True
        )


def processes_of(home: Path, *words: str) -> list[int]:
    """Processes with one of the words in their command whose Prefect home is `home`."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environment = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        ours = f"PREFECT_HOME={home}\0" in environment and int(entry.name) != os.getpid()
        if ours and any(word in command for word in words):
            found.append(int(entry.name))
    return found


def end(process: subprocess.Popen | None, how: signal.Signals) -> None:
    """Sends a signal to the whole process group and waits until its leader is gone."""
    if process is None or process.poll() is not None:
        return
    os.killpg(process.pid, how)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
