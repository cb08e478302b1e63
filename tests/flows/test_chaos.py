"""A short chaos run: two kills, and everything ends as if nothing had happened."""

from __future__ import annotations

import os

import pytest

from benchmarks import chaos


@pytest.fixture
def environment():
    """The script puts the addresses and keys of its servers into the environment; this takes them out."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_kills_change_nothing(environment, tmp_path):
    lines = list(chaos.run(2, 1, tmp_path, 1100, chaos.Extraction))
    assert "all as undisturbed" in lines[-1], "\n".join(lines)
