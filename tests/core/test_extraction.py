"""From tokens to committed packs, on tiny random targets. T rows of a pack, L taps, H hidden size."""

from __future__ import annotations

import functools
import itertools
import math
import os
import shutil
import signal
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_core import extraction, packed_forward, parity, tokenization
from dflash_core import extractor as engine
from dflash_core.config import ExtractConfig, Runtime, TargetConfig, TokenizeConfig
from dflash_core.corpus.rows import CORPORA, Row, content_id, write_part
from dflash_core.errors import DFlashError, IncompleteError, InputError, MismatchError
from dflash_core.extractor import Extractor, padded_batches, split_pack
from dflash_core.hidden_states import HiddenStates, read_contract
from dflash_core.manifest import Dataset
from dflash_core.packing import Pack
from dflash_core.storage import Storage
from dflash_core.target import load_causal_lm
from dflash_core.tokenization import Tokens
from tests.targets import FAMILIES, llama, qwen3, qwen3_5_text

T = 256
CPU = Runtime(device="cpu", batch_tokens=200, writer_threads=2)
CONFIG = ExtractConfig(target_layer_ids=[0, 1, 3], chunk_rows=32, shard_bytes=2**16)
WORDS = [
    "def",
    "return",
    "the",
    "answer",
    "of",
    "a",
    "long",
    "question",
    "about",
    "parsing",
    "and",
    "tokens",
    "in",
    "one",
    "file",
]


def conversations(count=14):
    """Rows of quite different lengths."""
    rows = []
    for i in range(count):
        question, answer = " ".join(WORDS[: i % 6 + 1]), " ".join(WORDS[i % 5 :][: i + 1])
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append(Row(content_id(messages, None), "test", messages, None, {}))
    return rows


def tokenize(root, target, **changes):
    rows = conversations()
    corpus = Dataset.create(root, CORPORA, "test", version=1, config={}, inputs={})
    part = write_part(corpus.storage, "parts", rows)
    corpus.seal([], {"parts": {"train": [part], "held_out": []}})
    config = TokenizeConfig(**{"pack_tokens": T, **changes})
    tokens = tokenization.plan(root, "test", corpus, target, config)
    units = tokenization.missing(tokens, corpus)
    tokenization.run_units(tokens, corpus, target, units)
    tokenization.seal(tokens, corpus)
    return tokens


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Builds each family once: saved(name) -> TargetConfig."""
    return functools.cache(lambda name: FAMILIES[name](tmp_path_factory.mktemp(name)))


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path / "root"))


@pytest.fixture
def target(saved):
    return saved("qwen3_5_text")


@pytest.fixture
def tokens(root, target):
    return tokenize(root, target)


def plan(root, tokens, target, config=CONFIG):
    return extraction.plan(root, "test", tokens, target, config)


def extract(root, tokens, target, config=CONFIG, runtime=CPU):
    dataset = plan(root, tokens, target, config)
    numbers = Extractor(dataset, tokens, target, runtime).extract(extraction.missing(dataset))
    extraction.seal(dataset)
    return dataset, numbers


def files(dataset):
    folder = dataset.storage.local_path
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "_commits" not in path.parts and path.name != "manifest.json"
    }


# --- what is stored


@pytest.mark.parametrize("family", FAMILIES)
def test_stored_rows_are_those_of_each_sample_alone(saved, root, family):
    target = saved(family)
    tokens = tokenize(root, target)
    dataset, _ = extract(root, tokens, target)
    reader, source = HiddenStates.open(dataset), Tokens.open(tokens)
    model = load_causal_lm(target, torch.device("cpu"))
    assert source.num_packs > 1
    for sample in range(source.num_samples):
        ids, _ = source.sample(sample)
        with torch.no_grad():
            result = model(
                torch.from_numpy(ids.astype(np.int64))[None],
                output_hidden_states=True,
                use_cache=False,
            )
        # Layer 3 is the last: Hugging Face's entry for it has the final norm on top.
        alone = torch.stack([result.hidden_states[k + 1][0] for k in (0, 1)], dim=1)
        stored = reader.read_sample(sample)
        # bfloat16 keeps 8 bits: half a step of rounding, and a little for the batch.
        torch.testing.assert_close(stored[:, :2].float(), alone, rtol=2**-8, atol=1e-3)
        normed = model.get_decoder().norm(stored[:, 2].float())
        torch.testing.assert_close(normed, result.hidden_states[4][0], rtol=0.02, atol=0.02)


@pytest.mark.server
@pytest.mark.timeout(180)
def test_stock_zarr_over_s3fs_gives_the_states_of_each_sample_alone(
    saved, target, s3_server, s3_url
):
    """The whole way from the target to another project's reader: nothing of ours reads here."""
    import zarr
    from zarr.storage import FsspecStore

    root = Storage.from_url(s3_url)
    tokens = tokenize(root, target)
    dataset, _ = extract(root, tokens, target)
    options = {"client_kwargs": {"endpoint_url": s3_server.endpoint}}
    store = FsspecStore.from_url(dataset.url, storage_options=options, read_only=True)
    group = zarr.open_group(store, mode="r")
    hidden, starts, lengths = group["hidden"], group["start"][:], group["length"][:]
    model = load_causal_lm(target, torch.device("cpu"))
    assert len(starts) == Tokens.open(tokens).num_samples > 3
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        ids = group["input_ids"][start : start + length].astype(np.int64)
        with torch.no_grad():
            result = model(torch.from_numpy(ids)[None], output_hidden_states=True, use_cache=False)
        stored = torch.from_numpy(hidden[start : start + length].astype(np.float32))
        for tap, layer in enumerate((0, 1)):
            alone = result.hidden_states[layer + 1][0]
            torch.testing.assert_close(stored[:, tap], alone, rtol=2**-8, atol=1e-3)


