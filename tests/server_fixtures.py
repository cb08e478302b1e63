"""Fixtures that start real servers; requested, never automatic."""

from __future__ import annotations

import os

import pytest

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
def prefect_server(tmp_path_factory):
    """A Prefect server on a database of its own; starting it takes up to a minute."""
    os.environ.setdefault("PREFECT_HOME", str(tmp_path_factory.mktemp("prefect")))
    import flows

    assert flows.SETTINGS  # they must be in the environment before Prefect is imported
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=300):
        yield
