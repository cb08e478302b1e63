"""What a store can hold beyond bfloat16 states, made on a GPU and compared with a CPU's."""

import pytest
import torch

from dflash_core import extraction
from dflash_core.config import Runtime
from dflash_core.hidden_states import HiddenStates
from dflash_core.storage import Storage
from tests.core.test_extraction import CONFIG, extract, tokenize
from tests.targets import qwen3

pytestmark = pytest.mark.gpu

OPTIONS = {"target_layer_ids": [0, 1], "dtype": "float8_e4m3", "codec": "lz4", "teacher_top_k": 4}


@pytest.mark.parametrize("last", [False, True])
def test_what_a_gpu_stores_is_what_a_cpu_stores(tmp_path, last):
    target = qwen3(tmp_path / "target").model_copy(update={"dtype": "bfloat16"})
    config = CONFIG.model_copy(update={**OPTIONS, "last": last})
    stores = []
    for device in ("cpu", "cuda"):
        root = Storage.from_url(str(tmp_path / device))
        tokens = tokenize(root, target)
        runtime = Runtime(device=device, compile=False)
        dataset, _ = extract(root, tokens, target, config, runtime)
        assert extraction.missing(dataset) == []
        stores.append(HiddenStates.open(dataset, last=last))
    cpu, gpu = stores
    for pack in range(cpu.num_packs):
        tokens, theirs = cpu.read_pack(pack)
        ours, rows = gpu.read_pack(pack)[1], slice(tokens.num_tokens)  # the rest is padding: zeros
        ours, theirs = ours[rows].float(), theirs[rows].float()
        assert torch.cosine_similarity(ours, theirs, dim=-1).min() > 0.98
        first = [store.read_side(pack, "teacher_ids")[rows, 0] for store in stores]
        assert (first[0] == first[1]).mean() > 0.8
        scales = [torch.from_numpy(store.read_side(pack, "scale")) for store in stores]
        torch.testing.assert_close(*scales, rtol=0.1, atol=1e-4)
