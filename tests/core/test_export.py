"""Exported directories: what they say, and that they compute what was trained."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from dflash_core import export, model_card
from dflash_core.checkpoint import load_drafter, read_shape
from dflash_core.config import ExportConfig
from dflash_core.errors import CorruptError, IncompleteError, InputError, MismatchError
from dflash_core.import_drafter import read_drafter
from dflash_core.manifest import Dataset
from dflash_core.model_card import lineage
from dflash_core.publish import publish
from dflash_core.storage import Storage
from dflash_core.target import load_embedding_and_head, load_tokenizer, text_config
from tests import targets
from tests.runs import empty_store, sealed_run, sealed_tokens_run

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
    imported = read_drafter(dataset.storage.child(LAYOUT))
    loaded, shape = imported.build(), imported.shape
    trained, wanted, _ = load_drafter(run)
    assert shape.layer_types == wanted.layer_types
    assert shape.attention == attention
    for name, tensor in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor.bfloat16().float()), name
    ends = load_embedding_and_head(target)
    exact = export.random_pack_logits(trained, *ends)
    rounded = export.random_pack_logits(loaded, *ends)
    assert 0 < (exact - rounded).abs().mean() < 0.1 * exact.abs().mean()


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


def test_weights_above_the_limit_of_a_file_are_split_with_an_index(root, target, monkeypatch):
    whole, _ = exported(root, target)
    tensors = load(whole.storage.get(f"{LAYOUT}/model.safetensors"))
    largest = max(tensor.nbytes for tensor in tensors.values())
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 2 * largest)
    run = sealed_run(root.child("split"), target)
    dataset = export.plan(root.child("split"), "demo", run, target, ExportConfig())
    export.run(dataset, run, target)
    facts = export.seal(dataset)["facts"]
    index = json.loads(dataset.storage.get(f"{LAYOUT}/model.safetensors.index.json"))
    count = len(set(index["weight_map"].values()))
    assert count > 2
    assert f"model-00001-of-{count:05d}.safetensors" in facts["files"][LAYOUT]
    assert "model.safetensors" not in facts["files"][LAYOUT]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, tensor in tensors.items():
        part = load(dataset.storage.get(f"{LAYOUT}/{index['weight_map'][name]}"))
        assert sum(other.nbytes for other in part.values()) <= 2 * largest
        assert torch.equal(part[name], tensor)
    ours = read_drafter(dataset.storage.child(LAYOUT)).state_dict
    theirs = read_drafter(whole.storage.child(LAYOUT)).state_dict
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    copy = Storage.from_url(publish(dataset, str(root.local_path / "copy"))[0])
    assert read_drafter(copy).content == read_drafter(dataset.storage.child(LAYOUT)).content


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
    genuine = export._config_json
    monkeypatch.setattr(export, "_config_json", lambda *a: {**genuine(*a), "sliding_window": 7})
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
        (
            {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6},
            "layer_types",
        ),
        ({"is_causal": True}, "full True"),
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
        read_drafter(dataset.storage.child(LAYOUT))


def test_older_directories_with_keys_at_the_top_level_load(root, target):
    dataset, _ = exported(root, target)
    body = config_of(dataset)
    section = body.pop("dflash_config")
    del body["rope_parameters"]
    dataset.storage.put(f"{LAYOUT}/config.json", json.dumps({**section, **body}).encode())
    shape = read_drafter(dataset.storage.local_path / LAYOUT).shape
    assert shape.target_layer_ids == (0, 1, 3)
    assert shape.mask_token_id == 259


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    with pytest.raises(InputError, match="nowhere"):
        read_drafter(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(InputError, match=r"config\.json"):
        read_drafter(tmp_path)


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
        version=2,
        config={"max_new_tokens": 64},
        inputs={"run": run_fingerprint},
    )
    after = {
        "acceptance_length": 3.456,
        "interval": [3.0, 3.9],
        "num_prompts": 7,
        "num_lossless": 7,
        "speed_up": 1.75,
        "speed_up_interval": [1.5, 2.0],
        "differences": [],
    }
    sampled = {**after, "acceptance_length": 2.346, "num_lossless": None}
    modes = [
        {"set": "held-out", "thinking": False, "temperature": t, "num_prompts": 7, "drafters": {"after": part}}
        for t, part in ((0.0, after), (0.7, sampled))
    ]  # fmt: skip
    facts = {"block_size": 5, "baseline": "plain decoding", "after": after, "modes": modes}
    evaluation.seal([], facts)
    return evaluation


def test_the_model_card_quotes_the_evaluation_and_the_provenance_names_every_input(root, target):
    run = sealed_run(root, target)
    evaluation = fake_evaluation(root, run.fingerprint)
    dataset = export.plan(root, "demo", run, target, ExportConfig(), evaluation)
    export.run(dataset, run, target, evaluation)
    card = dataset.storage.get(f"{LAYOUT}/README.md").decode()
    assert "**3.46** of 5" in card
    assert "3.00 to 3.90" in card
    assert "greedy, thinking off, 64 tokens at most" in card
    assert "| held-out | temperature 0.7, thinking off | 7 | 2.35 [3.00, 3.90] |" in card
    assert run.path in card
    provenance = json.loads(dataset.storage.get(f"{LAYOUT}/provenance.json"))
    assert provenance["datasets"][run.path]["fingerprint"] == run.fingerprint
    assert provenance["datasets"][run.path]["inputs"] == run.request["inputs"]
    assert provenance["evaluation"]["fingerprint"] == evaluation.fingerprint
    assert provenance["target"]["target_revision"].startswith("content:")
    without = export.plan(root, "demo", run, target, ExportConfig())
    assert without.path != dataset.path


@pytest.mark.parametrize(
    ("learned", "text"),
    [
        (["raw"], "Answers are those of the sources."),
        (["new"], "Answers are the target's own."),
        (["raw", "new"], "Of some corpora the answers are the target's own."),
        (["elsewhere"], "Whose answers were learned is not known here."),
    ],
)
def test_the_card_says_whose_answers_the_tokens_hold(learned, text):
    source = {"name": "s", "path": "owner/set", "revision": "main"}
    datasets = {
        "corpora/c-raw": {"fingerprint": "raw", "config": {"sources": [source]}, "inputs": {}},
        "corpora/c-regenerated-new": {
            "fingerprint": "new",
            "config": {"max_new_tokens": 8},
            "inputs": {"corpus": "raw"},
        },
    }
    for fingerprint in learned:
        datasets[f"tokens/c-{fingerprint}"] = {"inputs": {"corpus": fingerprint}}
    said = model_card._data({"datasets": datasets})
    assert said == f"- s: `owner/set` at main\n\n{text}"


def test_an_evaluation_of_another_run_is_refused(root, target):
    run = sealed_run(root, target)
    evaluation = fake_evaluation(root, "f" * 12)
    with pytest.raises(MismatchError, match="f" * 12):
        export.plan(root, "demo", run, target, ExportConfig(), evaluation)


def test_the_random_pack_notices_a_change_of_any_weight(root, target):
    run = sealed_run(root, target, attention="mixed")
    drafter, _, _ = load_drafter(run)
    ends = load_embedding_and_head(target)
    before = export.random_pack_logits(drafter, *ends)
    assert before.shape == (4, 5, text_config(target).vocab_size)
    assert np.isfinite(before.numpy()).all()
    for name, parameter in drafter.named_parameters():
        kept = parameter.data.clone()
        parameter.data.view(-1)[0] += 1.0
        changed = export.random_pack_logits(drafter, *ends)
        assert (changed - before).abs().max() > export.MAX_LOGIT_DIFFERENCE, name
        parameter.data.copy_(kept)


# --- what is asked for beside the default ------------------------------------------------------------


def test_the_mixed_contract_is_refused_in_the_speculators_layout_before_any_work(root, target):
    run = sealed_run(root, target, attention="mixed")
    config = ExportConfig(layouts=["z-lab", "speculators"])
    with pytest.raises(InputError, match=r"layout speculators: vLLM 0\.33 would serve .*causal"):
        export.plan(root, "demo", run, target, config)
    assert not list(root.child("exports").list())


def test_config_of_the_speculators_layout_says_everything(root, target):
    run = sealed_run(root, target, attention="swa-causal")
    config = ExportConfig(layouts=["z-lab", "speculators"], target_name="owner/target")
    dataset = export.plan(root, "demo", run, target, config)
    export.run(dataset, run, target)
    facts = export.seal(dataset)["facts"]
    assert facts["layouts"] == ["z-lab", "speculators"]
    body = json.loads(dataset.storage.get("speculators/config.json"))
    terms = body.pop("transformer_layer_config")
    assert body == {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        "speculators_model_type": "dflash",
        "speculators_version": "0.9.0",
        "block_size": 5,
        "draft_vocab_size": 272,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [1, 2, 4],
        "mask_token_id": 259,
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "num_target_layers": 4,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 4,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "owner/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    }
    zlab = config_of(dataset)
    assert terms == {key: zlab[key] for key in terms}
    weights = [dataset.storage.get(f"{name}/model.safetensors") for name in facts["layouts"]]
    assert weights[0] == weights[1]


def test_a_reduced_vocabulary_keeps_the_frequent_tokens_and_their_logits(root, target):
    run = sealed_tokens_run(root, target)
    config = ExportConfig(layouts=["speculators"], draft_vocab_size=64)
    dataset = export.plan(root, "demo", run, target, config)
    export.run(dataset, run, target)
    imported = read_drafter(dataset.storage.child("speculators"))
    answer = "It is 1999.<|im_end|>"  # the one row that is trained on
    written = set(load_tokenizer(target)(answer)["input_ids"])
    assert written <= set(imported.token_ids_D.tolist())
    assert len(imported.token_ids_D) == 64
    assert (imported.token_ids_D.diff() > 0).all()
    embedding, head = load_embedding_and_head(target)
    whole = export.random_pack_logits(imported.build(), embedding, head.bfloat16())
    reduced = export.random_pack_logits(imported.build(), embedding, imported.head_DH)
    torch.testing.assert_close(reduced, whole[..., imported.token_ids_D], atol=1e-5, rtol=1e-5)
    tensors = load(dataset.storage.get("speculators/model.safetensors"))
    kept = tensors["t2d"].nonzero().flatten()
    assert torch.equal(kept, imported.token_ids_D)
    assert torch.equal(tensors["d2t"], kept - torch.arange(64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 64}, "layout z-lab: the z-lab layout has no reduced vocabulary"),
        ({"layouts": ["speculators"], "draft_vocab_size": 272}, "no reduction of 272"),
        ({"layouts": ["speculators"], "weights": "int8"}, "in the z-lab layout only"),
    ],
)
def test_what_no_engine_would_read_is_refused(root, target, options, message):
    run = sealed_run(root, target)
    with pytest.raises(InputError, match=message):
        export.plan(root, "demo", run, target, ExportConfig(**options))


def test_a_reduced_vocabulary_without_the_tokens_it_was_trained_on_is_refused(root, target):
    run = sealed_run(root, target)
    config = ExportConfig(layouts=["speculators"], draft_vocab_size=64)
    dataset = export.plan(root, "demo", run, target, config)
    with pytest.raises(InputError, match="leave draft_vocab_size 0"):
        export.run(dataset, run, target)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_the_error_of_quantised_weights_is_reported(root, target, weights):
    run = sealed_run(root, target)
    rounding = []
    for kind in ("bfloat16", weights):
        dataset = export.plan(root, "demo", run, target, ExportConfig(weights=kind))
        export.run(dataset, run, target)
        facts = export.seal(dataset)["facts"]
        assert facts["max_logit_difference"] <= 1e-5
        rounding.append(facts["rounding"])
    assert min(rounding) > 0
    assert rounding[0] != rounding[1]


@pytest.mark.parametrize("names", [("code", "chat"), ("demo", "demo")], ids=["others", "same"])
def test_a_run_on_several_stores_has_all_of_them_behind_it(root, target, names):
    stores = [empty_store(root, target, *each) for each in zip(names, (4444, 7777), strict=True)]
    inputs = {store.path: store.fingerprint for store in stores}
    config = {"union": sorted(inputs)}
    union = Dataset.create(root, "hidden", "all", version=1, config=config, inputs=inputs)
    union.seal([], {})
    run = sealed_run(root, target, hidden=union.fingerprint, states=union.path)
    found = [dataset.path for dataset in lineage(run)]
    assert {union.path, *inputs} <= set(found)
    assert sum(path.startswith("corpora/") for path in found) == 2
    written = export.frequent_tokens(run, read_shape(run, 20), 64).tolist()
    digits = set(load_tokenizer(target)("8889 15555")["input_ids"])  # of both answers
    assert digits <= set(written)
    config = ExportConfig(layouts=["z-lab"])
    dataset = export.plan(root, "demo", run, target, config)
    export.run(dataset, run, target)
    card = dataset.storage.get("z-lab/README.md").decode()
    assert card.count("- python-stdlib: `python-stdlib`") == 2
    assert "Answers are those of the sources." in card


def test_the_model_card_names_data_recipe_and_serving(root, target):
    run = sealed_tokens_run(root, target)
    config = ExportConfig(layouts=["z-lab", "speculators"])
    dataset = export.plan(root, "demo", run, target, config)
    export.run(dataset, run, target)
    for layout in config.layouts:
        card = dataset.storage.get(f"{layout}/README.md").decode()
        assert "- python-stdlib: `python-stdlib`" in card
        assert "| learning_rate | 0.0006 |" in card
        assert "not causal in the block" in card
        assert ("SGLang does not read" in card) == (layout == "speculators")