def test_a_pack_holds_its_tokens_and_zeros_past_the_last_sample(root, tokens, target):
    dataset, _ = extract(root, tokens, target)
    reader, source = HiddenStates.open(dataset), Tokens.open(tokens)
    for index in range(source.num_packs):
        want = source.read_pack(index)
        pack, hidden = reader.read_pack(index)
        for field in Pack.__dataclass_fields__:
            assert np.array_equal(getattr(pack, field), getattr(want, field)), field
        assert hidden[: want.num_tokens].any(dim=-1).all()
        assert not hidden[want.num_tokens :].any()


def test_batch_size_and_threads_do_not_change_the_result(root, tokens, target, tmp_path):
    first, _ = extract(root, tokens, target)
    other = Storage.from_url(str(tmp_path / "other"))
    again = tokenize(other, target)
    runtime = Runtime(device="cpu", batch_tokens=1, writer_threads=1)
    second, _ = extract(other, again, target, runtime=runtime)
    assert first.path == second.path
    for index in range(HiddenStates.open(first).num_packs):
        a, b = (HiddenStates.open(d).read_pack(index)[1].float() for d in (first, second))
        torch.testing.assert_close(a, b, rtol=2**-7, atol=1e-3)


def test_the_contract_says_what_the_states_are(root, tokens, target):
    contract = read_contract(plan(root, tokens, target))
    assert contract["target_layer_ids"] == [0, 1, 3]
    assert contract["tokens"] == tokens.fingerprint
    assert contract["target_revision"].startswith("content:")
    assert contract["dtype"] == "bfloat16"
    assert contract["target_dtype"] == "float32"
    assert "hidden_states[k + 1]" in contract["layer_convention"]
    assert contract["thinking"] is False
    assert not any("/" in str(value) for value in contract.values())  # no path of this machine


def test_empty_layer_ids_take_the_default_and_name_the_same_store(root, tokens, target):
    default = plan(root, tokens, target, ExtractConfig())
    assert read_contract(default)["target_layer_ids"] == [1]  # four layers: 1 to the third last
    spelled = plan(root, tokens, target, ExtractConfig(target_layer_ids=[1]))
    assert default.path == spelled.path


def test_the_manifest_sums_up_the_store(root, tokens, target):
    dataset, _ = extract(root, tokens, target)
    facts, source = dataset.facts, tokens.facts
    assert facts["num_tokens"] == source["total_tokens"]
    assert facts["num_samples"] == source["num_samples"]
    assert facts["num_packs"] == source["num_packs"]
    assert facts["absmax"] > 1
    shards = (dataset.storage.local_path / "hidden" / "c").rglob("0")
    assert facts["size_bytes"] == sum(p.stat().st_size for p in shards if p.is_file())


def test_progress_and_numbers_say_where_the_time_went(root, tokens, target):
    dataset, seen = plan(root, tokens, target), []
    extractor = Extractor(dataset, tokens, target, CPU)
    numbers = extractor.extract(
        extraction.missing(dataset), lambda done, total, n: seen.append((done, total, n))
    )
    total = HiddenStates.open(dataset).num_packs
    assert [s[:2] for s in seen] == [(i + 1, total) for i in range(total)]
    kinds = ("load", "check", "read", "forward", "copy", "encode", "upload")
    assert all(numbers[f"{kind}_s"] >= 0 for kind in kinds)
    assert numbers["tokens_per_s"] > 0
    assert extractor.extract([]) == {}


