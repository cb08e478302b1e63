"""Evaluation: which prompts, resume, and facts against a plain loop over the records."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_core import evaluation, evaluation_report, export
from dflash_core.chat import Chat
from dflash_core.checkpoint import load_drafter
from dflash_core.config import (
    DrafterSource,
    EvaluateConfig,
    ExportConfig,
    PromptSetConfig,
    Runtime,
)
from dflash_core.decode import greedy, speculate
from dflash_core.device_work import Job, open_workers
from dflash_core.errors import IncompleteError, InputError, MismatchError
from dflash_core.evaluation_prompts import answer_message, encode_prompt
from dflash_core.storage import Storage
from dflash_core.target import load_causal_lm, load_embedding_and_head, load_tokenizer
from tests import chats, targets
from tests.runs import make_row, question, sealed_corpus, sealed_run, sealed_tokens_run
from tests.templates import FAMILIES

CPU = Runtime(device="cpu")
CONFIG = EvaluateConfig(num_prompts=4, num_untrained_prompts=2, max_new_tokens=12)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3_5_text(tmp_path_factory.mktemp("target"))


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path))


def rows(count):
    return [make_row(question(i), source="even" if i % 2 == 0 else "odd") for i in range(count)]


def planned(root, target, held_out=None, config=CONFIG):
    run = sealed_run(root, target)
    corpus = sealed_corpus(root, rows(7) if held_out is None else held_out)
    return evaluation.plan(root, "demo", run, corpus, target, config), run


def prompts_of(dataset):
    return json.loads(dataset.storage.get("prompts.json"))


# --- prompts -----------------------------------------------------------------------------------------


def test_prompts_are_the_lowest_ids_up_to_the_last_answer(root, target):
    long = make_row([*question(1), *question(2)])
    held_out = [*rows(7), long]
    dataset, _ = planned(root, target, held_out, CONFIG.model_copy(update={"num_prompts": 8}))
    chosen = prompts_of(dataset)["prompts"]
    assert [prompt["id"] for prompt in chosen] == sorted(row.id for row in held_out)
    tokenizer = load_tokenizer(target)
    texts = {prompt["id"]: tokenizer.decode(prompt["input_ids"]) for prompt in chosen}
    first, second = question(1), question(2)
    assert texts[long.id] == (
        f"<|im_start|>user\n{first[0]['content']}<|im_end|>\n"
        f"<|im_start|>assistant\n{first[1]['content']}<|im_end|>\n"
        f"<|im_start|>user\n{second[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert 257 in prompts_of(dataset)["stop_ids"]


def test_prompts_that_do_not_fit_the_target_are_passed_over(root, target):
    held_out = [make_row([{"role": "user", "content": "x" * 5000}]), *rows(2)]
    dataset, _ = planned(root, target, held_out)
    assert {prompt["id"] for prompt in prompts_of(dataset)["prompts"]} == {
        row.id for row in held_out[1:]
    }


def test_a_corpus_without_held_out_rows_is_refused_with_advice(root, target):
    with pytest.raises(InputError, match="held_out_fraction"):
        planned(root, target, held_out=[])


def test_a_run_of_another_target_is_refused(root, target, tmp_path_factory):
    other = targets.llama(tmp_path_factory.mktemp("other"))
    run, corpus = sealed_run(root, other), sealed_corpus(root, rows(2))
    with pytest.raises(MismatchError, match="target_config_hash"):
        evaluation.plan(root, "demo", run, corpus, target, CONFIG)


# --- decoding and resume -----------------------------------------------------------------------------


def test_records_hold_what_decoding_gives(root, target):
    dataset, run = planned(root, target)
    evaluation.run(dataset, run, target, CPU)
    model = load_causal_lm(target, torch.device("cpu"))
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    stop_ids = prompts_of(dataset)["stop_ids"]
    for index, prompt in enumerate(prompts_of(dataset)["prompts"]):
        record = dataset.record(f"prompt-{index:05d}")
        ids = prompt["input_ids"]
        assert record["plain"]["tokens"] == greedy(model, ids, 12, stop_ids)
        assert ("before" in record["outcomes"]) == (index < 2)
        for name, step in (("before", 0), ("after", 20)):
            if name not in record["outcomes"]:
                continue
            drafter = load_drafter(run, step)[0]
            out = speculate(model, drafter, embedding, head, ids, 12, stop_ids)
            outcome = record["outcomes"][name]
            assert outcome["accepted"] == out.accepted
            assert outcome["judged"] == out.judged
            assert outcome["lossless"]
            assert outcome["difference"] is None


def test_before_is_the_untrained_drafter_and_after_the_average_of_the_trained_one(
    root, target, monkeypatch
):
    run = sealed_run(root, target, averages=True)
    dataset = evaluation.plan(root, "demo", run, sealed_corpus(root, rows(7)), target, CONFIG)
    genuine, used = evaluation.speculate_steps, []

    def watched(model, drafter, *rest):
        used.append(drafter.fc.weight.clone())
        return genuine(model, drafter, *rest)

    monkeypatch.setattr(evaluation, "speculate_steps", watched)
    evaluation.run(dataset, run, target, CPU)
    untrained, trained = (load_drafter(run, step)[0].fc.weight for step in (0, 20))
    assert not torch.equal(trained, load_drafter(run, averaged=False)[0].fc.weight)
    expected = [untrained, trained] * 3 + [trained] * 2  # warm-up and two prompts with both
    assert len(used) == len(expected)
    assert all(map(torch.equal, used, expected))


def test_resume_decodes_only_prompts_without_a_record(root, target):
    dataset, run = planned(root, target)
    units = evaluation.missing(dataset)
    assert len(units) == 4
    evaluation.run(dataset, run, target, CPU, units=units[1:2])
    kept = dataset.record(units[1])
    with pytest.raises(IncompleteError, match="3 of 4"):
        evaluation.seal(dataset)
    seen = []
    again, _ = planned(root, target)
    evaluation.run(again, run, target, CPU, progress=lambda *numbers: seen.append(numbers))
    assert [numbers[:2] for numbers in seen] == [(1, 3), (2, 3), (3, 3)]
    assert seen[-1][2]["acceptance_length"] >= 1.0
    assert seen[-1][2]["tokens_per_s"] > 0
    assert again.record(units[1]) == kept
    manifest = evaluation.seal(again)
    assert evaluation.missing(again) == []
    evaluation.run(again, run, target, CPU)  # nothing left, loads nothing
    assert evaluation.seal(again) == manifest
    assert json.loads(again.storage.get("report.json")) == manifest["facts"]
    assert "speed-up" in again.storage.get("report.md").decode()


def test_a_device_job_decodes_those_of_its_prompts_that_are_missing(root, target):
    dataset, run = planned(root, target)
    first, second, *rest = evaluation.units(dataset)
    evaluation.run(dataset, run, target, CPU, units=[first])
    seen: list = []
    workers = open_workers(Job.filling(dataset, run.path, target, CPU, stage="evaluate"))
    workers.run([first, second], lambda *state: seen.append(state[:2]))
    assert seen == [(1, 1)]
    assert evaluation.missing(dataset) == rest


def test_the_drafter_of_step_0_is_not_called_untrained_since_a_run_may_start_from_another():
    facts = evaluation_report.summarise(random_records(5))
    assert {row["drafter"] for row in evaluation_report.table(facts)} == {"at the start", "trained"}


def test_seal_writes_a_picture_where_matplotlib_is(root, target):
    pytest.importorskip("matplotlib")
    picture = evaluation_report.picture(evaluation_report.summarise(random_records(5)))
    assert picture is not None
    assert picture.startswith(b"\x89PNG")


def test_an_answer_that_differs_is_reported_with_its_place_and_logit_gap(root, target, monkeypatch):
    dataset, run = planned(root, target)
    genuine = evaluation.greedy
    monkeypatch.setattr(
        evaluation, "greedy", lambda *a: [*(t := genuine(*a))[:3], (t[3] + 1) % 256, *t[4:]]
    )
    evaluation.run(dataset, run, target, CPU)
    facts = evaluation.seal(dataset)["facts"]
    assert facts["after"]["num_lossless"] == 0
    assert [difference["at"] for difference in facts["after"]["differences"]] == [3] * 4
    assert all(d["rounding"] < 1e-2 < d["logit_gap"] for d in facts["after"]["differences"])
    assert facts["after"]["num_explained"] == 0
    assert "0 of 4; 0 of 4 differences within rounding" in dataset.storage.get("report.md").decode()


def test_answers_of_one_token_leave_nothing_to_report(root, target):
    dataset, run = planned(root, target, config=CONFIG.model_copy(update={"max_new_tokens": 1}))
    evaluation.run(dataset, run, target, CPU)
    with pytest.raises(InputError, match="single token"):
        evaluation.seal(dataset)


# --- facts -------------------------------------------------------------------------------------------


def random_records(count, seed=0, block_size=5):
    """Records as a drafter that accepts 0 to 4 drafts would leave them."""
    rng, records = random.Random(seed), []
    for index in range(count):
        record = {
            "id": f"{index:03d}",
            "source": rng.choice("ab"),
            "group": str(index),
            "set": "held-out",
            "thinking": False,
            "temperature": 0.0,
            "num_prompt_tokens": 3,
            "outcomes": {},
            "plain": {"num_tokens": 0, "tokens": [], "seconds": rng.uniform(1, 2)},
        }
        for name in ("before", "after") if index < 3 else ("after",):
            steps = rng.randint(0 if index else 1, 6)
            judged = [rng.randint(0, block_size - 1) for _ in range(steps)]
            accepted = [rng.randint(0, number) for number in judged]
            stopped_early = bool(steps) and accepted[-1] > 0 and rng.random() < 0.3
            verified = sum(accepted) + steps - stopped_early
            lossless = rng.random() < 0.7
            record["outcomes"][name] = {
                "block_size": block_size,
                "num_drafts": block_size - 1,
                "accepted": accepted,
                "judged": judged,
                "num_tokens": verified + 1,
                "num_verified": verified,
                "lossless": lossless,
                "difference": None
                if lossless
                else {"at": 1, "logit_gap": 0.5, "rounding": rng.choice([0.1, 0.25])},
                "seconds": rng.uniform(0.5, 1),
            }
        record["plain"]["num_tokens"] = record["outcomes"]["after"]["num_tokens"]
        records.append(record)
    return records


@pytest.mark.parametrize("seed", range(5))
def test_facts_match_a_plain_loop(seed):
    records = random_records(9, seed)
    facts = evaluation_report.summarise(records)
    for name in ("before", "after"):
        part = facts[name]
        tokens = steps = lossless = prompts = 0
        histogram, won, asked, per_prompt = [0] * 5, [0] * 5, [0] * 5, []
        plain_tokens = plain_seconds = own_tokens = own_seconds = 0.0
        for record in records:
            if name not in record["outcomes"]:
                continue
            outcome = record["outcomes"][name]
            prompts += 1
            lossless += outcome["lossless"]
            plain_tokens += record["plain"]["num_tokens"]
            plain_seconds += record["plain"]["seconds"]
            own_tokens += outcome["num_tokens"]
            own_seconds += outcome["seconds"]
            tokens += outcome["num_tokens"] - 1
            steps += len(outcome["accepted"])
            if outcome["accepted"]:
                per_prompt.append((outcome["num_tokens"] - 1) / len(outcome["accepted"]))
            for accepted, judged in zip(outcome["accepted"], outcome["judged"], strict=True):
                histogram[accepted] += 1
                for slot in range(1, judged + 1):
                    asked[slot] += 1
                    won[slot] += slot <= accepted
        assert part["num_prompts"] == prompts
        assert part["num_steps"] == steps
        assert part["num_lossless"] == lossless
        assert len(part["differences"]) == prompts - lossless
        assert part["num_explained"] == sum(d["rounding"] == 0.25 for d in part["differences"])
        assert part["histogram"] == histogram
        assert part["acceptance_length"] == pytest.approx(tokens / steps)
        mean = sum(per_prompt) / len(per_prompt)
        assert part["acceptance_length_per_prompt"] == pytest.approx(mean)
        shares = [w / a if a else None for w, a in zip(won[1:], asked[1:], strict=True)]
        assert part["accepted_by_slot"] == pytest.approx(shares)
        speed_up = (own_tokens / own_seconds) / (plain_tokens / plain_seconds)
        assert part["speed_up"] == pytest.approx(speed_up)
    assert facts["baseline"] == "plain decoding by the same Transformers model on this machine"
    sources = {record["source"] for record in records}
    assert set(facts["after"]["by_source"]) == sources
    counts = [part["num_prompts"] for part in facts["after"]["by_source"].values()]
    assert sum(counts) == len(records)


def test_the_interval_is_that_of_prompts_drawn_anew():
    outcomes = [record["outcomes"]["after"] for record in random_records(12, seed=3)]
    rng, drawn = random.Random(0), []
    for _ in range(4000):
        sample = rng.choices(outcomes, k=len(outcomes))
        tokens = sum(outcome["num_verified"] for outcome in sample)
        drawn.append(tokens / sum(len(outcome["accepted"]) for outcome in sample))
    drawn.sort()
    low, high = evaluation_report.bootstrap_interval(outcomes)
    assert low == pytest.approx(drawn[100], abs=0.05)
    assert high == pytest.approx(drawn[3900], abs=0.05)
    assert evaluation_report.bootstrap_interval(outcomes) == [low, high]


def test_a_difference_is_taken_on_the_same_resampled_prompts():
    """Of a drafter and itself it is exactly 0, however wide the interval of each is."""
    records = random_records(12, seed=4)
    for record in records:
        record["outcomes"]["twin"] = record["outcomes"]["after"]
        worse = dict(record["outcomes"]["after"])
        worse["accepted"] = [*worse["accepted"], 0]
        worse["judged"] = [*worse["judged"], 4]
        worse["num_verified"] += 1
        record["outcomes"]["worse"] = worse
    others = evaluation_report.summarise(records)["others"]
    assert others["twin"]["difference_to_after"] == {
        "acceptance_length": 0.0,
        "interval": [0.0, 0.0],
    }
    low, high = others["worse"]["difference_to_after"]["interval"]
    assert low < others["worse"]["difference_to_after"]["acceptance_length"] < high < 0


def test_modes_are_reported_apart_and_the_first_is_the_headline():
    records = random_records(6, seed=1)
    sampled = random_records(6, seed=2)
    for record in sampled:
        record["temperature"] = 1.0
        for outcome in record["outcomes"].values():
            del outcome["lossless"], outcome["difference"]
    facts = evaluation_report.summarise([*records, *sampled])
    assert facts["after"] == {
        **evaluation_report.drafter_facts(records, "after"),
        "by_source": facts["after"]["by_source"],
    }
    assert [mode["temperature"] for mode in facts["modes"]] == [0.0, 1.0]
    after = facts["modes"][1]["drafters"]["after"]
    assert after["num_lossless"] is None
    assert after["acceptance_length"] == pytest.approx(
        evaluation_report.drafter_facts(sampled, "after")["acceptance_length"]
    )
    rows = evaluation_report.table(facts)
    assert {row["equal to plain decoding"] for row in rows if "temperature 1" in row["mode"]} == {
        "sampled"
    }
    assert evaluation_report.picture(facts)


# --- sets, modes and drafters ------------------------------------------------------------------------


def write_prompts(folder):
    file = folder / "prompts.jsonl"
    lines = [{"prompt": [f"say {i}", "again"], "category": "saying"} for i in range(5)]
    file.write_text("\n".join(map(json.dumps, lines)))
    return PromptSetConfig(set="file", path=str(file), name="mine")


def test_every_set_is_asked_in_every_mode_and_resumes_by_prompt(root, target, tmp_path):
    config = CONFIG.model_copy(
        update={
            "prompt_sets": [PromptSetConfig(), write_prompts(tmp_path)],
            "num_prompts": 2,
            "temperatures": [0.0, 1.0],
            "tree_nodes": [6],
        }
    )
    dataset, run = planned(root, target, config=config)
    prompts = prompts_of(dataset)["prompts"]
    assert [(p["set"], p["temperature"]) for p in prompts] == [
        (name, temperature) for name in ("held-out", "mine") for temperature in (0, 0, 1, 1)
    ]
    units = evaluation.units(dataset)
    evaluation.run(dataset, run, target, CPU, units=units[4:5])
    kept = dataset.record(units[4])
    evaluation.run(dataset, run, target, CPU)
    facts = evaluation.seal(dataset)["facts"]
    assert dataset.record(units[4]) == kept
    assert facts["num_prompts"] == 4
    assert (
        facts["after"]["num_lossless"] == facts["others"]["trained, tree of 6"]["num_lossless"] == 4
    )
    assert [(m["set"], m["num_prompts"]) for m in facts["modes"]] == [
        ("held-out", 2), ("held-out", 2), ("mine", 2), ("mine", 2)
    ]  # fmt: skip
    sampled = [dataset.record(unit)["plain"]["tokens"] for unit in units[2:4]]
    greedy_ = [dataset.record(unit)["plain"]["tokens"] for unit in units[:2]]
    assert sampled != greedy_


def test_prompt_sets_of_one_label_are_refused(root, target, tmp_path):
    mine = write_prompts(tmp_path)
    config = CONFIG.model_copy(update={"prompt_sets": [mine, PromptSetConfig(), mine]})
    with pytest.raises(
        InputError, match=r"several prompt sets are called mine, .*give each a name"
    ):
        planned(root, target, config=config)


def test_what_the_user_says_next_is_asked_after_the_targets_own_answer(root, target, tmp_path):
    config = CONFIG.model_copy(update={"prompt_sets": [write_prompts(tmp_path)], "num_prompts": 1})
    dataset, run = planned(root, target, config=config)
    evaluation.run(dataset, run, target, CPU)
    model = load_causal_lm(target, torch.device("cpu"))
    tokenizer, stop_ids = load_tokenizer(target), prompts_of(dataset)["stop_ids"]
    (prompt,) = prompts_of(dataset)["prompts"]
    first = greedy(model, prompt["input_ids"], 12, stop_ids)
    said = tokenizer.decode([token for token in first if token != 257])
    text = (
        f"<|im_start|>user\n{prompt['messages'][0]['content']}<|im_end|>\n"
        f"<|im_start|>assistant\n{said}<|im_end|>\n"
        "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    record = dataset.record("prompt-00000")
    assert record["plain"]["tokens"] == first + greedy(model, ids, 12, stop_ids)
    assert record["outcomes"]["after"]["lossless"]
    assert record["num_prompt_tokens"] == len(prompt["input_ids"]) + len(ids)


def test_a_conversation_ends_where_the_template_refuses_what_was_said(root, tmp_path, caplog):
    refusing = "{% if messages|length > 2 %}{{ raise_exception('no more') }}{% endif %}"
    own = targets.qwen3(tmp_path / "refusing")
    targets.save_tokenizer(tmp_path / "refusing", template=refusing + targets.CHATML)
    config = CONFIG.model_copy(update={"prompt_sets": [write_prompts(tmp_path)], "num_prompts": 1})
    dataset, run = planned(root, own, config=config)
    evaluation.run(dataset, run, own, CPU)
    (prompt,) = prompts_of(dataset)["prompts"]
    record = dataset.record("prompt-00000")
    assert record["num_prompt_tokens"] == len(prompt["input_ids"])
    assert "ends early: TemplateError: no more" in caplog.text


def test_channels_go_back_as_reasoning_and_content():
    """The template of gpt-oss refuses channel tags in a message's content."""
    family = FAMILIES["gpt-oss"]
    tokenizer = chats.tokenizer(family.template, family.markers, family.eos)
    chat, asked = Chat(tokenizer, False), [chats.user("a")]
    prompt = encode_prompt(chat, asked, None)
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>so"
    tokens = [*chat.encode(said), chat.end_of_turn]
    expected = chats.assistant("so", reasoning_content="hm")
    assert answer_message(chat, prompt, tokens) == expected
    assert answer_message(chat, prompt, tokens[:-1]) == expected


