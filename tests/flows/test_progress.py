"""What the stall automation is told of a run that shows its progress."""

from __future__ import annotations

import pytest

from dflash_core.storage import Storage
from flows import events
from flows.progress import progress_on_page
from flows.store import look_through
from flows.store_params import VerifyParams
from tests.stores import PACKS, plan_store, write_packs


def test_a_stage_starts_before_it_commits_and_ends_after(told):
    def fails() -> None:
        with progress_on_page("extract", "packs") as advance:
            advance(1, 2, {})
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        fails()
    assert told == [events.STARTED, events.COMMITTED, events.ENDED]


def test_bars_of_tasks_do_not_end_the_stage(told):
    with progress_on_page("extract", "all packs", key="stage") as stage:
        for done in (1, 2):
            with progress_on_page("extract", "packs of a task") as task:
                task(1, 1, {})
            stage(done, 2, {})
    assert told == [events.STARTED, *[events.COMMITTED] * 4, events.ENDED]


def test_looking_through_a_store_is_told_from_start_to_end(told, tmp_path):
    dataset = plan_store(Storage.from_url(str(tmp_path)))
    write_packs(dataset, list(range(PACKS)))
    params = VerifyParams(root=str(tmp_path), store=dataset.path, level="full")
    assert look_through.fn(params, 1.0) == []
    assert (told[0], told[-1]) == (events.STARTED, events.ENDED)
    assert set(told[1:-1]) == {events.COMMITTED}
