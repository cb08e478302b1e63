"""Fixtures that start real servers; requested, never automatic."""

from __future__ import annotations

import os

import pytest

from tests.prefect_server import PrefectServer
from tests.s3 import BUCKET, S3Server


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """A SeaweedFS server whose credentials are in the environment while the tests that ask run."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    before = {key: os.environ.get(key) for key in server.environment}
    os.environ.update(server.environment)
    yield server
    server.stop()
    for key, value in before.items():
        os.environ.pop(key, None) if value is None else os.environ.update({key: value})


@pytest.fixture
def s3_url(s3_server, request):
    """A prefix of its own for each test."""
    return f"s3://{BUCKET}/{abs(hash(request.node.nodeid))}"


@pytest.fixture(scope="session")
def prefect_service(tmp_path_factory):
    """A Prefect server, set up by `dflash deploy`; one for the session, since starting takes half a minute."""
    server = PrefectServer(tmp_path_factory.mktemp("prefect"))
    server.start()
    server.deploy()
    yield server
    server.stop()


@pytest.fixture
def prefect_server(prefect_service):
    """The same server, talked to by flows that the test calls in its own process."""
    from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

    updates = {PREFECT_API_URL: prefect_service.api_url, PREFECT_HOME: prefect_service.folder}
    with temporary_settings(updates):
        yield prefect_service