def test_sampled_answers_are_those_of_the_seed(root, target):
    config = CONFIG.model_copy(update={"temperatures": [1.0], "num_prompts": 2})
    dataset, run = planned(root, target, config=config)
    evaluation.run(dataset, run, target, CPU)
    facts = evaluation.seal(dataset)["facts"]
    assert facts["after"]["num_lossless"] is None
    other, _ = planned(root, target, config=config.model_copy(update={"seed": 1}))
    assert other.path != dataset.path
    evaluation.run(other, run, target, CPU)
    answers_ = [
        [data.record(unit)["plain"]["tokens"] for unit in evaluation.units(data)]
        for data in (dataset, other)
    ]
    assert answers_[0] != answers_[1]


def exported(root, run, target, **options):
    config = ExportConfig(**options)
    dataset = export.plan(root, "demo", run, target, config)
    export.run(dataset, run, target)
    export.seal(dataset)
    return str(dataset.storage.local_path / config.layouts[0])


def test_other_drafters_are_decoded_on_the_same_prompts(root, target):
    run = sealed_tokens_run(root, target)
    other = sealed_run(root, target, name="other", num_hidden_layers=1, block_size=3)
    corpus = sealed_corpus(root, rows(3))
    reduced = exported(root, run, target, layouts=["speculators"], draft_vocab_size=200)
    compare = [
        DrafterSource(name="exported", source=exported(root, run, target)),
        DrafterSource(name="reduced", source=reduced),
        DrafterSource(name="shallow", source=other.path),
    ]
    config = CONFIG.model_copy(update={"num_prompts": 3})
    dataset = evaluation.plan(root, "demo", run, corpus, target, config, compare)
    evaluation.run(dataset, run, target, CPU, compare=compare)
    facts = evaluation.seal(dataset)["facts"]
    assert list(facts["others"]) == ["exported", "reduced", "shallow"]
    assert all(part["num_lossless"] == 3 for part in facts["others"].values())
    assert len(facts["others"]["shallow"]["histogram"]) == 3
    report = dataset.storage.get("report.md").decode()
    assert "| exported | reduced | shallow |" in report
    assert "minus the trained drafter's" in report


