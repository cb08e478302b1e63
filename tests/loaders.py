"""Exported directories through the loaders of others: logits of the random pack, or why there are none.

The packages are not dependencies; `make .venv/peers` installs them apart, to be named in PYTHONPATH.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from dflash_core.export import RandomPack, random_pack, random_pack_logits
from dflash_core.import_drafter import read_drafter
from tests.drafter_oracle import random_pack_logits as oracle_logits


class Refused(Exception):
    """A loader does not read this directory; the text says why."""


def ours(folder: Path, embedding: Tensor, head: Tensor) -> Tensor:
    """This project's reader."""
    imported = read_drafter(folder)
    own = imported.head_DH
    return random_pack_logits(imported.build(), embedding, head if own is None else own)


def oracle(folder: Path, embedding: Tensor, head: Tensor) -> Tensor:
    """The formats' definitions, written out in plain loops."""
    return oracle_logits(folder, random_pack(read_drafter(folder).shape), embedding, head)


def zlab(folder: Path, embedding: Tensor, head: Tensor) -> Tensor:
    """The z-lab package's own class, one block at a time, as its decoding loop calls it."""
    from dflash.model import DFlashDraftModel

    body = json.loads((folder / "config.json").read_text())
    if "speculators_model_type" in body:
        raise Refused("does not read the speculators layout")
    if "quantization_config" in body:
        import compressed_tensors  # noqa: F401 - Transformers' own message comes late and is long
    model = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.modules():
        # Activations are rounded, too, where a drafter is served; here weights are compared.
        if scheme := getattr(module, "quantization_scheme", None):
            scheme.input_activations = None
    pack, logits = random_pack(read_drafter(folder).shape), []
    for anchor, tokens in zip(pack.anchors_N.tolist(), pack.token_ids_NK, strict=True):
        first = anchor - int(pack.positions_T[anchor])
        hidden = model(
            position_ids=torch.arange(anchor - first + model.block_size)[None],
            noise_embedding=embedding[tokens][None].float(),
            target_hidden=pack.taps_TC[None, first:anchor],
        )
        logits.append(hidden[0] @ head.float().T)
    return torch.stack(logits).detach()


def speculators(folder: Path, embedding: Tensor, head: Tensor) -> Tensor:
    """The speculators package's own class, over the whole pack at once, as its trainer calls it."""
    from speculators.model import SpeculatorModel

    if "speculators_model_type" not in json.loads((folder / "config.json").read_text()):
        raise Refused(
            "does not read the z-lab layout (converts it, one full copy with the target's tensors)"
        )
    model = SpeculatorModel.from_pretrained(str(folder), dtype=torch.float32).eval()
    pack = random_pack(read_drafter(folder).shape)
    return _whole_pack(model, pack)


@torch.no_grad()
def _whole_pack(model, pack: RandomPack) -> Tensor:
    """Their forward with our block inputs: the parts of `_backbone_forward` that do not draw anchors."""
    from speculators.models.attention import create_float_mask

    size, rows = model.block_size, len(pack.taps_TC)
    documents = ((pack.positions_T == 0).cumsum(0) - 1)[None]
    model._create_mask_fn = create_float_mask
    model.config.transformer_layer_config._attn_implementation = "eager"
    masks = {}
    for kind, window in (("full", None), ("sliding", model.sliding_window)):
        masks[kind] = model._create_attention_mask(
            document_ids=documents,
            total_seq_len=rows,
            anchor_positions=pack.anchors_N,
            device=documents.device,
            sliding_window=window,
            sliding_window_non_causal=model.sliding_window_non_causal,
        )
    slots = (pack.positions_T[pack.anchors_N, None] + torch.arange(size)).flatten()
    positions = torch.cat((pack.positions_T, slots))[None]
    context = model.hidden_norm(model.fc(pack.taps_TC[None]))
    x = model.embed_tokens(pack.token_ids_NK.flatten()[None])
    rope = model.rotary_emb(context, positions)
    for index, layer in enumerate(model.layers):
        kind = "sliding" if index in model.sliding_window_indices else "full"
        x = layer(
            hidden_states=x,
            target_hidden=context,
            attention_mask=masks[kind],
            position_ids=positions,
            use_cache=False,
            position_embeddings=rope,
        )
    return model.lm_head(model.norm(x))[0].unflatten(0, pack.token_ids_NK.shape)


LOADERS = {
    "this project": ours,
    "plain oracle": oracle,
    "z-lab 0.1.0": zlab,
    "speculators 0.9.0": speculators,
}
