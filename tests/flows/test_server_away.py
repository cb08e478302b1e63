"""Calls of the server's API while it restarts."""

from __future__ import annotations

import httpx
import pytest
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.exceptions import PrefectHTTPStatusError

from flows import server


class Flaky:
    """Fails as often as told, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, value: int) -> int:
        if self.errors:
            raise self.errors.pop(0)
        return value


def status(code: int) -> PrefectHTTPStatusError:
    request = httpx.Request("GET", "http://server/api")
    response = httpx.Response(code, request=request)
    return PrefectHTTPStatusError(f"status {code}", request=request, response=response)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    import logging

    monkeypatch.setattr(server, "PAUSE_S", 0.0)
    monkeypatch.setattr(server, "get_run_logger", lambda: logging.getLogger("test"))


def test_a_call_waits_until_the_server_is_back():
    flaky = Flaky(httpx.ConnectError("refused"), status(503), httpx.ReadTimeout("slow"))
    assert server.patiently(flaky, 7) == 7


def test_so_does_one_for_a_limit(monkeypatch):
    """Prefect hides what happened in an error of its own."""
    from prefect.concurrency import sync

    from flows.gpu_limits import holding

    tried = []

    class Slots:
        def __init__(self, names: list[str], **_: object) -> None:
            self.names = names

        def __enter__(self) -> None:
            tried.append(self.names)
            if len(tried) == 1:
                raise ConcurrencySlotAcquisitionError("no slot") from httpx.ConnectError("refused")
            if len(tried) == 3:
                raise ConcurrencySlotAcquisitionError("no slot") from status(422)

        def __exit__(self, *_: object) -> None:
            tried.append("released")

    monkeypatch.setattr(sync, "concurrency", Slots)
    with holding(["cuda:1", "cpu"]):
        assert len(tried) == 2
        assert tried[1][0].endswith("-1")
    assert tried.pop() == "released"
    with pytest.raises(ConcurrencySlotAcquisitionError), holding(["cuda:0"]):
        pass


def test_a_refusal_is_not_an_outage():
    with pytest.raises(PrefectHTTPStatusError):
        server.patiently(Flaky(status(422)), 7)
    with pytest.raises(PrefectHTTPStatusError):
        server.once(Flaky(status(422)), 7)


def test_patience_ends(monkeypatch):
    monkeypatch.setattr(server, "PATIENCE_S", -1.0)
    with pytest.raises(httpx.ConnectError):
        server.patiently(Flaky(httpx.ConnectError("refused")), 7)


def test_a_call_that_lasted_for_long_has_all_patience_when_the_server_goes(monkeypatch):
    clock = iter([0.0, 5000.0, 5001.0, 5002.0, 5003.0])
    monkeypatch.setattr(server.time, "monotonic", lambda: next(clock))
    assert server.patiently(Flaky(httpx.ConnectError("gone"), status(503)), 7) == 7


def test_what_the_next_update_shows_anyway_is_not_waited_for():
    flaky = Flaky(httpx.ConnectError("refused"), httpx.ConnectError("refused"))
    server.once(flaky, 7)
    assert len(flaky.errors) == 1