def test_a_drafter_of_another_target_or_with_changed_files_is_refused(
    root, target, tmp_path_factory
):
    run, corpus = sealed_run(root, target), sealed_corpus(root, rows(3))
    wide = targets.qwen3(tmp_path_factory.mktemp("wide"), hidden_size=48)
    folder = exported(root, sealed_run(root, wide, name="wide"), wide)
    compare = [DrafterSource(name="wide", source=folder)]
    dataset = evaluation.plan(root, "demo", run, corpus, target, CONFIG, compare)
    with pytest.raises(InputError, match="hidden size 48 and 272 tokens, this one has 32"):
        evaluation.run(dataset, run, target, CPU, compare=compare)
    own = exported(root, run, target)
    compare = [DrafterSource(name="own", source=own)]
    dataset = evaluation.plan(root, "demo", run, corpus, target, CONFIG, compare)
    config = Path(own) / "config.json"
    config.write_text(config.read_text().replace("1e-06", "1e-05"))
    with pytest.raises(MismatchError, match="have changed since"):
        evaluation.run(dataset, run, target, CPU, compare=compare)
    with pytest.raises(InputError, match="'after' is taken"):
        evaluation.plan(
            root, "demo", run, corpus, target, CONFIG, [DrafterSource(name="after", source=own)]
        )


def test_a_drafter_with_an_embedding_of_its_own_is_refused(root, target):
    run, corpus = sealed_run(root, target), sealed_corpus(root, rows(3))
    own = exported(root, run, target)
    weights = Path(own) / "model.safetensors"
    embedding = load_embedding_and_head(target)[0] + 0.1
    save_file({**load_file(weights), "embed_tokens.weight": embedding}, weights)
    compare = [DrafterSource(name="own", source=own)]
    dataset = evaluation.plan(root, "demo", run, corpus, target, CONFIG, compare)
    with pytest.raises(
        InputError, match=r"drafter 'own' has an embed_tokens\.weight of its own that differs"
    ):
        evaluation.run(dataset, run, target, CPU, compare=compare)


def test_both_thinking_modes_of_a_template_without_a_switch_are_refused(root, target):
    with pytest.raises(InputError, match="no thinking switch"):
        planned(root, target, config=CONFIG.model_copy(update={"thinking": [False, True]}))
