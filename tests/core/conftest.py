"""Fixtures that tests of several modules share."""

import pytest
import torch

from dflash_core.target import load_causal_lm
from tests import targets


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Tiny random targets by family, each made once."""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = load_causal_lm(targets.FAMILIES[family](folder), torch.device("cpu"))
        return made[family]

    return get
