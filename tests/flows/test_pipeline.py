"""The pipeline as a user runs it: whole, killed and resumed, on a folder and on S3."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_core.checkpoint import load_drafter
from dflash_core.hidden_states import HiddenStates
from dflash_core.storage import Storage
from tests import targets
from tests.flows import pipeline_case as case
from tests.prefect_server import ready_home

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """One Prefect home for the module."""
    home = ready_home(tmp_path_factory.mktemp("prefect"))
    return {"PREFECT_HOME": str(home), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return targets.qwen3_5_text(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, environment, hybrid):
    """Folder and root of a pipeline that ran in one go on a tiny random hybrid."""
    folder = tmp_path_factory.mktemp("undisturbed")
    params = case.parameters(folder, str(folder / "root"), hybrid)
    log = case.finish(folder, case.start(folder, params, environment))
    return folder, Storage.from_url(str(folder / "root")), log


def test_hybrid_pipeline_ends_with_a_reloadable_drafter_and_its_table(undisturbed):
    _, root, log = undisturbed
    for stage in ("tokens", "hidden", "runs", "evaluations", "exports"):
        assert case.only(root, stage).complete
    export = case.only(root, "exports")
    assert export.storage.exists("z-lab/config.json")
    assert export.storage.exists("z-lab/model.safetensors")
    assert "lossless on 2 of 2 prompts" in " ".join(log.split())
    assert export.url in "".join(log.split())


def test_running_again_does_nothing_again(undisturbed, environment, hybrid):
    folder, root, _ = undisturbed
    before = {stage: case.write_ids(case.only(root, stage)) for stage in ("hidden", "runs")}
    params = case.parameters(folder, str(folder / "root"), hybrid)
    log = case.finish(folder, case.start(folder, params, environment))
    assert before == {stage: case.write_ids(case.only(root, stage)) for stage in ("hidden", "runs")}
    assert log.count("reused") >= 7


def test_killed_in_extract_and_in_train_it_resumes_and_ends_the_same(
    undisturbed, environment, hybrid, tmp_path
):
    _, whole, _ = undisturbed
    folder = tmp_path / "root"
    params = case.parameters(undisturbed[0], str(folder), hybrid)

    process = case.start(tmp_path, params, environment)
    case.kill_when(process, lambda: len(case.committed(folder, "hidden")) >= 3)
    root = Storage.from_url(str(folder))
    hidden = case.only(root, "hidden")
    assert not hidden.complete
    extracted = case.write_ids(hidden)

    process = case.start(tmp_path, params, environment)
    case.kill_when(process, lambda: len(case.committed(folder, "runs")) >= 3)
    run = case.only(root, "runs")
    assert not run.complete
    trained = case.write_ids(run)

    case.finish(tmp_path, case.start(tmp_path, params, environment))
    assert case.write_ids(hidden).items() >= extracted.items(), "a committed pack was done again"
    assert case.write_ids(run).items() >= trained.items(), "a committed interval was done again"
    assert_same_hidden_states(case.only(whole, "hidden"), hidden)
    assert_same_drafter(case.only(whole, "runs"), run)


def test_s3_root_end_to_end_equals_the_local_one(
    undisturbed, environment, hybrid, s3_url, tmp_path
):
    _, whole, _ = undisturbed
    params = case.parameters(undisturbed[0], s3_url, hybrid)
    case.finish(tmp_path, case.start(tmp_path, params, environment))
    root = Storage.from_url(s3_url)
    assert case.only(root, "exports").complete
    assert_same_hidden_states(case.only(whole, "hidden"), case.only(root, "hidden"))
    assert_same_drafter(case.only(whole, "runs"), case.only(root, "runs"))


@pytest.mark.parametrize("family", ["qwen3_5_wrapper", "qwen3_5_moe"])
def test_other_hybrid_families_go_through_the_pipeline(family, environment, undisturbed, tmp_path):
    target = getattr(targets, family)(tmp_path / "target")
    params = case.parameters(undisturbed[0], str(tmp_path / "root"), target)
    log = case.finish(tmp_path, case.start(tmp_path, params, environment))
    assert "lossless on 2 of 2 prompts" in " ".join(log.split())


def assert_same_hidden_states(ours, theirs):
    ours, theirs = HiddenStates.open(ours), HiddenStates.open(theirs)
    assert ours.num_packs == theirs.num_packs > 3
    for index in range(ours.num_packs):
        (pack_a, hidden_a), (pack_b, hidden_b) = ours.read_pack(index), theirs.read_pack(index)
        np.testing.assert_array_equal(pack_a.input_ids, pack_b.input_ids)
        assert torch.equal(hidden_a, hidden_b)


def assert_same_drafter(ours, theirs):
    (a, _, step_a), (b, _, step_b) = load_drafter(ours), load_drafter(theirs)
    assert step_a == step_b
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name]), name
