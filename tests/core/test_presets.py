import json
from pathlib import Path

from dflash_core.config import SourceConfig
from dflash_core.corpus import curation
from dflash_core.corpus.readers import READERS
from dflash_core.storage import Storage
from flows.cli import load_params
from flows.params import CurateParams, PipelineParams
from tests.core.test_named_readers import CASES

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


QUESTIONS = {
    "open-orca": "Why?",
    "evol-codealpaca": "Add two numbers",
    "magicoder-oss-instruct": "Double it",
    "agentic-coding-trajectories": "Bug.",
    "glaive-function-calling-v2": "And the time?",
    "qwen3.5-tool-calling-v2": "Rain in Rome",
}


def a_thousandth_of(source: SourceConfig, folder: Path) -> SourceConfig:
    """A file in the layout of the source, with a fifth more rows than a thousandth of its share."""
    text, question = json.dumps(CASES[source.reader][0]), QUESTIONS[source.reader]
    path = folder / f"{source.name}.jsonl"
    path.write_text(
        "".join(
            text.replace(question, f"{i} {question}") + "\n"
            for i in range(int(source.weight * 1.2 / 1000))
        )
    )
    return source.model_copy(update={"path": str(path), "limit": source.limit // 1000})


def test_a_thousandth_of_the_preset_has_its_shares(tmp_path):
    preset = load_params(CurateParams, PRESET, []).curate
    changes = {
        "sources": [a_thousandth_of(source, tmp_path) for source in preset.sources],
        "num_rows": preset.num_rows // 1000,
        "near_duplicates": 0,  # the rows differ by a number
        "decontaminate": [],
    }
    config = preset.model_copy(update=changes)
    dataset = curation.plan(Storage.from_url(str(tmp_path / "root")), "mix", config)
    curation.run_units(dataset, config, curation.missing(dataset))
    sources = curation.seal(dataset)["facts"]["sources"]
    kept = {name: counts["kept"] for name, counts in sources.items()}
    assert kept == {
        "magicoder": 75,
        "evol-codealpaca": 111,
        "agentic-coding": 15,
        "qwen-tools": 57,
        "glaive-tools": 57,
        "open-orca": 598,
    }
    calling = {name for name, counts in sources.items() if counts["tool_call_share"] == 1}
    assert calling == {"agentic-coding", "qwen-tools", "glaive-tools"}