def test_finished_work_is_reused_and_the_second_plan_is_cheap(root, tokens, target, monkeypatch):
    dataset, _ = extract(root, tokens, target)
    monkeypatch.setattr(extraction, "create_store", None)
    again = plan(root, tokens, target)
    assert again.complete
    assert extraction.missing(again) == []
    assert extraction.seal(again) == dataset.manifest()


# --- resume


def test_a_failure_midway_loses_nothing_and_the_rest_gives_the_same_bytes(
    root, tokens, target, tmp_path, monkeypatch
):
    whole, _ = extract(root, tokens, target)
    other = Storage.from_url(str(tmp_path / "other"))
    again = tokenize(other, target)
    dataset = plan(other, again, target)
    extractor = Extractor(dataset, again, target, CPU)
    packs = extraction.missing(dataset)
    assert len(packs) >= 3
    real = engine.write_pack

    def fail_at_the_second(dataset, layout, pack, *rest):
        if pack.index == packs[1]:
            raise OSError("the network is down")
        return real(dataset, layout, pack, *rest)

    monkeypatch.setattr(engine, "write_pack", fail_at_the_second)
    with pytest.raises(OSError, match="network is down"):
        extractor.extract(packs)
    monkeypatch.undo()
    left = extraction.missing(dataset)
    assert packs[1] in left
    assert packs[0] not in left
    with pytest.raises(IncompleteError, match=f"'{left[0]:08d}'"):
        extraction.seal(dataset)
    Extractor(dataset, again, target, CPU).extract(left)
    extraction.seal(dataset)
    assert files(dataset) == files(whole)


def test_two_extractors_on_one_store_agree(root, tokens, target):
    dataset = plan(root, tokens, target)
    packs = extraction.missing(dataset)
    first, second = (Extractor(dataset, tokens, target, CPU) for _ in range(2))
    first.extract(packs[:2])
    second.extract(packs)
    assert extraction.missing(dataset) == []
    for pack in packs:
        HiddenStates.open(dataset).read_pack(pack)


# --- bad input


def test_tokens_of_another_tokenizer_or_template_are_refused(root, tokens, saved, tmp_path):
    folder = shutil.copytree(saved("llama").id, tmp_path / "other")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(MismatchError, match=r"template_hash: have .*, want") as caught:
        plan(root, tokens, TargetConfig(id=str(folder), dtype="float32"))
    assert "tokenizer_hash" not in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "words"), [([0, 9], "names layer 9, but the target has 4"), ([2, 1], "ascending")]
)
def test_layers_that_do_not_fit_are_refused_before_anything_is_written(
    root, tokens, target, ids, words
):
    with pytest.raises(InputError, match=words):
        plan(root, tokens, target, ExtractConfig(target_layer_ids=ids))
    assert not (root.local_path / "hidden").exists()


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(root, tokens, target, monkeypatch):
    usage = namedtuple("usage", "total used free")(2**30, 2**30 - 1000, 1000)
    monkeypatch.setattr(extraction.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        InputError, match=r"need 0\.00 GiB \(\d+ tokens of 192 bytes\).*0\.00 GiB free"
    ):
        plan(root, tokens, target)


def test_incomplete_tokens_and_other_stages_are_refused(root, target, tokens):
    unfinished = Dataset.create(root, "tokens", "x", version=1, config={}, inputs={})
    with pytest.raises(IncompleteError, match="not complete"):
        plan(root, unfinished, target)
    with pytest.raises(MismatchError, match="expected one of tokens"):
        plan(root, plan(root, tokens, target), target)


def test_a_worker_with_other_weights_is_refused(root, tokens, target, tmp_path):
    dataset = plan(root, tokens, target)
    folder = Path(shutil.copytree(target.id, tmp_path / "tuned"))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(MismatchError, match="target_revision: have"):
        Extractor(dataset, tokens, TargetConfig(id=str(folder), dtype="float32"), CPU)


