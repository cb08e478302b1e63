"""A running server against the offline evaluation: both engines, agreement, warnings, resume, errors."""

from dataclasses import replace

import pytest

from dflash_core import evaluation
from dflash_core import served_evaluation as served
from dflash_core.config import EvaluateConfig, Runtime, ServedConfig
from dflash_core.errors import IncompleteError, InputError, MismatchError, StorageError
from dflash_core.storage import Storage
from dflash_core.target import load_tokenizer
from tests import targets
from tests.runs import make_row, question, sealed_corpus, sealed_run
from tests.serving import Engine


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def measured(tmp_path_factory, target):
    """An evaluation in which some drafts are accepted: its records are altered to say so."""
    root = Storage.from_url(str(tmp_path_factory.mktemp("root")))
    run = sealed_run(root, target)
    corpus = sealed_corpus(root, [make_row(question(i)) for i in range(6)])
    config = EvaluateConfig(num_prompts=6, max_new_tokens=13)
    dataset = evaluation.plan(root, "demo", run, corpus, target, config)
    genuine = evaluation._Decoder.measure

    def lucky(self, prompt, names, seed):
        record = genuine(self, prompt, names, seed)
        left, accepted = len(record["plain"]["tokens"]) - 1, []
        while left > 0:
            accepted.append(min(2, left - 1))
            left -= accepted[-1] + 1
        judged = [4] * len(accepted)
        record["outcomes"]["after"] |= {"accepted": accepted, "judged": judged}
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation._Decoder, "measure", lucky)
        evaluation.run(dataset, run, target, Runtime(device="cpu"))
    evaluation.seal(dataset)
    return dataset


@pytest.fixture
def engine(measured, target):
    """Makes engines and stops them."""
    made = []

    def make(kind, **options):
        made.append(Engine(kind, measured, load_tokenizer(target), **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path))


def asked(root, measured, target, server, **options):
    config = ServedConfig(endpoint=server.url, **options)
    dataset = served.plan(root, "demo", measured, target, config)
    served.run(dataset, measured, target)
    return dataset, served.seal(dataset)["facts"]["levels"]


def test_vllm_agrees_with_the_evaluation_at_every_concurrency(root, measured, target, engine):
    server = engine("vllm")
    dataset, levels = asked(root, measured, target, server)
    expected = measured.facts["after"]["acceptance_length"]
    assert expected > 2
    for level, concurrency in zip(levels, (1, 4, 16), strict=True):
        assert level["engine"] == "vllm"
        assert level["concurrency"] == concurrency
        assert level["acceptance_length"] == pytest.approx(expected)
        assert level["drafts_per_step"] == 4
        assert level["accepted_by_slot"][:2] == sorted(level["accepted_by_slot"][:2], reverse=True)
        assert level["num_equal"] == level["num_prompts"] == 6
        assert level["warning"] == ""
        assert level["tokens_per_s"] > 0
    assert 1 < server.most_in_flight <= 6
    question = server.asked[0]
    assert question["temperature"] == 0
    names = ("top_p", "top_k", "min_p", "repetition_penalty")
    assert [question[name] for name in names] == [1.0, -1, 0.0, 1.0]
    assert question["max_tokens"] == 13
    assert 257 in question["stop_token_ids"]
    report = dataset.storage.get("report.md").decode()
    assert f"{expected:.2f}" in report
    assert "suspect" not in report


def test_another_target_than_that_of_the_evaluation_is_refused(root, measured, tmp_path):
    other = targets.llama(tmp_path / "other")
    with pytest.raises(MismatchError, match="give the target of the evaluation"):
        served.plan(root, "demo", measured, other, ServedConfig(endpoint="http://127.0.0.1:9"))


def test_a_server_that_accepts_less_is_warned_of(root, measured, target, engine, caplog):
    dataset, levels = asked(
        root, measured, target, engine("vllm", forget=1), concurrency=[2], num_prompts=4
    )
    assert "suspect a sliding window" in levels[0]["warning"]
    assert levels[0]["warning"] in caplog.text
    assert levels[0]["warning"] in dataset.storage.get("report.md").decode()


def test_sglang_gives_an_average_since_its_start(root, measured, target, engine):
    _, (level,) = asked(root, measured, target, engine("sglang"), concurrency=[3])
    assert level["engine"] == "sglang"
    assert level["since_start"]
    expected = measured.facts["after"]["acceptance_length"]
    assert level["acceptance_length"] == pytest.approx(expected, rel=0.05)
    assert level["warning"] == ""


def test_levels_that_are_committed_are_not_asked_again(root, measured, target, engine):
    server = engine("vllm")
    config = ServedConfig(endpoint=server.url, concurrency=[1, 2])
    dataset = served.plan(root, "demo", measured, target, config)
    dataset.commit("concurrency-0001", {"acceptance_length": 1.0})
    with pytest.raises(IncompleteError):
        served.seal(dataset)
    served.run(dataset, measured, target)
    assert len(server.asked) == 1 + 6  # a warm-up and one level
    assert served.missing(dataset) == []


def test_sampled_answers_are_asked_for_as_they_were_and_not_compared(
    root, measured, target, engine, monkeypatch
):
    server, genuine = engine("vllm"), served._questions
    monkeypatch.setattr(
        served,
        "_questions",
        lambda *a: [replace(q, temperature=0.7, top_p=0.9) for q in genuine(*a)],
    )
    dataset, (level,) = asked(root, measured, target, server, concurrency=[2])
    assert {(body["temperature"], body["top_p"], body["top_k"]) for body in server.asked} == {
        (0.7, 0.9, -1)
    }
    assert level["num_equal"] is None
    assert "| sampled |" in dataset.storage.get("report.md").decode()


def test_a_baseline_gives_the_speed_up(root, measured, target, engine):
    _, (level,) = asked(
        root, measured, target, engine("vllm"), baseline=engine("vllm").url, concurrency=[1]
    )
    assert level["plain_tokens_per_s"] > 0


def test_a_server_without_drafter_without_engine_or_not_there_is_one_sentence(
    root, measured, target, engine
):
    idle = engine("sglang")
    with pytest.raises(InputError, match="does not speculate"):
        asked(root, measured, target, engine("vllm", forget=0), engine="sglang")
    config = ServedConfig(endpoint=idle.url, engine="vllm")
    dataset = served.plan(root, "demo", measured, target, config)
    with pytest.raises(InputError, match="/metrics answers 404"):
        served.run(dataset, measured, target)
    config = ServedConfig(endpoint="http://127.0.0.1:9")
    dataset = served.plan(root, "demo", measured, target, config)
    with pytest.raises(StorageError, match="is it running"):
        served.run(dataset, measured, target)
    assert dataset.committed() == set()
