"""The `dflash` command. Nothing heavy is imported before a command is known."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dflash_core.errors import DFlashError, InputError
from flows import SETTINGS, chat_cli, store_cli, tokens_cli
from flows import params as models

app = typer.Typer(
    help="From conversations to a DFlash drafter that vLLM and SGLang load.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(store_cli.app, name="store")
app.add_typer(tokens_cli.app, name="tokens")
chat_cli.register(app)
console = Console()

FLOWS = {
    "run": (
        "pipeline",
        models.PipelineParams,
        "All stages, from conversations to an exported drafter.",
    ),
    "curate": ("curate", models.CurateParams, "Raw conversations to a clean corpus."),
    "regenerate": ("regenerate", models.RegenerateParams, "A corpus answered again by the target."),
    "tokenize": ("tokenize", models.TokenizeParams, "A corpus to token ids, loss masks and packs."),
    "extract": ("extract", models.ExtractParams, "Packs to the target's hidden states."),
    "train": ("train", models.TrainParams, "Hidden states to a trained drafter."),
    "evaluate": ("evaluate", models.EvaluateParams, "Acceptance on prompts, decoded here."),
    "served": ("served", models.ServedParams, "Acceptance and speed of a running server."),
    "export": ("export", models.ExportParams, "A checkpoint to directories that engines load."),
}

ConfigFile = Annotated[
    Path | None, typer.Argument(help="YAML file with parameters; see --parameters for all of them.")
]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", "-s", metavar="KEY=VALUE", help="One parameter, such as train.num_steps=200."
    ),
]
Root = Annotated[
    str, typer.Option(help="Folder or s3://bucket/prefix; overrides the file's `root`.")
]
Target = Annotated[str, typer.Option(help="Hugging Face id or folder; overrides `target.id`.")]
ShowParameters = Annotated[
    bool, typer.Option("--parameters", help="List every parameter and stop.")
]


def load_params(
    model: type[BaseModel],
    file: Path | None,
    overrides: list[str],
    defaults: dict[str, Any] | None = None,
) -> Any:
    """Parameters from a YAML file and `key=value` overrides, checked against the model.

    Args:
        defaults: what holds where the file says nothing, instead of the model's.

    Raises:
        InputError: file, key or value cannot be used; names which.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            values = yaml.safe_load(file.read_text()) or {}
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise InputError(f"{file} is not YAML: {_one_line(error)}") from error
        if not isinstance(values, dict):
            raise InputError(f"{file} holds a {type(values).__name__}, expected names with values")
    values = _laid_over(defaults or {}, values)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"--set {text!r} has no '='; expected key=value")
        place = values
        *path, last = key.split(".")
        for name in path:
            if place.get(name) is None:
                place[name] = {}
            place = place[name]
            if not isinstance(place, dict):
                raise InputError(f"--set {text!r}: {name} has the value {place!r} and no parts")
        try:
            place[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise InputError(
                f"--set {text!r}: the value is not YAML ({_one_line(error)}); quote it"
            ) from error
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise InputError(
            f"parameter {where}: {first['msg']}, got {first['input']!r}{more}; "
            "--parameters lists what is known"
        ) from error


def _laid_over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: _laid_over(base[key], top[key])
        for key in base.keys() & top.keys()
        if isinstance(base[key], dict) and isinstance(top[key], dict)
    }
    return base | top | both


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def given(key: str, value: Any) -> str:
    """An override with exactly this value, which YAML might read otherwise."""
    return f"{key}={json.dumps(value)}"


def parameter_table(model: type[BaseModel]) -> Table:
    """Every parameter with default and help, nested names joined by dots."""
    table = Table("parameter", "default", "what it does", box=None, pad_edge=False)
    for name, default, text in _parameters(model):
        table.add_row(name, default, text, style=None)
    return table


def _parameters(model: type[BaseModel], prefix: str = ""):
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        yield (
            prefix + name,
            "" if isinstance(default, BaseModel) or field.is_required() else repr(default),
            " ".join((field.description or "").split()),
        )
        if isinstance(default, BaseModel):
            yield from _parameters(type(default), f"{prefix}{name}.")
        for item in get_args(field.annotation):  # of a list
            if isinstance(item, type) and issubclass(item, BaseModel):
                yield from _parameters(item, f"{prefix}{name}[].")


