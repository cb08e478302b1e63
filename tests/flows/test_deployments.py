"""prefect.yaml as `dflash deploy` and the form in the UI will read it."""

from __future__ import annotations

import re
import subprocess
import sys
import tokenize
import typing
from pathlib import Path

import pytest
import yaml

from flows import store_params
from flows.cli import FLOWS

ROOT = Path(__file__).parents[2]
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]

MODELS = {f"flows/{module}.py:{module}": model for module, model, _ in FLOWS.values()}
MODELS |= {f"flows/store.py:{name}": model for name, model in store_params.FLOWS.items()}


@pytest.fixture(params=DEPLOYMENTS, ids=lambda one: f"{one['entrypoint']}:{one['name']}")
def deployment(request):
    return request.param


@pytest.fixture
def flow(deployment, monkeypatch):
    """The flow, loaded from its file as a worker does."""
    from prefect.flows import load_flow_from_entrypoint

    monkeypatch.chdir(ROOT)
    return load_flow_from_entrypoint(deployment["entrypoint"])


def test_every_flow_is_deployed_under_its_own_name():
    entrypoints = {deployment["entrypoint"] for deployment in DEPLOYMENTS}
    assert entrypoints >= MODELS.keys()
    names = [(deployment["entrypoint"], deployment["name"]) for deployment in DEPLOYMENTS]
    assert len(set(names)) == len(names)


def test_parameters_fit_the_form_and_give_the_defaults(deployment, flow):
    from prefect.utilities.schema_tools.hydration import HydrationContext, hydrate
    from prefect.utilities.schema_tools.validation import validate

    if "parameters" not in deployment:
        pytest.skip("started by another run, which gives all parameters")
    values = hydrate(deployment["parameters"], HydrationContext())
    validate(
        values, flow.parameters.model_dump_for_openapi(), raise_on_error=True, preprocess=False
    )
    model = typing.get_type_hints(flow.fn)["params"]
    changed = deployment["parameters"]["params"]
    assert flow.validate_parameters(values)["params"] == model.model_validate(changed)
    assert changed == {} or deployment["name"] != "default"


def test_the_form_explains_every_parameter(flow):
    schema = flow.parameters.model_dump_for_openapi()
    silent = [
        f"{model}.{name}"
        for model, body in schema["definitions"].items()
        for name, field in body.get("properties", {}).items()
        if not field.get("description")
    ]
    assert silent == []
    assert "root" in str(schema["definitions"]), "the walk found the parameters at all"


def test_nothing_starts_by_itself(deployment):
    assert deployment["work_pool"]["name"] == "dflash"
    assert deployment["work_pool"]["work_queue_name"] in ("cpu", "gpu")
    assert {"dflash"} < set(deployment["tags"])
    assert deployment["description"].strip()
    assert not any(schedule["active"] for schedule in deployment.get("schedules", []))
    assert "triggers" not in deployment


def test_no_secret_and_no_machine_in_the_file():
    text = (ROOT / "prefect.yaml").read_text()
    assert not re.search(r"secret|passw|access_key|api_key|\bhf_|AKIA|://", text, re.IGNORECASE)
    assert not re.search(r"\s/\w", text), "an absolute path"


def test_nothing_is_unpickled():
    for folder in ("dflash_core", "flows", "deployments"):
        for file in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"import (cloud)?pickle|torch\.load\(", file.read_text()), file


def test_processes_of_a_deployed_flow_import_pythons_own_modules():
    """Curation and tokenization start some; a worker loads the flow from its file, as here."""
    code = (
        "import multiprocessing; from prefect.flows import load_flow_from_entrypoint; "
        "load_flow_from_entrypoint('flows/tokenize.py:tokenize'); "
        "pool = multiprocessing.get_context('spawn').Pool(1); "
        """print('found', pool.apply(eval, ("__import__('tokenize').__file__",)))"""
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    [found] = re.findall("found (.*)", done.stdout)
    assert Path(found) == Path(tokenize.__file__)
