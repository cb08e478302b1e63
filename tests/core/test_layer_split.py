"""Layers over several devices; the last of them is `meta` here, which computes shapes and mixes with no other."""

import pytest
import torch

from dflash_core import extraction, extractor
from dflash_core.config import Runtime
from dflash_core.devices import resolve_devices
from dflash_core.errors import InputError
from dflash_core.layer_split import LayerSplit, device_map, stage_of
from dflash_core.storage import Storage
from dflash_core.target import decoder_layers, empty_body, load_body, tap_layers
from tests import targets
from tests.core.test_extraction import CONFIG, tokenize

CPU, META = torch.device("cpu"), torch.device("meta")
TAPS = [0, 1, 3]
IDS = torch.arange(20)[None]


def run(body, devices):
    """One forward; the taps as they were delivered, by number, and where the forward then was."""
    split, delivered = LayerSplit(decoder_layers(body), devices), {}
    reached = []
    for number, layer in enumerate(decoder_layers(body)):
        layer.register_forward_pre_hook(lambda *_, number=number: reached.append(number))

    def sink(tap, states):
        split.deliver(states, lambda here: delivered.update({tap: (here, reached[-1])}))

    with torch.no_grad(), tap_layers(body, TAPS, sink):
        body(input_ids=IDS, use_cache=False)
        body(input_ids=IDS, use_cache=False)  # nothing of the first forward is left in the second
    return delivered


@pytest.mark.parametrize("family", targets.FAMILIES)
@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_taps_of_a_split_body_are_those_of_a_whole_one(tmp_path, family, num_devices):
    target = targets.FAMILIES[family](tmp_path)
    body = load_body(target, TAPS, CPU)
    with torch.no_grad(), tap_layers(body, TAPS) as taps:
        body(input_ids=IDS, use_cache=False)
    delivered = run(body, [CPU] * num_devices)
    found = torch.stack([delivered[tap][0] for tap in range(len(TAPS))], dim=2)
    assert torch.equal(found, taps.stack())


# Experts are chosen by value, and `meta` has none.
@pytest.mark.parametrize("family", sorted(set(targets.FAMILIES) - {"qwen3_5_moe", "gpt_oss"}))
def test_everything_crosses_once_where_the_device_changes(tmp_path, family):
    body = load_body(targets.FAMILIES[family](tmp_path), TAPS, CPU)
    layers = decoder_layers(body)
    for layer in layers[2:]:
        layer.to(META)
    seen = []
    delivered = run(body, [CPU, META])
    assert {tap: (str(here.device), at) for tap, (here, at) in delivered.items()} == {
        0: ("meta", 1),  # handed over as layer 2 is entered
        1: ("meta", 1),
        2: ("meta", 3),
    }
    assert all(here.shape == (1, 20, 32) for here, _ in delivered.values())

    for layer in layers[2:]:
        layer.register_forward_pre_hook(
            lambda _, args, options: seen.append(options), with_kwargs=True
        )
    with torch.no_grad():
        body(input_ids=IDS, use_cache=False)
    first, second = seen
    assert first["position_embeddings"][0].device == META
    for ours, theirs in zip(
        first["position_embeddings"], second["position_embeddings"], strict=True
    ):
        assert ours is theirs


def test_runs_of_layers_are_whole_and_of_about_equal_length():
    for num_layers in range(1, 70):
        for num_stages in range(1, min(num_layers, 9) + 1):
            stages = [stage_of(layer, num_layers, num_stages) for layer in range(num_layers)]
            assert stages == sorted(stages)
            counts = [stages.count(stage) for stage in range(num_stages)]
            assert sum(counts) == num_layers
            assert max(counts) - min(counts) <= 1


def test_parts_around_the_layers_lie_beside_their_neighbours(tmp_path):
    places = device_map(empty_body(targets.qwen3_5_text(tmp_path), TAPS), [CPU, META])
    assert places == {
        "embed_tokens": CPU,
        "layers.0": CPU,
        "layers.1": CPU,
        "layers.2": META,
        "layers.3": META,
        "norm": META,
        "rotary_emb": CPU,
    }


def test_a_cpu_is_no_place_for_a_split_target():
    assert resolve_devices("cpu", 1) == [CPU]
    with pytest.raises(
        InputError, match="gpus_per_target is 2, which needs GPUs; the device is cpu"
    ):
        resolve_devices("cpu", 2)


def test_more_devices_than_layers_are_refused(tmp_path, monkeypatch):
    root = Storage.from_url(str(tmp_path / "root"))
    target = targets.qwen3(tmp_path / "target")
    tokens = tokenize(root, target)
    dataset = extraction.plan(root, "demo", tokens, target, CONFIG)
    monkeypatch.setattr(extractor, "resolve_devices", lambda device, count: [CPU] * count)
    with pytest.raises(InputError, match="gpus_per_target is 9 and"):
        extractor.Extractor(dataset, tokens, target, Runtime(device="cpu", gpus_per_target=9))
