"""What an exported directory computes by z-lab's and speculators' definitions, written out with nothing of ours.

One block at a time, float64, plain loops over who sees whom. It reads config.json and model.safetensors by
itself, so a mistake in our writer and the same mistake in our reader do not cancel out.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


class Oracle:
    """A drafter as its directory describes it."""

    def __init__(self, folder: Path) -> None:
        body = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        self.weights = {name: _value(name, stored) for name in stored if "_scale" not in name}
        if "speculators_model_type" in body:
            self.terms = body["transformer_layer_config"]
            self.block_size, self.mask_token_id = body["block_size"], body["mask_token_id"]
            self.taps = [m - 1 for m in body["aux_hidden_state_layer_ids"]]
            non_causal = body["sliding_window_non_causal"]
            self.causal = {"full_attention": False, "sliding_attention": not non_causal}
        else:
            self.terms, section = body, body["dflash_config"]
            self.block_size, self.mask_token_id = section["block_size"], section["mask_token_id"]
            self.taps = section["target_layer_ids"]
            told = body.get("is_causal")
            self.causal = {
                "full_attention": bool(told),
                "sliding_attention": True if told is None else told,
            }

    def logits(self, taps_TC, embeds_KH, head_VH) -> torch.Tensor:
        """Logits [K, V] of the block that stands right behind the context rows [T, C]."""
        terms, weights = self.terms, self.weights
        context = _norm(
            taps_TC.double() @ weights["fc.weight"].T, weights["hidden_norm.weight"], terms
        )
        num_context = len(context)
        x = embeds_KH.double()
        for index, kind in enumerate(terms["layer_types"]):
            part = {
                name.removeprefix(f"layers.{index}."): tensor
                for name, tensor in weights.items()
                if name.startswith(f"layers.{index}.")
            }
            rows = _norm(x, part["input_layernorm.weight"], terms)
            x = x + self._attend(part, kind, rows, torch.cat((context, rows)), num_context)
            rows = _norm(x, part["post_attention_layernorm.weight"], terms)
            gate = torch.nn.functional.silu(rows @ part["mlp.gate_proj.weight"].T)
            up = rows @ part["mlp.up_proj.weight"].T
            x = x + (gate * up) @ part["mlp.down_proj.weight"].T
        return _norm(x, weights["norm.weight"], terms) @ head_VH.double().T

    def _attend(self, part, kind, queries, keys, num_context):
        heads, groups = self.terms["num_attention_heads"], self.terms["num_key_value_heads"]
        width, window = self.terms["head_dim"], self.terms["sliding_window"]
        q = (queries @ part["self_attn.q_proj.weight"].T).view(len(queries), heads, width)
        k = (keys @ part["self_attn.k_proj.weight"].T).view(len(keys), groups, width)
        v = (keys @ part["self_attn.v_proj.weight"].T).view(len(keys), groups, width)
        q = _norm(q, part["self_attn.q_norm.weight"], self.terms)
        k = _norm(k, part["self_attn.k_norm.weight"], self.terms)
        out = torch.zeros(len(queries), heads, width, dtype=torch.float64)
        for j in range(len(queries)):
            here = num_context + j
            seen = []
            for there in range(len(keys)):
                in_block = there >= num_context
                if kind == "sliding_attention" and abs(here - there) >= window:
                    continue
                if in_block and self.causal[kind] and there > here:
                    continue
                seen.append(there)
            for head in range(heads):
                group = head * groups // heads
                turned = self._rotate(q[j, head], here)
                scores = torch.stack([turned @ self._rotate(k[i, group], i) for i in seen])
                shares = (scores * width**-0.5).softmax(0)
                out[j, head] = sum(s * v[i, group] for s, i in zip(shares, seen, strict=True))
        return out.flatten(1) @ part["self_attn.o_proj.weight"].T

    def _rotate(self, vector, position):
        half = len(vector) // 2
        theta = self.terms["rope_parameters"]["rope_theta"]
        assert theta == self.terms["rope_theta"]
        angles = position * theta ** -(torch.arange(half, dtype=torch.float64) / half)
        left, right = vector[:half], vector[half:]
        return torch.cat(
            (
                left * angles.cos() - right * angles.sin(),
                right * angles.cos() + left * angles.sin(),
            )
        )


def _value(name, stored):
    tensor = stored[name].double()
    scale = stored.get(f"{name}_scale")
    return tensor if scale is None else tensor * scale.double()


def _norm(x, weight, terms):
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + terms["rms_norm_eps"]).sqrt()


def random_pack_logits(folder: Path, pack, embedding, head) -> torch.Tensor:
    """Logits [N, K, V], float64, of the blocks of a `RandomPack`."""
    oracle, blocks = Oracle(folder), []
    if "lm_head.weight" in oracle.weights:
        head = oracle.weights["lm_head.weight"]
    for anchor, tokens in zip(pack.anchors_N.tolist(), pack.token_ids_NK, strict=True):
        first = anchor - int(pack.positions_T[anchor])
        blocks.append(oracle.logits(pack.taps_TC[first:anchor], embedding[tokens], head))
    return torch.stack(blocks)
