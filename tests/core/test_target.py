import functools
import json
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

from dflash_core import target as target_module
from dflash_core.config import TargetConfig
from dflash_core.devices import resolve_device
from dflash_core.errors import InputError
from dflash_core.target import (
    decoder_layers,
    default_target_layer_ids,
    gdn_backend,
    gdn_modules,
    identify,
    load_body,
    load_causal_lm,
    load_embedding_and_head,
    load_tokenizer,
    mask_token_id,
    require_fast_kernels,
    tap_layers,
    text_config,
    unwrapped,
)
from tests.targets import FAMILIES, VOCAB, llama, qwen3, qwen3_5_text, save_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Builds each family once: saved(name) -> TargetConfig."""
    return functools.cache(lambda name: FAMILIES[name](tmp_path_factory.mktemp(name)))


@pytest.fixture
def tiny(tmp_path):
    return llama(tmp_path / "target")


def edit_json(folder, name, **changes):
    path = Path(folder) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_body_alone_gives_the_taps_of_the_full_model(saved, family):
    target, ids = saved(family), torch.arange(80).reshape(2, 40)
    model, body = load_causal_lm(target, CPU), load_body(target, [0, 2], CPU)
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        with tap_layers(body, [0, 2]) as taps:
            last = body(ids, use_cache=False).last_hidden_state
    assert len(decoder_layers(body)) == 3
    assert not any("lm_head" in n or "vis" in n for n, _ in body.named_parameters())
    expected = torch.stack([hidden[1], hidden[3]], dim=2)
    torch.testing.assert_close(taps.stack(), expected, rtol=0, atol=1e-5)
    assert torch.equal(last, taps.stack()[:, :, 1])  # no final norm on top
    assert not any(p.requires_grad for p in body.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_embedding_and_head_come_from_the_files_as_the_model_has_them(saved, family):
    target = saved(family)
    embedding, head = load_embedding_and_head(target)
    model = load_causal_lm(target, CPU)
    assert torch.equal(embedding, model.get_input_embeddings().weight)
    assert torch.equal(head, model.get_output_embeddings().weight)
    assert (embedding is head) == text_config(target).tie_word_embeddings
    assert text_config(target).hidden_size == 32


def test_a_sink_sees_each_tap_and_hooks_are_gone_after_the_context(tiny):
    body, seen = load_body(tiny, [1, 2], CPU), []
    with tap_layers(body, [1, 2], sink=lambda tap, out: seen.append((tap, tuple(out.shape)))):
        body(torch.arange(6)[None], use_cache=False)
    body(torch.arange(6)[None], use_cache=False)
    assert seen == [(0, (1, 6, 32)), (1, (1, 6, 32))]


def test_default_layers_are_those_of_the_published_drafters():
    assert default_target_layer_ids(36) == [1, 9, 17, 25, 33]
    assert default_target_layer_ids(32) == [1, 8, 15, 22, 29]
    assert default_target_layer_ids(64) == [1, 16, 31, 46, 61]
    assert default_target_layer_ids(36, num_taps=1) == [18]


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_default_layers_of_shallow_targets_exist_and_are_distinct(num_layers):
    ids = default_target_layer_ids(num_layers)
    assert ids
    assert ids == sorted(set(ids))
    assert 0 <= ids[0] <= ids[-1] < num_layers


@pytest.mark.parametrize(
    ("ids", "words"),
    [([4], "has 4 layers"), ([-1], "layer -1"), ([2, 1], "ascending"), ([1, 1], "distinct")],
)
def test_layers_that_do_not_fit_are_named(tiny, ids, words):
    with pytest.raises(InputError, match=words):
        load_body(tiny, ids, CPU)


# --- identity


def test_a_moved_folder_is_the_same_target_and_a_changed_byte_another(tiny, tmp_path):
    first = identify(tiny)
    moved = TargetConfig(
        id=shutil.copytree(tiny.id, tmp_path / "moved").as_posix(), dtype="float32"
    )
    assert identify(moved).contract() == first.contract()
    weights = tmp_path / "moved" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    changed = identify(moved).contract()
    assert {k for k in changed if changed[k] != first.contract()[k]} == {"target_revision"}
    assert all(isinstance(value, str) for value in changed.values())


def test_template_and_tokenizer_are_told_apart(tiny):
    first = identify(tiny)
    (Path(tiny.id) / "chat_template.jinja").write_text("{{ messages }}")
    second = identify(tiny)
    assert second.template_hash != first.template_hash
    assert second.tokenizer_hash == first.tokenizer_hash
    edit_json(tiny.id, "tokenizer_config.json", eos_token="<|endoftext|>")
    assert identify(tiny).tokenizer_hash != first.tokenizer_hash


def test_large_weights_are_known_by_headers_and_windows(tiny):
    files = [Path(tiny.id) / "model.safetensors"]
    sampled = target_module._weights_hash(files, whole_bytes=0)
    data = bytearray(files[0].read_bytes())
    data[20] ^= 1  # inside the header
    files[0].write_bytes(data)
    assert target_module._weights_hash(files, whole_bytes=0) != sampled


def test_windows_cover_header_start_and_end_of_a_large_file():
    size = 5 * 2**30
    windows = target_module._windows((1000).to_bytes(8, "little"), size)
    assert windows[0] == (0, 1008)
    assert windows[1][0] == 1008
    assert size - (windows[-1][0] + windows[-1][1]) < 64
    assert len(windows) == 65


def test_a_hub_id_is_resolved_to_its_commit_from_the_cache(tiny, tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--acme--tiny"
    shutil.copytree(tiny.id, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    target_module._resolve.cache_clear()
    hub = TargetConfig(id="acme/tiny", dtype="float32")
    identity = identify(hub, require_template=True)
    assert identity.contract()["target"] == "acme/tiny"
    assert identity.revision == commit
    assert identity.tokenizer_hash == identify(tiny).tokenizer_hash
    assert torch.equal(load_embedding_and_head(hub)[0], load_embedding_and_head(tiny)[0])
    assert len(decoder_layers(load_body(hub, [1], CPU))) == 2
    with pytest.raises(InputError, match=r"acme/other.*hub cannot be reached"):
        identify(TargetConfig(id="acme/other"))


# --- bad input


@pytest.mark.parametrize(
    ("target_id", "words"),
    [
        ("/nowhere/at/all", "does not exist"),
        ("./here", "does not exist"),
        ("not a name", "neither a folder"),
    ],
)
def test_an_unknown_target_is_named(target_id, words):
    with pytest.raises(InputError, match=words) as caught:
        identify(TargetConfig(id=target_id))
    assert target_id in str(caught.value)


def test_a_folder_without_config_says_what_was_expected(tmp_path):
    with pytest.raises(InputError, match=r"no config.json; expected a Transformers checkpoint"):
        identify(TargetConfig(id=str(tmp_path)))


def test_a_target_without_tokenizer_is_refused(tiny):
    (Path(tiny.id) / "tokenizer.json").unlink()
    (Path(tiny.id) / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="the tokenizer of target"):
        identify(tiny)


def test_a_missing_chat_template_matters_only_to_those_who_need_it(tiny):
    (Path(tiny.id) / "chat_template.jinja").unlink()
    assert identify(tiny).template_hash == ""
    with pytest.raises(InputError, match="has no chat template"):
        identify(tiny, require_template=True)


def test_token_ids_without_an_embedding_row_are_refused(tmp_path):
    target = qwen3(tmp_path, vocab_size=200, eos_token_id=1, pad_token_id=1)
    with pytest.raises(InputError, match=r"embedding has 200 rows; the tokenizer does not belong"):
        identify(target)


def test_an_added_token_that_text_never_holds_may_lie_past_the_rows(tmp_path):
    target = qwen3(tmp_path, vocab_size=259)
    tokenizer = load_tokenizer(target)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    tokenizer.save_pretrained(tmp_path)
    assert identify(target).tokenizer_hash


def test_an_unknown_family_and_pickled_weights_are_one_sentence(tiny):
    weights = Path(tiny.id) / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(InputError, match="the weights of target"):
        load_body(tiny, [1], CPU)
    with pytest.raises(InputError, match="convert its weights to safetensors"):
        load_embedding_and_head(tiny)
    edit_json(tiny.id, "config.json", model_type="unheard_of")
    with pytest.raises(InputError, match="unheard_of"):
        text_config(tiny)


def test_weights_that_lack_a_tensor_are_refused(tiny):
    from safetensors.torch import load_file, save_file

    path = Path(tiny.id) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lack 1 tensors .*layers\.1\.mlp\.up_proj"):
        load_body(tiny, [2], CPU)
    assert load_body(tiny, [0], CPU) is not None  # not needed there


@pytest.mark.parametrize("device", ["gpu", "cuda:7"])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(InputError, match=device):
        resolve_device(device)


# --- mask token


def with_tokens(target, *tokens):
    tokenizer = load_tokenizer(target)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.save_pretrained(target.id)
    return target


def test_the_mask_token_is_a_row_past_the_tokenizer_when_nothing_is_reserved(tiny):
    assert mask_token_id(tiny) == len(load_tokenizer(tiny)) == 259


def test_a_reserved_token_comes_before_a_free_row_and_a_mask_token_before_both(tiny):
    assert mask_token_id(with_tokens(tiny, "<|tool|>", "<|reserved_0|>")) == 260
    assert mask_token_id(with_tokens(tiny, "<|tool|>", "<|reserved_0|>", "<|MASK|>")) == 261


def test_without_any_of_these_the_last_special_token_that_the_template_does_not_print(tmp_path):
    full = with_tokens(qwen3(tmp_path, vocab_size=261), "<|tool|>", "<|empty|>")
    assert mask_token_id(full) == 260


def test_a_mask_token_in_use_elsewhere_is_not_taken(tiny):
    with_tokens(tiny, "<|mask|>")
    edit_json(tiny.id, "config.json", pad_token_id=259)
    assert mask_token_id(tiny) == 260


def test_no_free_token_is_an_error_that_says_what_to_set(tmp_path):
    with pytest.raises(InputError, match="set mask_token_id"):
        mask_token_id(qwen3(tmp_path, vocab_size=259))


# --- kernels


def test_cpu_tensors_never_reach_the_gpu_kernels(tmp_path):
    """As on a machine with fla but without a GPU: the kernel raises, the forward still works."""
    target = qwen3_5_text(tmp_path)
    model = load_body(target, [2], CPU)
    (module,) = gdn_modules(model)
    names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    before = {name: getattr(module, name) for name in names}
    expected = model(torch.arange(9)[None], use_cache=False).last_hidden_state
    try:
        for name in names:
            # Other tests of this process may have wrapped it already, which `by_device` looks through.
            fast = unwrapped(before[name])
            plain = target_module.inspect.unwrap(fast)
            setattr(module, name, functools.wraps(plain)(lambda *a, **k: _no_driver()))
        with pytest.raises(RuntimeError, match="0 active drivers"):
            model(torch.arange(9)[None], use_cache=False)
        again = load_body(target, [2], CPU)
        result = again(torch.arange(9)[None], use_cache=False).last_hidden_state
    finally:
        for name, function in before.items():
            setattr(module, name, function)
    assert torch.equal(result, expected)


def _no_driver():
    raise RuntimeError("0 active drivers")


def test_missing_kernels_on_a_gpu_are_an_error_unless_allowed(tmp_path, caplog):
    hybrid, gpu = load_body(qwen3_5_text(tmp_path / "a"), [2], CPU), torch.device("cuda")
    (module,) = gdn_modules(hybrid)
    if gdn_backend(module)["torch_chunk_gated_delta_rule"].startswith("fla"):
        pytest.skip("flash-linear-attention is installed")
    wanted = r"chunk_gated_delta_rule .*5 to 10 times.*'flash-linear-attention>=0\.6,<0\.7'"
    with pytest.raises(InputError, match=wanted):
        require_fast_kernels(hybrid, gpu, allow_slow=False)
    require_fast_kernels(hybrid, gpu, allow_slow=True)
    assert "going on without chunk_gated_delta_rule" in caplog.text
    require_fast_kernels(hybrid, CPU, allow_slow=False)
    require_fast_kernels(load_body(llama(tmp_path / "b"), [2], CPU), gpu, allow_slow=False)


def test_a_missing_convolution_alone_is_a_warning(tmp_path, monkeypatch, caplog):
    hybrid = load_body(qwen3_5_text(tmp_path), [2], CPU)
    found = {"torch_chunk_gated_delta_rule": "fla.ops", "causal_conv1d_fn": "transformers.models"}
    monkeypatch.setattr(target_module, "gdn_backend", lambda module: found)
    require_fast_kernels(hybrid, torch.device("cuda"), allow_slow=False)
    assert "'causal-conv1d>=1.7,<2'" in caplog.text
    assert "delta_rule" not in caplog.text


def test_the_versions_named_are_those_of_the_extras():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = {kernel.package for kernel in target_module.KERNELS.values()}
    assert named <= {*extras["gpu"], *extras["conv"]}


def test_the_backend_of_every_function_is_known(tmp_path):
    (module,) = gdn_modules(load_body(qwen3_5_text(tmp_path), [2], CPU))
    assert "unknown" not in gdn_backend(module).values()


def test_the_byte_tokenizer_gives_back_what_went_in(tmp_path):
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(TargetConfig(id=str(tmp_path)))
    text = "def naïve(): return '✓'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert max(tokenizer.get_vocab().values()) < VOCAB
