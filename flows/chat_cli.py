"""`dflash generate` and `dflash chat`: a target and its drafter in the terminal.

Drafts that the target accepted are coloured; below the text the acceptance length and the speed so far.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from dflash_core.config import TargetConfig
from dflash_core.errors import InputError

if TYPE_CHECKING:
    from dflash_core.chat import Chat
    from dflash_core.decode import Decoding, Step
    from dflash_core.import_drafter import ImportedDrafter

console = Console(highlight=False)

_ACCEPTED, _OWN, _QUIET = "green", "", "dim"
_INCOMPLETE = "\ufffd"  # how tokenizers print the beginning of a character

DrafterPath = Annotated[
    str,
    typer.Argument(
        metavar="DRAFTER",
        help="Folder, URL or hub id of a drafter, or a run under the root, such as runs/demo-0123456789ab.",
    ),
]
Target = Annotated[str, typer.Option(help="Hugging Face id or folder of the target.")]
Root = Annotated[str, typer.Option(help="Folder or s3://bucket/prefix that holds the run.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer.")]
Temperature = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")]
TopP = Annotated[float, typer.Option(min=1e-6, max=1, help="Nucleus sampling.")]
Tree = Annotated[
    int, typer.Option(min=0, help="Drafts of a step in all branches of a tree; 0 for a chain.")
]
Thinking = Annotated[bool, typer.Option(help="Let the target think before it answers.")]
TemplateOptions = Annotated[
    list[str],
    typer.Option(
        "--template-option",
        metavar="NAME=VALUE",
        help="One of target.template_options; a JSON value, or text.",
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of sampled answers.")]
Device = Annotated[str, typer.Option(help="cuda, cpu, or auto for a GPU when there is one.")]


def register(app: typer.Typer) -> None:
    """Adds both commands."""
    app.command()(generate)
    app.command()(chat)


def generate(
    drafter: DrafterPath,
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    target: Target = "demo/target",
    root: Root = "data",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    tree: Tree = 0,
    thinking: Thinking = False,
    template_options: TemplateOptions = [],  # noqa: B006 - typer copies it
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Answers one prompt with target and drafter."""
    session = Session(drafter, target, root, template_options, thinking=thinking, device=device)
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    decoding = session.decoding(max_new_tokens, temperature, top_p, tree)
    steps = session.steps([{"role": "user", "content": text}], decoding, seed)
    show(session.chat, steps, decoding.stop_ids)


