"""The packed path on a real GPU, with the real kernels. Needs flash-linear-attention for the hybrid targets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity

from dflash_core.config import TargetConfig
from dflash_core.extractor import split_pack
from dflash_core.packed_forward import can_pack, enable_packing, packed_forward
from dflash_core.packing import Pack
from dflash_core.target import gdn_modules, load_body, require_fast_kernels, tap_layers
from tests.targets import llama, qwen3, qwen3_5_moe, qwen3_5_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

GPU = torch.device("cuda")
LENGTHS = [700, 3, 64, 1, 129, 511, 17, 300, 2]
LAYERS = [0, 2, 3]
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "head_dim": 64,
}
HYBRID = {
    **WIDE,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    },
}
BUILDERS = {
    "llama": (llama, WIDE),
    "qwen3": (qwen3, WIDE),
    "qwen3_5_text": (qwen3_5_text, HYBRID),
    "qwen3_5_moe": (qwen3_5_moe, HYBRID),
}


def make_pack():
    length = np.array(LENGTHS, np.int32)
    start = np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int32)
    ids = np.random.default_rng(0).integers(0, 256, 2048).astype(np.uint32)
    ids[length.sum() :] = 0
    return Pack(0, ids, np.zeros(2048, np.uint8), start, length, np.arange(len(length)))


@pytest.fixture(params=BUILDERS)
def body(request, tmp_path):
    build, changes = BUILDERS[request.param]
    saved = build(tmp_path, **changes)
    target = TargetConfig(id=saved.id, dtype="bfloat16")
    loaded = load_body(target, LAYERS, GPU)
    if gdn_modules(loaded):
        pytest.importorskip("fla")
    return loaded


def states(body, forward):
    """Float32 [T, L, H] of the taps."""
    with torch.inference_mode(), tap_layers(body, LAYERS) as taps:
        forward()
    return taps.stack()[0].float()


def test_a_packed_row_gives_the_states_of_single_samples(body):
    pack = make_pack()
    require_fast_kernels(body, GPU, allow_slow=False)
    assert can_pack(body, GPU, torch.bfloat16)
    enable_packing(body)
    whole_TLH = states(body, lambda: packed_forward(body, pack, GPU))
    assert len(whole_TLH) == pack.num_tokens
    for first, sample in split_pack(pack, 1):
        ids = torch.from_numpy(sample.input_ids.astype(np.int64)).to(GPU)[None]
        rows_TLH = whole_TLH[first : first + sample.num_tokens]
        alone_TLH = states(body, lambda pack=sample: packed_forward(body, pack, GPU))
        # A neighbour's leak through convolution or attention would show in the first tokens.
        assert cosine_similarity(rows_TLH, alone_TLH, dim=-1).min() > 0.998, sample.num_tokens
        # Which experts a random router takes changes with the last bit, so other kernels tell nothing.
        if "moe" not in body.config.model_type:
            others_TLH = states(body, lambda ids=ids: body(input_ids=ids, use_cache=False))
            assert cosine_similarity(rows_TLH, others_TLH, dim=-1).mean() > 0.99, sample.num_tokens


def test_a_packed_forward_never_waits_for_the_device(body):
    pack = make_pack()
    enable_packing(body)
    with torch.inference_mode():
        packed_forward(body, pack, GPU)  # compiles and tunes kernels
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            packed_forward(body, pack, GPU)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_extraction_on_a_gpu_takes_the_packed_path(tmp_path):
    """End to end: needs zarr for tokens and metadata."""
    pytest.importorskip("zarr")
    pytest.importorskip("fla")
    from dflash_core import extraction
    from dflash_core.config import Runtime
    from dflash_core.extractor import Extractor
    from dflash_core.hidden_states import HiddenStates
    from dflash_core.storage import Storage
    from tests.core.test_extraction import tokenize

    target = TargetConfig(id=qwen3_5_text(tmp_path / "t", **HYBRID).id, dtype="bfloat16")
    root = Storage.from_url(str(tmp_path / "root"))
    tokens = tokenize(root, target)
    config = extraction.ExtractConfig(target_layer_ids=LAYERS, chunk_rows=32)
    dataset = extraction.plan(root, "test", tokens, target, config)
    extractor = Extractor(dataset, tokens, target, Runtime(device="cuda"))
    extractor.extract(extraction.missing(dataset))
    extraction.seal(dataset)
    assert extractor.path == "packed"
    pack, hidden = HiddenStates.open(dataset).read_pack(0)
    assert hidden[: pack.num_tokens].any(dim=-1).all()
