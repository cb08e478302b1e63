"""Exported directories: what they say, and that they compute what was trained."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from dflash_core import export
from dflash_core.checkpoint import load_drafter
from dflash_core.config import ExportConfig
from dflash_core.errors import CorruptError, IncompleteError, InputError, MismatchError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.target import load_embedding_and_head, text_config
from tests import targets
from tests.runs import sealed_run

CONTRACTS = ["full-bidir", "swa-causal", "mixed", "swa-bidir"]
LAYOUT = "z-lab"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path))


def exported(root, target, **drafter):
    run = sealed_run(root, target, **drafter)
    dataset = export.plan(root, "demo", run, target, ExportConfig())
    export.run(dataset, run, target)
    return dataset, run


def config_of(dataset):
    return json.loads(dataset.storage.get(f"{LAYOUT}/config.json"))


@pytest.mark.parametrize("attention", CONTRACTS)
def test_the_directory_computes_what_was_trained_rounded_to_bfloat16(root, target, attention):
    dataset, run = exported(root, target, attention=attention)
    facts = export.seal(dataset)["facts"]
    assert facts["layouts"] == [LAYOUT]
    assert facts["max_logit_difference"] == 0.0
    loaded, shape = export.load_exported(dataset.storage.child(LAYOUT))
    trained, wanted, _ = load_drafter(run)
    assert shape.layer_types == wanted.layer_types
    assert shape.attention == attention
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name
    ends = load_embedding_and_head(target)
    exact = export.random_block_logits(trained, *ends)
    rounded = export.random_block_logits(loaded, *ends)
    assert 0 < (exact - rounded).abs().max() < 0.1 * exact.abs().max()


def test_config_holds_exactly_these_keys_and_values(root, target):
    dataset, _ = exported(root, target, attention="mixed", num_hidden_layers=3)
    assert config_of(dataset) == {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": 5,
        "dflash_config": {"block_size": 5, "mask_token_id": 259, "target_layer_ids": [0, 1, 3]},
        "num_target_layers": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 6,
        "use_sliding_window": True,
        "max_window_layers": 3,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rope_scaling": None,
        "max_position_embeddings": 4096,
        "vocab_size": 272,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 257,
        "pad_token_id": 258,
    }


@pytest.mark.parametrize("attention", CONTRACTS)
def test_causality_is_left_to_the_engines_default_unless_it_would_be_wrong(root, target, attention):
    """The default everywhere: sliding layers are causal in the block, full ones are not."""
    dataset, run = exported(root, target, attention=attention)
    body, shape = config_of(dataset), load_drafter(run)[1]
    for kind in set(body["layer_types"]):
        engine = body.get("is_causal", kind == "sliding_attention")
        assert engine == shape.causal_in_block(kind)
    assert ("is_causal" in body) == (attention == "swa-bidir")
    assert (body["sliding_window"] is None) == (attention == "full-bidir")


def test_tensors_have_the_z_lab_names_in_bfloat16_without_embedding_and_head(root, target):
    dataset, _ = exported(root, target, num_hidden_layers=1)
    tensors = load(dataset.storage.get(f"{LAYOUT}/model.safetensors"))
    layer = {
        "input_layernorm": [32],
        "post_attention_layernorm": [32],
        "self_attn.q_proj": [32, 32],
        "self_attn.k_proj": [16, 32],
        "self_attn.v_proj": [16, 32],
        "self_attn.o_proj": [32, 32],
        "self_attn.q_norm": [8],
        "self_attn.k_norm": [8],
        "mlp.gate_proj": [48, 32],
        "mlp.up_proj": [48, 32],
        "mlp.down_proj": [32, 48],
    }
    expected = {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
    expected |= {"fc.weight": [32, 96], "hidden_norm.weight": [32], "norm.weight": [32]}
    assert {name: list(tensor.shape) for name, tensor in tensors.items()} == expected
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_transformers_reads_the_config_as_qwen3(root, target):
    from transformers import AutoConfig

    dataset, _ = exported(root, target, attention="mixed")
    config = AutoConfig.from_pretrained(dataset.storage.local_path / LAYOUT)
    assert config.model_type == "qwen3"
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 6
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    assert config.dflash_config["target_layer_ids"] == [0, 1, 3]


def test_an_interrupted_export_is_written_over_and_a_finished_one_is_left_alone(root, target):
    run = sealed_run(root, target)
    dataset = export.plan(root, "demo", run, target, ExportConfig())
    dataset.storage.put(f"{LAYOUT}/model.safetensors", b"half")
    with pytest.raises(IncompleteError, match="z-lab"):
        export.seal(dataset)
    seen = []
    export.run(dataset, run, target, progress=lambda *numbers: seen.append(numbers[:2]))
    assert seen == [(1, 1)]
    export.seal(dataset)
    before = {info.key: dataset.storage.get(info.key) for info in dataset.storage.list()}
    again = export.plan(root, "demo", run, target, ExportConfig())
    assert again.complete
    assert export.missing(again) == []
    export.run(again, run, target)
    export.seal(again)
    assert {info.key: again.storage.get(info.key) for info in again.storage.list()} == before


class Damaging(Storage):
    """Writes other weights than it was given."""

    def put(self, key, data):
        if key.endswith("model.safetensors"):
            tensors = load(bytes(data))
            tensors["norm.weight"][3] *= 1.5
            data = save(tensors)
        super().put(key, data)

    def child(self, prefix):
        plain = super().child(prefix)
        return Damaging(plain.url, plain._store, plain._prefix)


def test_an_export_that_reloads_to_other_logits_is_refused(root, target):
    run = sealed_run(root, target)
    dataset = export.plan(root, "demo", run, target, ExportConfig())
    damaging = Damaging(dataset.storage.url, dataset.storage._store, dataset.storage._prefix)
    dataset.storage = damaging
    with pytest.raises(CorruptError, match="other logits"):
        export.run(dataset, run, target)
    assert dataset.committed() == set()


def test_a_config_that_reads_as_another_shape_is_refused(root, target, monkeypatch):
    run = sealed_run(root, target, attention="mixed")
    dataset = export.plan(root, "demo", run, target, ExportConfig())
    genuine = export.config_json
    monkeypatch.setattr(export, "config_json", lambda *a: {**genuine(*a), "sliding_window": 7})
    with pytest.raises(MismatchError, match="sliding_window: have 7, want 6"):
        export.run(dataset, run, target)
    assert dataset.committed() == set()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "README.md"])
def test_a_file_altered_after_its_commit_is_found_before_the_seal(root, target, name):
    dataset, _ = exported(root, target)
    data = bytearray(dataset.storage.get(f"{LAYOUT}/{name}"))
    data[-2] ^= 1
    dataset.storage.put(f"{LAYOUT}/{name}", data)
    with pytest.raises(CorruptError, match=name):
        export.seal(dataset)
    dataset.storage.delete([f"{LAYOUT}/{name}"])
    with pytest.raises(CorruptError, match=name):
        export.seal(dataset)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"model_type": "qwen3_5_text"}, "qwen3_5_text"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"dflash_config": {"conv_kernel_size": 2}}, "conv_kernel_size"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"is_causal": True}, "is_causal True"),
        ({"num_target_layers": 3}, "target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "fc.weight has shape"),
        ({"head_dim": 4}, "q_norm|q_proj|k_norm|k_proj"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}, "layers.2.*missing"),
    ],
)
def test_directories_that_would_compute_something_else_are_refused(root, target, change, message):
    dataset, _ = exported(root, target)
    body = config_of(dataset)
    for key, value in change.items():
        body[key] = {**body[key], **value} if key == "dflash_config" else value
    dataset.storage.put(f"{LAYOUT}/config.json", json.dumps(body).encode())
    with pytest.raises((InputError, CorruptError), match=message):
        export.load_exported(dataset.storage.child(LAYOUT))


def test_older_directories_with_keys_at_the_top_level_load(root, target):
    dataset, _ = exported(root, target)
    body = config_of(dataset)
    section = body.pop("dflash_config")
    del body["rope_parameters"]
    dataset.storage.put(f"{LAYOUT}/config.json", json.dumps({**section, **body}).encode())
    _, shape = export.load_exported(dataset.storage.local_path / LAYOUT)
    assert shape.target_layer_ids == (0, 1, 3)
    assert shape.mask_token_id == 259


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        export.load_exported(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(InputError, match=r"config\.json"):
        export.load_exported(tmp_path)


def test_a_run_of_another_target_is_refused(root, target, tmp_path_factory):
    other = targets.llama(tmp_path_factory.mktemp("other"))
    run = sealed_run(root, target)
    with pytest.raises(MismatchError, match="target_config_hash"):
        export.plan(root, "demo", run, other, ExportConfig())


def fake_evaluation(root, run_fingerprint):
    evaluation = Dataset.create(
        root,
        "evaluations",
        "demo",
        version=1,
        config={"max_new_tokens": 64, "thinking": False},
        inputs={"run": run_fingerprint},
    )
    after = {
        "acceptance_length": 3.456,
        "interval": [3.0, 3.9],
        "num_prompts": 7,
        "num_lossless": 7,
        "speed_up": 1.75,
    }
    evaluation.seal([], {"block_size": 5, "baseline": "plain decoding", "after": after})
    return evaluation


def test_the_model_card_quotes_the_evaluation_and_the_provenance_names_every_input(root, target):
    run = sealed_run(root, target)
    evaluation = fake_evaluation(root, run.fingerprint)
    dataset = export.plan(root, "demo", run, target, ExportConfig(), evaluation)
    export.run(dataset, run, target, evaluation)
    card = dataset.storage.get(f"{LAYOUT}/README.md").decode()
    assert "**3.46** of 5" in card
    assert "3.00 to 3.90" in card
    assert run.path in card
    provenance = json.loads(dataset.storage.get(f"{LAYOUT}/provenance.json"))
    assert provenance["datasets"][run.path]["fingerprint"] == run.fingerprint
    assert provenance["datasets"][run.path]["inputs"] == run.request["inputs"]
    assert provenance["evaluation"]["fingerprint"] == evaluation.fingerprint
    assert provenance["target"]["target_revision"].startswith("content:")
    without = export.plan(root, "demo", run, target, ExportConfig())
    assert without.path != dataset.path


def test_an_evaluation_of_another_run_is_refused(root, target):
    run = sealed_run(root, target)
    evaluation = fake_evaluation(root, "f" * 12)
    with pytest.raises(MismatchError, match="f" * 12):
        export.plan(root, "demo", run, target, ExportConfig(), evaluation)


def test_the_random_block_notices_a_change_of_any_weight(root, target):
    run = sealed_run(root, target, attention="mixed")
    drafter, _, _ = load_drafter(run)
    ends = load_embedding_and_head(target)
    before = export.random_block_logits(drafter, *ends)
    assert before.shape == (5, text_config(target).vocab_size)
    assert np.isfinite(before.numpy()).all()
    for name, parameter in drafter.named_parameters():
        kept = parameter.data.clone()
        parameter.data.view(-1)[0] += 1.0
        changed = export.random_block_logits(drafter, *ends)
        assert (changed - before).abs().max() > export.MAX_LOGIT_DIFFERENCE, name
        parameter.data.copy_(kept)