def test_nan_names_the_sample_and_its_pack_stays_uncommitted(root, tokens, target, monkeypatch):
    dataset = plan(root, tokens, target)
    extractor = Extractor(dataset, tokens, target, CPU)
    extractor.extract([0])
    weight = extractor._body.get_input_embeddings().weight
    rare = Tokens.open(tokens).read_pack(2).input_ids[1]
    weight[int(rare)] = float("nan")
    with pytest.raises(InputError, match=r"NaN or infinity for sample \d+ \(pack 2, token"):
        extractor.extract([2])
    assert 2 in extraction.missing(dataset)


def test_token_ids_past_the_embedding_name_the_sample(root, tokens, target, monkeypatch):
    extractor = Extractor(plan(root, tokens, target), tokens, target, CPU)
    real = extractor._tokens.read_pack

    def with_large_id(index):
        pack = real(index)
        pack.input_ids[pack.start[1]] = 5000
        return pack

    monkeypatch.setattr(extractor._tokens, "read_pack", with_large_id)
    with pytest.raises(InputError, match=r"sample 1 holds token id 5000, but .* 272 rows"):
        extractor.extract([0])


# --- the parity check


def test_samples_that_see_each_other_are_never_committed(root, tokens, target, monkeypatch):
    """A forward that lets samples of a batch leak into each other, as an unmasked packed row would."""
    dataset = plan(root, tokens, target)
    extractor = Extractor(dataset, tokens, target, CPU)
    real = Extractor._forward

    def leak(self, pack, out_TLH):
        real(self, pack, out_TLH)
        for start in pack.start[1:]:
            out_TLH[start : start + 3] = out_TLH[start - 3 : start].clone()

    monkeypatch.setattr(Extractor, "_forward", leak)
    with pytest.raises(
        DFlashError,
        match=r"packed with[\s\S]*\d +0 +0\.\d+ +-?0\.\d+ +< 0.9999",
    ):
        extractor.extract([0])
    assert 0 in extraction.missing(dataset)


def test_taps_of_other_layers_are_never_committed(root, tokens, target, monkeypatch):
    dataset = plan(root, tokens, target)
    extractor = Extractor(dataset, tokens, target, CPU)
    layers = extractor._body.layers
    layers[0], layers[1] = layers[1], layers[0]  # the taps' hooks go by place
    layers[0].register_forward_hook(lambda module, inputs, output: output + 1)
    real = parity.tap_layers.__enter__

    def hook_before(self):
        self._layers = [layers[2] if layer is layers[1] else layer for layer in self._layers]
        return real(self)

    monkeypatch.setattr(parity.tap_layers, "__enter__", hook_before)
    with pytest.raises(DFlashError, match=r"tap 1 is not the output of decoder layer 1"):
        extractor.extract([0])
    assert 0 in extraction.missing(dataset)


def test_a_packed_forward_that_disagrees_stops_the_run_and_padded_goes_on(
    root, tokens, target, monkeypatch
):
    def wrong(body, pack, device):
        body(input_ids=torch.ones(1, pack.num_tokens, dtype=torch.long), use_cache=False)

    monkeypatch.setattr(engine, "can_pack", lambda *a: True)
    monkeypatch.setattr(engine, "packed_forward", wrong)
    dataset = plan(root, tokens, target)
    with pytest.raises(DFlashError, match=r"native.*< 0\.99"):
        Extractor(dataset, tokens, target, CPU).extract([0])
    assert not dataset.committed()
    extractor = Extractor(dataset, tokens, target, CPU.model_copy(update={"forward": "padded"}))
    extractor.extract([0])
    assert dataset.record("00000000")["path"] == "padded"


def test_a_store_is_not_filled_with_other_kernels(root, tokens, target, monkeypatch):
    """The two implementations of the short convolution are further apart than rounding."""
    dataset = plan(root, tokens, target)
    Extractor(dataset, tokens, target, CPU).extract([0])
    Extractor(dataset, tokens, target, CPU).extract(extraction.missing(dataset))
    kernels = extraction.seal(dataset)["facts"]["kernels"]
    assert kernels == {"convolution": "torch", "gated_delta_rule": "torch"}
    other = plan(root, tokens, target, ExtractConfig(target_layer_ids=[1]))
    other.storage.put_new("kernels.json", b'{"convolution":"fla","gated_delta_rule":"torch"}')
    with pytest.raises(MismatchError, match=r"convolution: have 'fla', want 'torch'"):
        Extractor(other, tokens, target, CPU).extract([1])
    assert not other.committed()