def run_flow(module: str, params: models.StageParams) -> Any:
    """Runs the flow in this process; the run is visible in the UI of PREFECT_API_URL, if that is set."""
    from importlib import import_module

    from flows import preflight

    preflight.check(params)  # a bad value is one sentence at once, not a traceback a minute later
    flow = getattr(import_module(f"flows.{module}"), module)
    return flow(params)


def named(root: str, target: str) -> list[str]:
    """The options --root and --target as overrides."""
    return [given("root", root)] * bool(root) + [given("target.id", target)] * bool(target)


def _command(name: str, module: str, model: type[BaseModel], text: str) -> None:
    def command(
        config: ConfigFile = None,
        overrides: Overrides = [],  # noqa: B006 - typer copies it
        root: Root = "",
        target: Target = "",
        parameters: ShowParameters = False,
    ) -> None:
        if parameters:
            console.print(parameter_table(model))
            return
        params = load_params(model, config, [*overrides, *named(root, target)])
        result = run_flow(module, params)
        if name != "run":
            console.print(f"{'reused' if result.reused else 'wrote'} {result.url}")
            console.print(f"path under the root: {result.path}")

    app.command(name, help=text)(command)


for _name, (_module, _model, _text) in FLOWS.items():
    _command(_name, _module, _model, _text)


@app.command()
def submit(
    deployment: Annotated[
        str, typer.Argument(help="Such as pipeline/default or pipeline/cluster.")
    ],
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    root: Root = "",
    target: Target = "",
) -> None:
    """Starts a run of a deployment on the server of PREFECT_API_URL, with parameters from a file."""
    from flows import submit as submitting

    flow = deployment.partition("/")[0]
    model = next((model for module, model, _ in FLOWS.values() if module == flow), None)
    if model is None:
        known = ", ".join(sorted(module for module, *_ in FLOWS.values()))
        raise InputError(f"deployment {deployment!r} is of no stage; expected one of {known}")
    defaults = submitting.defaults_of(deployment)
    params = load_params(model, config, [*overrides, *named(root, target)], defaults)
    run = submitting.submit(deployment, params.model_dump(mode="json"), f"{flow}-{params.name}")
    console.print(f"{run.name}: {run.url}", highlight=False, soft_wrap=True)


@app.command()
def plan(
    config: ConfigFile = None,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    root: Root = "",
    target: Target = "",
    parameters: ShowParameters = False,
) -> None:
    """What extraction will make and cost: tokens, packs, bytes, GPU hours, dollars."""
    if parameters:
        console.print(parameter_table(models.PlanParams))
        return
    params = load_params(models.PlanParams, config, [*overrides, *named(root, target)])
    from dflash_core.manifest import Dataset
    from dflash_core.storage import Storage
    from flows.plan import estimated, rows

    tokens = Dataset.open(Storage.from_url(params.root), params.tokens)
    table = Table("what", "value", box=None, pad_edge=False)
    for row in rows(estimated(tokens, params.target, params.extract, params.budget)):
        table.add_row(row["what"], row["value"])
    console.print(table)


@app.command()
def deploy(
    profile: Annotated[str, typer.Option(help="laptop, node or cluster.")] = "laptop",
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    pipeline: Annotated[
        Path | None,
        typer.Option(help="YAML file with parameters of the pipeline's deployments, as for `run`."),
    ] = None,
    parameters: ShowParameters = False,
) -> None:
    """Sets up the server of PREFECT_API_URL: blocks, limits, queues, automations, deployments."""
    from flows.deploy import Setup, deploy

    if parameters:
        console.print(parameter_table(Setup))
        return
    setup = load_params(Setup, None, [given("profile", profile), *overrides])
    params = None
    if pipeline is not None:
        params = load_params(models.PipelineParams, pipeline, [])
        params = params.model_dump(mode="json", exclude_unset=True)
    for line in deploy(setup, params):
        console.print(line, highlight=False, soft_wrap=True)