def chat(
    drafter: DrafterPath,
    target: Target = "demo/target",
    root: Root = "data",
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    tree: Tree = 0,
    thinking: Thinking = False,
    template_options: TemplateOptions = [],  # noqa: B006 - typer copies it
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """A conversation with target and drafter; an empty line or Ctrl-D ends it."""
    session = Session(drafter, target, root, template_options, thinking=thinking, device=device)
    decoding = session.decoding(max_new_tokens, temperature, top_p, tree)
    messages: list[dict] = []
    while question := _ask():
        messages.append({"role": "user", "content": question})
        steps = session.steps(messages, decoding, seed + len(messages))
        answer = show(session.chat, steps, decoding.stop_ids)
        messages.append({"role": "assistant", "content": answer})


def _ask() -> str:
    try:
        return console.input("[bold]> [/bold]").strip()
    except EOFError:
        return ""


class Session:
    """Target and drafter, loaded."""

    def __init__(
        self,
        drafter: str,
        target: str,
        root: str,
        template_options: list[str],
        *,
        thinking: bool,
        device: str,
    ) -> None:
        """
        Raises:
            InputError: one of them cannot be loaded, or they do not belong together.
        """
        from dflash_core.chat import Chat
        from dflash_core.devices import resolve_device
        from dflash_core.generation import stop_ids
        from dflash_core.target import load_causal_lm, load_tokenizer

        where = resolve_device(device)
        dtype = "float32" if where.type == "cpu" else "bfloat16"
        config = TargetConfig(id=target, dtype=dtype, template_options=_options(template_options))
        with console.status("loading"):
            found = load_drafter(drafter, root, config)
            self.chat = Chat(load_tokenizer(config), thinking, config.template_options)
            self.model: Any = load_causal_lm(config, where)
            self.drafter = found.build().to(where, self.model.dtype).requires_grad_(False)
            self.embedding = self.model.get_input_embeddings().weight
            found.require_embedding(self.embedding, f"drafter {drafter!r}")
            self.head, self.token_ids = self.model.get_output_embeddings().weight, None
            if found.head_DH is not None:
                self.head = found.head_DH.to(where, self.model.dtype)
            if found.token_ids_D is not None:
                self.token_ids = found.token_ids_D.to(where)
            self.stop_ids = stop_ids(self.model, self.chat)

    def decoding(
        self, max_new_tokens: int, temperature: float, top_p: float, tree: int
    ) -> Decoding:
        from dflash_core.decode import Decoding
        from dflash_core.sampling import Sampling

        return Decoding(
            max_new_tokens, self.stop_ids, Sampling(temperature, top_p), tree_nodes=tree
        )

    def steps(self, messages: list[dict], decoding: Decoding, seed: int) -> Iterator[Step]:
        """The answer to a conversation, step by step."""
        from dflash_core.decode import speculate_steps
        from dflash_core.evaluation_prompts import encode_prompt

        prompt = encode_prompt(self.chat, messages, None)
        return speculate_steps(
            self.model,
            self.drafter,
            self.embedding,
            self.head,
            [prompt],
            decoding,
            [seed],
            self.token_ids,
        )


def _options(texts: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InputError(f"template option {text!r} has no value; expected NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def load_drafter(path: str, root: str, target: TargetConfig) -> ImportedDrafter:
    """The drafter of a run under `root`, or of a folder, URL or hub id.

    Raises:
        InputError: there is none at `path`.
        MismatchError: the run is of another target.
    """
    from dflash_core import checkpoint
    from dflash_core.evaluation import require_target
    from dflash_core.import_drafter import ImportedDrafter, read_drafter
    from dflash_core.manifest import Dataset
    from dflash_core.storage import Storage
    from dflash_core.target import text_config

    if not path.startswith("runs/"):
        return read_drafter(path, num_target_layers=text_config(target).num_hidden_layers)
    run = Dataset.open(Storage.from_url(root), path)
    require_target(run, target, "give the run's own target")
    drafter, shape, step = checkpoint.load_drafter(run)
    return ImportedDrafter("run", shape, drafter.state_dict(), None, None, f"step {step}")


# --- the screen --------------------------------------------------------------------------------


def show(chat: Chat, steps: Iterable[Step], stop_ids: Collection[int]) -> str:
    """Prints an answer while it is made.

    Returns:
        Its text, without the token that ended it.
    """
    printer, counter = _Printer(chat), _Counter()
    with Live(console=console, refresh_per_second=12) as live:
        for step in steps:
            counter.add(step)
            for place, token in enumerate(step.tokens):
                if token in stop_ids:
                    continue
                for line in printer.add(token, _ACCEPTED if place < step.accepted else _OWN):
                    live.console.print(line)
            live.update(Group(printer.line, counter.text()))
        for line in printer.flush(_OWN):
            live.console.print(line)
        live.update(Group(printer.line, counter.text()))
    return printer.text


class _Printer:
    """Tokens to styled text, a whole line at a time.

    A character may be spread over several tokens, so text is held back until it is complete.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._tokens: list[int] = []
        self._start = self._end = (
            0  # tokens before `_end` are out; those from `_start` on give context
        )
        self.text = ""
        self.line = Text()

    def add(self, token: int, style: str) -> Iterator[Text]:
        """Lines that this token completes."""
        self._tokens.append(token)
        if not self._chat.decode(self._tokens[self._start :]).endswith(_INCOMPLETE):
            yield from self.flush(style)

    def flush(self, style: str) -> Iterator[Text]:
        """Lines that everything held back completes."""
        before = self._chat.decode(self._tokens[self._start : self._end])
        new = self._chat.decode(self._tokens[self._start :])[len(before) :]
        self._start, self._end = self._end, len(self._tokens)
        self.text += new
        *complete, rest = new.split("\n")
        for part in complete:
            yield self.line.append(part, style)
            self.line = Text()
        self.line.append(rest, style)


class _Counter:
    """Acceptance length and speed so far."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first = 0.0
        self._tokens = self._steps = 0

    def add(self, step: Step) -> None:
        if not step.verified:
            self._first = time.perf_counter()
            return
        self._tokens += len(step.tokens)
        self._steps += 1

    def text(self) -> Text:
        seconds = time.perf_counter() - self._first
        parts = [f"{self._tokens + 1} tokens", f"prompt {self._first - self._began:.2f} s"]
        if self._steps:
            parts += [
                f"acceptance length {self._tokens / self._steps:.2f}",
                f"{self._tokens / seconds:.1f} tokens/s",
            ]
        return Text(" · ".join(parts), _QUIET)