@pytest.mark.parametrize("path", ["padded", "packed"])
def test_too_little_device_memory_makes_smaller_forwards_with_the_same_states(
    root, tmp_path, monkeypatch, path
):
    target = qwen3(tmp_path / "target")
    tokens = tokenize(root, target)
    if path == "packed":
        use_loop_for_varlen(monkeypatch)
    dataset = plan(root, tokens, target)
    extractor = Extractor(dataset, tokens, target, CPU.model_copy(update={"batch_tokens": T}))
    extractor.extract([0])
    pack, want = HiddenStates.open(dataset).read_pack(0)
    limit, sizes = int(pack.length.max()) + 5, []
    real = torch.nn.Embedding.forward

    def small_device(self, ids):
        sizes.append(ids.numel())
        if ids.numel() > limit:
            raise torch.OutOfMemoryError("out of memory")
        return real(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", small_device)
    got = torch.zeros_like(want)
    with torch.inference_mode():
        extractor._forward(pack, got)
    assert extractor.path == path
    assert max(sizes) > limit >= sizes[-1]
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3)
    limit = int(pack.length.max()) - 1
    with pytest.raises(torch.OutOfMemoryError):
        extractor._forward(pack, got)


def test_after_stop_the_packs_under_way_are_committed_and_no_more(root, tokens, target):
    dataset = plan(root, tokens, target)
    extractor = Extractor(dataset, tokens, target, CPU.model_copy(update={"writer_threads": 1}))
    packs = extraction.missing(dataset)
    extractor.extract(packs, lambda done, total, numbers: extractor.stop())
    left = extraction.missing(dataset)
    assert 0 < len(left) < len(packs)
    assert left == packs[-len(left) :]


def test_sigterm_commits_what_is_under_way_and_then_ends_the_process(root, tokens, target):
    dataset = plan(root, tokens, target)
    extractor = Extractor(dataset, tokens, target, CPU.model_copy(update={"writer_threads": 1}))
    ended = []
    before = signal.signal(signal.SIGTERM, lambda *_: ended.append(len(dataset.committed())))
    try:
        extractor.extract(
            extraction.missing(dataset), lambda *_: os.kill(os.getpid(), signal.SIGTERM)
        )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [len(dataset.committed())]
    assert 0 < ended[0] < HiddenStates.open(dataset).num_packs


def varlen_by_loop(q, k, v, cu_q, cu_k, max_q, max_k, *, window_size, scale, enable_gqa=False):
    """Plain-loop oracle of torch's varlen attention: [T, heads, D], causal inside each span."""
    left, right = window_size
    assert right == 0
    parts = []
    for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        assert b - a <= max_q
        heads = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        distance = torch.arange(b - a)[:, None] - torch.arange(b - a)
        mask = (distance >= 0) & ((distance <= left) | (left < 0))
        part = torch.nn.functional.scaled_dot_product_attention(
            *heads, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def use_loop_for_varlen(monkeypatch):
    from torch.nn.attention import varlen

    monkeypatch.setattr(engine, "can_pack", lambda *a: True)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_loop)


def use_loop_for_gated_deltanet(monkeypatch):
    """Plain loops over the samples in place of flash-linear-attention's convolution and delta rule."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    def segments(cu_seqlens):
        return [slice(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist())]

    def check_chunks(chunk_indices, cu_seqlens):
        lengths = cu_seqlens.diff().tolist()
        expected = [
            [sample, chunk]
            for sample, length in enumerate(lengths)
            for chunk in range(math.ceil(length / 64))
        ]
        assert chunk_indices.tolist() == expected

    def convolve(x, weight, bias, activation, cu_seqlens, chunk_indices):
        assert activation == "silu"
        check_chunks(chunk_indices, cu_seqlens)
        y = torch.zeros(x.shape)
        for part in segments(cu_seqlens):
            padded = torch.nn.functional.pad(x[0, part].T, (weight.shape[1] - 1, 0))
            kernel = weight[:, None]
            y[0, part] = torch.nn.functional.conv1d(padded[None], kernel, groups=len(weight))[0].T
        return torch.nn.functional.silu(y), None

    def rule(q, k, v, *, g, beta, use_qk_l2norm_in_kernel, cu_seqlens, chunk_indices):
        check_chunks(chunk_indices, cu_seqlens)
        groups = v.shape[2] // q.shape[2]
        q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
        parts = [
            torch_recurrent_gated_delta_rule(
                *(x[:, part] for x in (q, k, v)),
                g=g[:, part],
                beta=beta[:, part],
                initial_state=None,
                output_final_state=False,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )[0]
            for part in segments(cu_seqlens)
        ]
        return torch.cat(parts, dim=1), None

    monkeypatch.setattr(packed_forward, "_convolution_kernel", lambda: convolve)
    monkeypatch.setattr(packed_forward, "_delta_rule", lambda: rule)


@pytest.mark.parametrize(
    "build", [qwen3, llama, *(FAMILIES[n] for n in ("gemma3_text", "qwen3_5_text", "qwen3_5_moe"))]
)
def test_the_packed_path_gives_the_states_of_single_samples(root, tmp_path, monkeypatch, build):
    """The GPU path, with a loop in place of the GPU's attention kernel."""
    target = build(tmp_path / "target")
    tokens = tokenize(root, target)
    use_loop_for_varlen(monkeypatch)
    use_loop_for_gated_deltanet(monkeypatch)
    dataset = plan(root, tokens, target)
    extractor = Extractor(dataset, tokens, target, CPU)
    extractor.extract(extraction.missing(dataset))
    assert extractor.path == "packed"
    padded = torch.zeros(T, 3, 32, dtype=torch.bfloat16)
    extractor.path = "padded"
    for index in extraction.units(dataset):
        pack, hidden = HiddenStates.open(dataset).read_pack(index)
        with torch.inference_mode():
            extractor._forward(pack, padded)
        # By row: kernels sum in another order, and what reads a neighbour is wrong as a whole.
        error = (hidden.float() - padded.float()).norm(dim=-1)
        assert (error <= 0.01 * padded.float().norm(dim=-1)).all()