@app.command()
def server(
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; others than loopback need a proxy with a login."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of UI and API.")] = 4200,
) -> None:
    """Becomes a Prefect server with its UI, with this project's settings."""
    if host in ("0.0.0.0", "::") and "PREFECT_UI_API_URL" not in os.environ:
        raise InputError(
            f"host {host} is no address that a browser can ask; set PREFECT_UI_API_URL to the address of this server "
            "with /api, or listen on one address"
        )
    # The UI tells browsers to ask these.
    os.environ |= {"PREFECT_SERVER_API_HOST": host, "PREFECT_SERVER_API_PORT": str(port)}
    program = "import flows.patient_events; from prefect.cli import app; app()"
    options = ["server", "start", "--host", host, "--port", str(port)]
    os.execv(sys.executable, [sys.executable, "-c", program, *options])


@app.command()
def worker(
    queue: Annotated[str, typer.Option(help="gpu or cpu; empty takes runs of both.")] = "",
    limit: Annotated[
        int, typer.Option(help="Runs at a time; 0 is 1 for gpu, else 8: some only wait for others.")
    ] = 0,
) -> None:
    """Becomes a Prefect worker of the pool `dflash`, with this project's settings."""
    import socket

    options = ["--pool", "dflash", "--name", f"{socket.gethostname()}-{queue or 'all'}"]
    os.environ.update(SETTINGS | os.environ)  # also where a Prefect profile names the server
    limit = limit or (1 if queue == "gpu" else 8)
    options += ["--work-queue", queue] * bool(queue) + ["--limit", str(limit)]
    os.execv(sys.executable, [sys.executable, "-m", "prefect", "worker", "start", *options])


@app.command()
def status(
    root: Annotated[str, typer.Argument(help="Folder or s3://bucket/prefix.")] = "data",
) -> None:
    """Datasets under a root: finished, or how many units are committed."""
    from dflash_core.manifest import Dataset
    from dflash_core.storage import Storage

    storage = Storage.from_url(root)
    table = Table("dataset", "state", "units", box=None, pad_edge=False)
    for stage in ("corpora", "tokens", "hidden", "runs", "evaluations", "served", "exports"):
        for name in storage.child(stage).folders():
            try:
                dataset = Dataset.open(storage, f"{stage}/{name}")
            except (FileNotFoundError, DFlashError):
                table.add_row(f"{stage}/{name}", "no dataset", "")
                continue
            state = "complete" if dataset.complete else "unfinished"
            table.add_row(dataset.path, state, f"{len(dataset.committed()):,}")
    console.print(table)


@app.command()
def readers() -> None:
    """Layouts of conversations that `curate` can read."""
    from dflash_core.corpus.readers import READERS

    table = Table("reader", "layout", box=None, pad_edge=False)
    for name, reader in sorted(READERS.items()):
        table.add_row(name, (reader.__doc__ or "").strip().split("\n")[0])
    console.print(table)


@app.command()
def prompt_sets() -> None:
    """Sets of prompts that `evaluate` knows."""
    from dflash_core.prompt_sets import HELD_OUT, SETS

    table = Table("set", "prompts", "where", box=None, pad_edge=False)
    table.add_row(HELD_OUT, "the corpus' own, kept out of training", "the corpus")
    for name, module in SETS.items():
        source = module.SOURCE
        place = source.path or ("your path" if source.reader == "rows" else "its package")
        text = (module.__doc__ or "").strip().split("\n")[0]
        table.add_row(name, text, f"{place} {source.subset}".strip())
    console.print(table)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; an error the user can act on is one sentence and exit status 1."""
    try:
        app(args=arguments)
    except (DFlashError, FileNotFoundError) as error:  # the second: a dataset that was never begun
        text = f"[red]error:[/red] {escape(str(error))}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
        sys.exit(1)


def run_module(name: str) -> None:
    """`python -m flows.<name>`: the same as the command of that flow."""
    command = next((key for key, (module, *_) in FLOWS.items() if module == name), name)
    main([command, *sys.argv[1:]])


if __name__ == "__main__":
    main()
