from pathlib import Path

from dflash_core.corpus.readers import READERS
from flows.cli import load_params
from flows.params import CurateParams, PipelineParams

PRESET = Path(__file__).parents[2] / "deployments" / "agentic-913k.yaml"


def test_the_agentic_preset_mixes_the_six_named_sets_to_its_total():
    curate = load_params(CurateParams, PRESET, []).curate
    named = {name for name, reader in READERS.items() if getattr(reader, "hub_id", "")}
    assert len(named) == 6
    assert {source.reader for source in curate.sources} == named
    assert sum(source.weight for source in curate.sources) == curate.num_rows == 913_000
    weights = {source.name: source.weight for source in curate.sources}
    assert weights["qwen-tools"] + weights["glaive-tools"] == 114_000
    assert all(source.limit >= source.weight for source in curate.sources if source.limit)
    assert load_params(PipelineParams, PRESET, []).curate == curate