def test_the_packed_path_is_only_for_what_it_was_checked_with(tmp_path):
    from dflash_core.target import load_body

    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    body = load_body(llama(tmp_path / "llama"), [1], cpu)
    assert packed_forward.can_pack(body, gpu, torch.bfloat16)
    assert not packed_forward.can_pack(body, cpu, torch.bfloat16)
    assert not packed_forward.can_pack(body, gpu, torch.float32)
    sinks = load_body(FAMILIES["gpt_oss"](tmp_path / "sinks"), [1], cpu)
    assert not packed_forward.can_pack(sinks, gpu, torch.bfloat16)
    hybrid = load_body(qwen3_5_text(tmp_path / "hybrid"), [1], cpu)
    without_fla = not packed_forward.can_pack(hybrid, gpu, torch.bfloat16)
    assert without_fla or packed_forward.importlib.util.find_spec("fla")


# --- batches


@pytest.mark.parametrize("most_tokens", [1, 9, 12, 30, 100])
def test_the_runs_of_a_pack_hold_every_sample_once_within_the_bound(most_tokens):
    pack, seen = make_pack([5, 1, 12, 7, 7, 3]), []
    for first_row, run in split_pack(pack, most_tokens):
        assert run.num_tokens == len(run.input_ids)
        assert run.num_tokens <= most_tokens or len(run.samples) == 1
        assert np.array_equal(run.input_ids, pack.input_ids[first_row:][: run.num_tokens])
        assert np.array_equal(run.start + first_row, pack.start[run.samples])
        seen.extend(run.samples.tolist())
    assert seen == list(range(6))


def test_chunks_of_samples_are_listed_as_the_kernels_want_them():
    listed = packed_forward._chunk_indices(np.array([1, 64, 65, 200], np.int32))
    expected = [[0, 0], [1, 0], [2, 0], [2, 1], [3, 0], [3, 1], [3, 2], [3, 3]]
    assert listed.tolist() == expected
    assert listed.dtype == np.int32


def make_pack(lengths):
    length = np.array(lengths, np.int32)
    start = np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int32)
    ids = np.arange(1, length.sum() + 1, dtype=np.uint32)
    return Pack(0, ids, np.ones_like(ids, np.uint8), start, length, np.arange(len(length)))


@pytest.mark.parametrize("batch_tokens", [1, 10, 24, 10_000])
def test_padded_batches_hold_every_token_once_within_the_bound(batch_tokens):
    pack = make_pack([5, 1, 12, 7, 7, 3])
    out = np.zeros(pack.num_tokens, np.int64)
    for ids_BS, rows_N, cells_N in padded_batches(pack, batch_tokens):
        assert ids_BS.numel() <= batch_tokens or len(ids_BS) == 1
        out[rows_N.numpy()] += ids_BS.flatten()[cells_N].numpy()
        assert ids_BS.sum() == ids_BS.flatten()[cells_N].sum()  # zeros elsewhere
        for line in ids_BS.tolist():
            assert line == sorted(line, key=lambda token: token == 0)  # padding on the right
    assert np.array_equal(out, pack.input_ids)
