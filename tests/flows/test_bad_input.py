"""Bad input is one sentence and exit status 1, before Prefect or the target is loaded."""

from __future__ import annotations

import json
import re
import sys

import pytest
import yaml

from dflash_core.errors import InputError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows.cli import load_params, main, named
from flows.params import PipelineParams
from tests import targets
from tests.flows import pipeline_case as case
from tests.s3 import BUCKET, SECRET


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


@pytest.fixture
def refused(tmp_path, capsys, target):
    """Runs the pipeline command with changed parameters; returns the sentence it ends with."""

    def run(**changes):
        params = case.parameters(tmp_path, str(tmp_path / "root"), target)
        for key, value in changes.items():
            old = params.get(key, {})
            params[key] = {**old, **value} if isinstance(value, dict) else value
        config = tmp_path / "pipeline.yaml"
        config.write_text(yaml.safe_dump(params))
        capsys.readouterr()  # what making the target printed
        with pytest.raises(SystemExit) as stop:
            main(["run", str(config)])
        assert stop.value.code == 1
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err + captured.out
        sentence = captured.err.removeprefix("error: ").strip()
        assert len(sentence.splitlines()) == 1
        return sentence

    return run


def test_unknown_target(refused):
    assert "'/no/such/folder' does not exist" in refused(target={"id": "/no/such/folder"})


def test_brackets_are_not_markup(refused):
    assert "got '[red]'" in refused(name="[red]")


def test_unknown_parameter_names_it(refused):
    assert "train.num_stepz" in refused(train={"num_stepz": 3})


def test_numbers_that_are_none(refused):
    assert "train.learning_rate: Input should be a finite number" in refused(
        train={"learning_rate": float("nan")}
    )
    target = {"template_options": {"temperature": float("inf")}}
    assert "finite number" in refused(target=target)


@pytest.mark.parametrize(
    ("text", "override", "words"),
    [
        ("", "publish_to=@x", "the value is not YAML"),
        ("- a\n- b\n", "name=x", "holds a list"),
        ("train: [", "name=x", "is not YAML"),
        ("train: 3", "train.num_steps=3", "train has the value 3"),
        ("", "name", "has no '='"),
    ],
)
def test_parameters_that_cannot_be_read(tmp_path, text, override, words):
    file = tmp_path / "pipeline.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(words)) as refused:
        load_params(PipelineParams, file, [override])
    assert len(str(refused.value).splitlines()) == 1


def test_an_override_fills_an_empty_part_and_keeps_paths_as_they_are(tmp_path):
    file = tmp_path / "pipeline.yaml"
    file.write_text("train:\n")
    params = load_params(PipelineParams, file, ["train.num_steps=3", *named("/mnt/data #2", "yes")])
    assert params.train.num_steps == 3
    assert (params.root, params.target.id) == ("/mnt/data #2", "yes")


def test_a_stray_folder_does_not_hide_the_datasets(tmp_path, capsys):
    root = Storage.from_url(str(tmp_path))
    root.put("hidden/notes/todo.txt", b"")
    dataset = Dataset.create(root, "hidden", "demo", version=1, config={}, inputs={})
    dataset.commit("00000000", {})
    with pytest.raises(SystemExit) as stop:
        main(["status", str(tmp_path)])
    assert not stop.value.code
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [dataset.path, "unfinished", "1"] in lines
    assert ["hidden/notes", "no", "dataset"] in lines


def test_unreadable_dataset(refused, tmp_path):
    source = {"name": "chats", "reader": "openai", "path": str(tmp_path / "nothing.jsonl")}
    assert "nothing.jsonl" in refused(curate={"sources": [source]})


def test_dataset_in_another_layout_says_which_it_expects(refused, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"foo": 1}) + "\n")
    sentence = refused(curate={"sources": [{"name": "x", "reader": "openai", "path": str(file)}]})
    assert "expects OpenAI chat rows: column `messages`" in sentence


def test_unknown_reader_lists_the_known_ones(refused):
    sentence = refused(curate={"sources": [{"name": "x", "reader": "nope"}]})
    assert "nope" in sentence
    assert "openai" in sentence


def test_prompt_sets_are_looked_for_before_anything_is_computed(refused):
    assert "'gsm9k' is not known" in refused(evaluate={"prompt_sets": [{"set": "gsm9k"}]})
    asked = {"set": "file", "path": "/no/such/prompts.jsonl"}
    assert "/no/such/prompts.jsonl" in refused(evaluate={"prompt_sets": [asked]})


def test_a_layout_that_would_be_served_wrongly_is_refused_before_training(refused):
    drafter = {"num_hidden_layers": 2, "attention": "mixed"}
    sentence = refused(train={"drafter": drafter}, export={"layouts": ["speculators"]})
    assert "layout speculators: vLLM 0.33 would serve" in sentence


def test_where_a_drafter_cannot_be_published_is_said_at_once(refused):
    assert "expected hf://owner/name" in refused(publish_to="hf://nobody")


def test_tokenizer_without_chat_template(refused, tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(**targets._COMMON))
    plain = targets.save(tmp_path / "plain", model, template=None)
    assert "chat template" in refused(target={"id": plain.id})


def test_an_option_that_the_chat_template_does_not_read(refused):
    assert "reads: none" in refused(target={"template_options": {"reasoning_effort": "high"}})
    assert "'tools', which is set" in refused(target={"template_options": {"tools": []}})


def test_vocabulary_mismatch(refused, tmp_path):
    small = targets.qwen3(tmp_path / "small", vocab_size=100, pad_token_id=None, eos_token_id=None)
    assert "100 rows" in refused(target={"id": small.id})


def test_a_drafter_that_cannot_be_made(refused):
    sentence = refused(train={"drafter": {"mask_token_id": 9999}})
    assert "mask_token_id 9999 has no embedding row" in sentence
    assert "names layer 40" in refused(extract={"target_layer_ids": [1, 40]})


def test_unknown_scheme_of_the_root(refused):
    assert "gs" in refused(root="gs://bucket/x")


@pytest.mark.server
def test_missing_bucket(refused, s3_server):
    assert "bucket does not exist" in refused(root="s3://no-such-bucket-here/x")


@pytest.mark.server
def test_wrong_credentials_keep_the_secret(refused, s3_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong" + SECRET[:3])
    sentence = refused(root=f"s3://{BUCKET}/x")
    assert "check AWS_SECRET_ACCESS_KEY" in sentence
    assert SECRET[:8] not in sentence


def test_the_command_starts_without_heavy_imports():
    import subprocess

    code = (
        "import sys; from flows.cli import app; "
        "heavy = {'torch', 'transformers', 'prefect', 'zarr', 'datasets'} & set(sys.modules); "
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
