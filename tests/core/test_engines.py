"""What each engine makes of each layout and contract, and that a wrong reading is refused before it serves."""

from types import SimpleNamespace

import pytest

from dflash_core.engines import ENGINES, Unreadable, require_servable, serving_notes, verdict
from dflash_core.errors import InputError
from dflash_core.layouts import LAYOUTS
from tests.drafters import ATTENTION, tiny_shape

TARGET = SimpleNamespace(max_position_embeddings=512, architectures=["Qwen3ForCausalLM"])


def config(layout, attention, **changes):
    shape = tiny_shape(attention=attention, **changes)
    return LAYOUTS[layout].config_json(shape, TARGET, "owner/target", None), shape


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("attention", ATTENTION)
def test_every_engine_serves_the_z_lab_layout_as_trained(engine, attention):
    body, shape = config("z-lab", attention)
    assert verdict(engine, body, shape) == []
    require_servable(body, shape)


@pytest.mark.parametrize("attention", ["full-bidir", "swa-causal", "swa-bidir"])
def test_vllm_serves_the_speculators_layout_as_trained_where_one_causality_fits_all(attention):
    body, shape = config("speculators", attention)
    assert verdict("vLLM 0.33", body, shape) == []
    for engine in ("SGLang 0.5.23", "z-lab 0.1.0"):
        with pytest.raises(Unreadable, match="speculators layout"):
            verdict(engine, body, shape)
    require_servable(body, shape)


def test_the_mixed_contract_is_refused_in_the_speculators_layout_with_the_reason():
    body, shape = config("speculators", "mixed")
    with pytest.raises(InputError, match="layer 1 would have full attention, causal in the block"):
        require_servable(body, shape)
    # Neither value of the flag, nor its absence, saves it.
    for flag in (True, None):
        changed = {**body, "sliding_window_non_causal": flag}
        if flag is None:
            del changed["sliding_window_non_causal"]
        with pytest.raises(InputError, match="layer 0 would have a window of 3, not causal"):
            require_servable(changed, shape)


@pytest.mark.parametrize(
    ("layout", "attention", "change", "message"),
    [
        ("z-lab", "mixed", {"is_causal": True}, "layer 1 would have full attention, causal"),
        ("z-lab", "mixed", {"is_causal": False}, "layer 0 would have a window of 3, not causal"),
        (
            "z-lab",
            "full-bidir",
            {"dflash_config": {"use_swa": True, "swa_window_size": 3}},
            "window of 3",
        ),
        ("z-lab", "full-bidir", {"dflash_config": {"causal": True}}, "causal in the block"),
        ("z-lab", "swa-causal", {"sliding_window": 4}, "window of 4"),
        ("z-lab", "full-bidir", {"dflash_config": {"block_size": 8}}, "block_size would be 8"),
        (
            "z-lab",
            "full-bidir",
            {"dflash_config": {"target_layer_ids": None}},
            "target_layer_ids would be None",
        ),
        (
            "z-lab",
            "full-bidir",
            {"rope_parameters": {"rope_theta": 1e4}},
            "rope_theta would be 10000.0",
        ),
        ("speculators", "full-bidir", {"sliding_window_non_causal": False}, "causal in the block"),
        (
            "speculators",
            "swa-causal",
            {"aux_hidden_state_layer_ids": [0, 2, 3]},
            "target_layer_ids",
        ),
        ("speculators", "swa-causal", {"mask_token_id": None}, "mask_token_id would be None"),
    ],
)
def test_a_config_that_an_engine_would_read_otherwise_is_refused(
    layout, attention, change, message
):
    body, shape = config(layout, attention)
    for key, value in change.items():
        body[key] = {**body[key], **value} if isinstance(value, dict) else value
    with pytest.raises(InputError, match=message):
        require_servable(body, shape)


def test_a_config_that_no_engine_loads_is_refused():
    body, shape = config("z-lab", "full-bidir")
    with pytest.raises(InputError, match="no engine loads"):
        require_servable({**body, "model_type": "qwen3_5_text"}, shape)


def test_notes_say_what_vllm_needs_at_its_start():
    assert serving_notes(tiny_shape(attention="swa-causal")) == []
    notes = " ".join(serving_notes(tiny_shape(attention="mixed", head_dim=20)))
    assert "flash_attn" in notes
    assert "V2 model runner" in notes
    assert "head_dim 20" in notes
