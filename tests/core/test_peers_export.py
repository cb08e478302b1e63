"""Exported directories through the z-lab package and through speculators: their own classes, our logits.

`make test-peers` installs both apart and runs this.
"""

import pytest
import torch

from dflash_core.config import ExportConfig
from dflash_core.storage import Storage
from dflash_core.target import load_embedding_and_head
from tests import loaders, targets
from tests.core.test_import_drafter import exported
from tests.runs import sealed_run

pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


def differences(folder, target, loader):
    ends = load_embedding_and_head(target)
    want = loaders.ours(folder, *ends)
    return (want - loader(folder, *ends)).abs().max().item()


@pytest.mark.parametrize("attention", ["full-bidir", "swa-causal", "mixed", "swa-bidir"])
def test_the_z_lab_package_computes_our_logits(tmp_path, target, attention):
    pytest.importorskip("dflash.model", reason="the z-lab package is not installed")
    folders, _ = exported(tmp_path, target, ["z-lab"], attention=attention, factor=1.1234567)
    assert differences(folders["z-lab"], target, loaders.zlab) <= 1e-5


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_compressed_tensors_multiplies_our_quantised_weights_out(tmp_path, target, weights):
    pytest.importorskip("dflash.model", reason="the z-lab package is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    config = ExportConfig(layouts=["z-lab"], weights=weights)
    folders, _ = exported(tmp_path, target, ["z-lab"], config=config, factor=1.1234567)
    assert differences(folders["z-lab"], target, loaders.zlab) <= 1e-5


@pytest.mark.parametrize("attention", ["full-bidir", "swa-causal", "swa-bidir"])
def test_the_speculators_package_computes_our_logits(tmp_path, target, attention):
    """Windows longer than a document: theirs is counted from the anchor for all slots, ours from each."""
    pytest.importorskip("speculators.model", reason="speculators is not installed")
    config = ExportConfig(layouts=["speculators"], target_name=target.id)
    options = {"attention": attention, "sliding_window": 64, "factor": 1.1234567}
    run = sealed_run(Storage.from_url(str(tmp_path)), target, **options)
    folders, _ = exported(tmp_path, target, ["speculators"], run=run, config=config)
    assert differences(folders["speculators"], target, loaders.speculators) <= 1e-5


def test_windows_of_speculators_are_counted_from_the_anchor(tmp_path, target):
    """The one difference, at most block_size - 1 rows at the far end of a window; documented."""
    pytest.importorskip("speculators.model", reason="speculators is not installed")
    config = ExportConfig(layouts=["speculators"], target_name=target.id)
    run = sealed_run(
        Storage.from_url(str(tmp_path)), target, attention="swa-causal", sliding_window=6
    )
    folders, _ = exported(tmp_path, target, ["speculators"], run=run, config=config)
    ends = load_embedding_and_head(target)
    ours = loaders.ours(folders["speculators"], *ends)
    theirs = loaders.speculators(folders["speculators"], *ends)
    assert (ours - theirs).abs().max() > 1e-3
    assert torch.isfinite(theirs).all()
