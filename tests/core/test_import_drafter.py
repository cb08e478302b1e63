"""Reading drafters of both layouts: what is written comes back, what others wrote is read or refused."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core import export
from dflash_core.checkpoint import load_drafter
from dflash_core.config import ExportConfig
from dflash_core.errors import CorruptError, InputError
from dflash_core.import_drafter import read_drafter
from dflash_core.storage import Storage
from dflash_core.target import load_embedding_and_head
from tests import targets
from tests.drafter_oracle import random_pack_logits as oracle_logits
from tests.runs import sealed_run

LAYOUTS = ["z-lab", "speculators"]
CONTRACTS = ["full-bidir", "swa-causal", "swa-bidir"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


def exported(folder, target, layouts=None, run=None, config=None, **drafter):
    """The folders of an export by layout, and the run."""
    root = Storage.from_url(str(folder))
    run = run or sealed_run(root, target, **drafter)
    layouts = layouts or LAYOUTS
    config = config or ExportConfig(layouts=layouts)
    dataset = export.plan(root, "demo", run, target, config)
    export.run(dataset, run, target)
    export.seal(dataset)
    return {layout: dataset.storage.local_path / layout for layout in layouts}, run


def edit(folder, change):
    file = folder / "config.json"
    body = json.loads(file.read_text())
    change(body)
    file.write_text(json.dumps(body))


@pytest.mark.parametrize("attention", CONTRACTS)
def test_both_layouts_come_back_as_the_trained_drafter(tmp_path, target, attention):
    folders, run = exported(tmp_path, target, attention=attention)
    trained, shape, _ = load_drafter(run)
    for layout, folder in folders.items():
        imported = read_drafter(folder)
        assert imported.layout == layout
        assert imported.shape.attention == attention
        assert imported.shape.layer_types == shape.layer_types
        assert imported.shape.target_layer_ids == shape.target_layer_ids
        assert imported.head_DH is None
        assert imported.token_ids_D is None
        for name, tensor in trained.state_dict().items():
            assert torch.equal(imported.state_dict[name], tensor.bfloat16().float()), name


@pytest.mark.parametrize(
    ("layout", "attention"),
    [(layout, attention) for layout in LAYOUTS for attention in CONTRACTS] + [("z-lab", "mixed")],
)
def test_a_directory_computes_what_its_format_defines(tmp_path, target, layout, attention):
    """The oracle reads the files by itself; the window of 6 is much shorter than the context."""
    folders, _ = exported(tmp_path, target, [layout], attention=attention, factor=1.1234567)
    imported = read_drafter(folders[layout])
    embedding, head = load_embedding_and_head(target)
    ours = export.random_pack_logits(imported.build(), embedding, head)
    pack = export.random_pack(imported.shape)
    theirs = oracle_logits(folders[layout], pack, embedding, head)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


def test_the_oracle_notices_a_wrong_window_causality_theta_and_tap_order(tmp_path, target):
    folders, _ = exported(tmp_path, target, ["z-lab"], attention="swa-causal")
    folder = folders["z-lab"]
    imported, ends = read_drafter(folder), load_embedding_and_head(target)
    pack = export.random_pack(imported.shape)
    right = oracle_logits(folder, pack, *ends)
    changes = [
        {"sliding_window": 5},
        {"is_causal": False},
        {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ]
    genuine = (folder / "config.json").read_text()
    for change in changes:
        edit(folder, lambda body, change=change: body.update(change))
        wrong = oracle_logits(folder, pack, *ends)
        assert (wrong - right).abs().max() > 1e-3, change
        (folder / "config.json").write_text(genuine)


@pytest.mark.parametrize("weights", ["int8", "fp8"])
def test_quantised_weights_are_multiplied_out_and_stay_close(tmp_path, target, weights):
    config = ExportConfig(layouts=["z-lab"], weights=weights)
    folders, run = exported(tmp_path, target, ["z-lab"], config=config, factor=1.1234567)
    folder, ends = folders["z-lab"], load_embedding_and_head(target)
    stored = load_file(folder / "model.safetensors")
    kinds = {name: tensor.dtype for name, tensor in stored.items()}
    small = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[weights]
    assert kinds["layers.0.mlp.up_proj.weight"] == small
    assert kinds["layers.1.self_attn.o_proj.weight"] == small
    assert kinds["layers.0.self_attn.k_proj.weight"] == torch.bfloat16
    assert kinds["fc.weight"] == torch.bfloat16
    imported, trained = read_drafter(folder), load_drafter(run)[0]
    for name, tensor in trained.state_dict().items():
        error = (imported.state_dict[name] - tensor).abs().amax()
        assert 0 < error <= tensor.abs().amax() / 16, name
    ours = export.random_pack_logits(imported.build(), *ends)
    theirs = oracle_logits(folder, export.random_pack(imported.shape), *ends)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "compressed-tensors"
    del stored["layers.0.mlp.up_proj.weight_scale"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CorruptError, match="has no scale"):
        read_drafter(folder)


def test_published_files_in_several_shards_with_the_targets_own_tensors_are_read(tmp_path, target):
    folders, _ = exported(tmp_path, target, ["z-lab"])
    folder = folders["z-lab"]
    tensors = load_file(folder / "model.safetensors")
    whole = read_drafter(folder)
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    save_file({"embed_tokens.weight": torch.zeros(3, 2)}, folder / "c.safetensors")
    parts["c.safetensors"] = ["embed_tokens.weight"]
    index = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "model.safetensors").unlink()
    sharded = read_drafter(folder)
    assert sharded.content != whole.content
    for name, tensor in whole.state_dict.items():
        assert torch.equal(sharded.state_dict[name], tensor)


def test_an_embedding_in_the_file_has_to_be_the_targets(tmp_path, target):
    folders, _ = exported(tmp_path, target, ["z-lab"])
    file = folders["z-lab"] / "model.safetensors"
    tensors, (embedding, _) = load_file(file), load_embedding_and_head(target)
    read_drafter(folders["z-lab"]).require_embedding(embedding, "it")
    own = embedding.bfloat16().clone()
    save_file({**tensors, "embed_tokens.weight": own}, file)
    read_drafter(folders["z-lab"]).require_embedding(embedding, "it")
    own[259] += 0.1
    save_file({**tensors, "embed_tokens.weight": own}, file)
    with pytest.raises(
        InputError, match=r"in 1 rows \(the mask token's among them\), expected none"
    ):
        read_drafter(folders["z-lab"]).require_embedding(embedding, "it")
    with pytest.raises(InputError, match=r"of shape \[272, 32\], the target's \[99, 32\]"):
        read_drafter(folders["z-lab"]).require_embedding(embedding[:99], "it")


def test_a_whole_head_of_another_size_is_refused(tmp_path, target):
    folders, _ = exported(tmp_path, target, ["z-lab"])
    file = folders["z-lab"] / "model.safetensors"
    tensors, (_, head) = load_file(file), load_embedding_and_head(target)
    save_file({**tensors, "lm_head.weight": head.clone()}, file)
    head_DH = read_drafter(folders["z-lab"]).head_DH
    assert head_DH is not None
    assert torch.equal(head_DH, head.float())
    save_file({**tensors, "lm_head.weight": head[:200].clone()}, file)
    with pytest.raises(CorruptError, match=r"lm_head.weight has shape \[200, 32\], expected \[272"):
        read_drafter(folders["z-lab"])


def test_speculators_files_with_qwen3s_defaults_left_out_are_read(tmp_path, target):
    """The package writes only what differs from Qwen3Config()."""
    folders, _ = exported(tmp_path, target, ["speculators"])
    folder = folders["speculators"]
    want = read_drafter(folder).shape

    def like_theirs(body):
        terms = body["transformer_layer_config"]
        for key in ("attention_bias", "hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling"):
            terms.pop(key)
        del body["num_target_layers"]

    edit(folder, like_theirs)
    with pytest.raises(InputError, match="how many layers"):
        read_drafter(folder)
    assert read_drafter(folder, num_target_layers=want.num_target_layers).shape == want


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_window_is_the_files_own_and_has_to_be_there(tmp_path, target, layout):
    folders, _ = exported(tmp_path, target, [layout], attention="swa-bidir")
    folder = folders[layout]

    def terms(body):
        return body.get("transformer_layer_config", body)

    edit(folder, lambda body: terms(body).update(use_sliding_window=False))
    assert read_drafter(folder).shape.sliding_window == 6
    edit(folder, lambda body: terms(body).pop("use_sliding_window"))
    assert read_drafter(folder).shape.sliding_window == 6
    edit(folder, lambda body: terms(body).update(sliding_window=None))
    with pytest.raises(InputError, match="sliding layers and sliding_window None; set"):
        read_drafter(folder)
    edit(folder, lambda body: terms(body).pop("sliding_window"))
    with pytest.raises(InputError, match="sliding layers and sliding_window None; set"):
        read_drafter(folder)


def test_a_missing_causality_flag_is_read_as_trained_and_said(tmp_path, target, caplog):
    folders, _ = exported(tmp_path, target, ["speculators"], attention="swa-causal")
    edit(folders["speculators"], lambda body: body.pop("sliding_window_non_causal"))
    with caplog.at_level(logging.WARNING):
        assert read_drafter(folders["speculators"]).shape.attention == "swa-causal"
    assert "sliding_window_non_causal" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dflash2"}, "dflash2"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"aux_hidden_state_layer_ids": [1, 2]}, "fc.weight has shape"),
        ({"aux_hidden_state_layer_ids": [0, 1, 2]}, "target_layer_ids"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "llama"),
        ({"transformer_layer_config": {"attention_bias": True}}, "attention_bias"),
        ({"draft_vocab_size": 100}, "draft_vocab_size 100 of 272"),
    ],
)
def test_speculators_files_that_would_compute_something_else_are_refused(
    tmp_path, target, change, message
):
    folders, _ = exported(tmp_path, target, ["speculators"])

    def apply(body):
        for key, value in change.items():
            body[key] = {**body[key], **value} if isinstance(value, dict) else value

    edit(folders["speculators"], apply)
    with pytest.raises((InputError, CorruptError), match=message):
        read_drafter(folders["speculators"])


def test_neither_folder_nor_hub_id_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(InputError, match="is no folder here and cannot be fetched"):
        read_drafter("nobody/no-such-drafter")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="no known drafter"):
        read_drafter(tmp_path)
