"""Chats made from the source of the Python standard library.

A real corpus for machines that can download nothing. The text is read from the standard library of the Python that
runs this code, so another Python version gives slightly other chats; nothing else (file system order, time, locale)
has an influence. The library's text is under the PSF licence.

The rule, in full:

- **Modules.** Every importable `.py` file below the standard library's folder, sorted by dotted name, without its tests
  (`test`, `tests`, `idle_test`), `site-packages`, bundled wheels and generated `_sysconfigdata*` files.
- **Definitions.** Every function, method and small class, in file order, whose code without its docstring is dedented,
  parses by itself, does more than `pass` or `raise`, and has 80 to `max_code_characters` characters. Code that was
  seen before is skipped, so every definition of one reading is different.
- **Chats.** Each definition gives `phrasings` chats. Kind, wording, system message and tools follow from a hash of the
  definition's name and the number of the phrasing. Kinds and their shares are in `KIND_SHARES`.
- **Hold-out.** `metadata["group"]` is the dotted module name; `is_held_out(group, fraction)` splits by its hash, so all
  chats of a module are on the same side, whatever the order or number of chats.
"""

import ast
import functools
import hashlib
import json
import sysconfig
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Chat = dict[str, Any]
Message = dict[str, Any]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
DefinitionNode = FunctionNode | ast.ClassDef

KIND_SHARES = {
    "code": 0.54,  # signature and docstring -> the code
    "complete": 0.14,  # first lines -> the whole definition
    "explain": 0.14,  # code -> docstring and facts
    "dialogue": 0.05,  # the code, then its explanation
    "tool": 0.13,  # a tool call, its result, an answer
}
"""Share of each `metadata["kind"]`; sums to one."""

THINKING_SHARE = 0.09
"""Share of "code" chats with a short `reasoning_content`: about 5 % of all chats."""

SYSTEM_SHARE = 0.15
MAX_SUMMARY_CHARACTERS = 240
MIN_CODE_CHARACTERS = 80
_EXCLUDED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "_bundled", "lib-dynload"}


def is_held_out(group: str, fraction: float) -> bool:
    """Whether `group` (a dotted module name) belongs to the held-out share of all groups.

    The first 32 bits of the name's SHA-256, read as a number in [0, 1), are compared with `fraction`. A group held out
    at some fraction is held out at every larger one.
    """
    return int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) / 2**32 < fraction


def read(
    modules: Collection[str] | None = None,
    *,
    phrasings: int = 1,
    max_code_characters: int = 800,
) -> Iterator[Chat]:
    """Yields chats in the OpenAI form: `{"messages", "tools", "metadata"}`.

    `metadata` holds `group` (dotted module name), `kind` (a key of `KIND_SHARES`), `name` (qualified name of the
    definition) and `thinking` (whether the assistant's message carries `reasoning_content`).

    Args:
        modules: Dotted names to read; None reads all. Names that don't exist are ignored.
        phrasings: Chats for each definition, at least 1. Phrasing `i` does not depend on how many are asked for.
        max_code_characters: Longest code of a definition, in characters; 800 is about 230 tokens.
    """
    seen: set[bytes] = set()
    for module, source in module_sources(modules):
        for definition in definitions(module, source, max_code_characters):
            digest = hashlib.sha256(definition.code.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            for phrasing in range(phrasings):
                yield chat_about(definition, phrasing)


# --- modules ----------------------------------------------------------------------------------------------------------


def module_sources(modules: Collection[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yields `(dotted name, source text)` of the standard library's modules, sorted by name.

    Files that are not UTF-8 or don't parse (the library ships a few on purpose) are left out.
    """
    for name, path in sorted(_module_files(Path(sysconfig.get_path("stdlib"))).items()):
        if modules is not None and name not in modules:
            continue
        try:
            source = path.read_text(encoding="utf-8")
            _parse(source)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        yield name, source


def _module_files(root: Path) -> dict[str, Path]:
    """Maps dotted module names to files."""
    files = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        importable = all(part.isidentifier() for part in parts)
        generated = parts[-1].startswith("_sysconfigdata")  # names this machine's folders
        if not importable or generated or _EXCLUDED_FOLDERS.intersection(parts):
            continue
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    files.pop("", None)
    return files


# A module is parsed to see whether it can be, then at once for its definitions.
@functools.lru_cache(maxsize=1)
def _parse(source: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules
        return ast.parse(source)


# --- definitions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Definition:
    """One function, method or class of the library."""

    module: str
    qualname: str
    noun: str
    """"function", "method" or "class"."""
    header: str
    """Its first logical line, `def f(a, b=1):`, without decorators."""
    summary: str
    """First paragraph of its docstring in one line; empty when it has none."""
    code: str
    """Source, dedented, decorators included, docstring left out; parses by itself."""
    facts: tuple[str, ...]
    """Sentences that can be read off the code: parameters, calls, errors, result."""

    @property
    def name(self) -> str:
        return self.qualname.rpartition(".")[2]


def definitions(module: str, source: str, max_code_characters: int) -> Iterator[Definition]:
    """Yields the usable definitions of one module in file order."""
    lines = source.splitlines(keepends=True)
    for qualname, noun, node in _definition_nodes(_parse(source).body, prefix=""):
        code = _code_without_docstring(lines, node)
        if not MIN_CODE_CHARACTERS <= len(code) <= max_code_characters:
            continue
        if _is_trivial(node) or not parses(code):
            continue
        yield Definition(
            module, qualname, noun, header_of(node), _summary(node), code, facts_of(node, noun)
        )


def parses(code: str) -> bool:
    """Whether `code` is a syntactically valid Python module."""
    try:
        _parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def _definition_nodes(
    body: list[ast.stmt], prefix: str
) -> Iterator[tuple[str, str, DefinitionNode]]:
    """Yields `(qualified name, noun, node)` of module and class level definitions, outer before inner."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield prefix + node.name, "class", node
            yield from _definition_nodes(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, FunctionNode):
            yield prefix + node.name, "method" if prefix else "function", node


def _code_without_docstring(lines: list[str], node: DefinitionNode) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    kept = range(first, (node.end_lineno or first) + 1)
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        dropped = range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)
        kept = [number for number in kept if number not in dropped]
    return textwrap.dedent("".join(lines[number - 1] for number in kept)).strip()


def _is_trivial(node: DefinitionNode) -> bool:
    """Nothing but a docstring, `pass`, `...` or `raise`."""
    return all(
        isinstance(statement, ast.Pass | ast.Raise)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in node.body
    )


def header_of(node: DefinitionNode) -> str:
    """The first logical line of a definition, without decorators: `def f(a, b=1):`."""
    if isinstance(node, ast.ClassDef):
        bare: ast.stmt = ast.ClassDef(node.name, node.bases, node.keywords, [ast.Pass()], [])
    else:
        bare = type(node)(node.name, node.args, [ast.Pass()], [], node.returns, lineno=1)
    return ast.unparse(bare).rsplit("\n", 1)[0]


def _summary(node: DefinitionNode) -> str:
    paragraphs = (ast.get_docstring(node) or "").strip().split("\n\n")
    return textwrap.shorten(paragraphs[0], MAX_SUMMARY_CHARACTERS, placeholder=" ...")


def facts_of(node: DefinitionNode, noun: str) -> tuple[str, ...]:
    """Short sentences about parameters, result, calls and errors, in that order."""
    if isinstance(node, ast.ClassDef):
        methods = [child.name for child in node.body if isinstance(child, FunctionNode)]
        return (f"It defines {_quoted_list(methods)}.",) if methods else ("It defines no methods.",)
    arguments = node.args
    parameters = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    parameters = [name for name in parameters if name not in ("self", "cls")]
    facts = [
        f"It takes {_quoted_list(parameters)}." if parameters else f"The {noun} takes no arguments."
    ]
    inside = [child for statement in node.body for child in ast.walk(statement)]
    if any(isinstance(child, ast.Yield | ast.YieldFrom) for child in inside):
        facts.append("It is a generator.")
    elif any(isinstance(child, ast.Return) and child.value is not None for child in inside):
        facts.append("It returns a value.")
    calls = _distinct(ast.unparse(child.func) for child in inside if isinstance(child, ast.Call))
    if calls := [call for call in calls if call.replace(".", "").isidentifier()][:4]:
        facts.append(f"It calls {_quoted_list(calls)}.")
    raised = (child.exc for child in inside if isinstance(child, ast.Raise) and child.exc)
    errors = _distinct(
        ast.unparse(exc.func if isinstance(exc, ast.Call) else exc) for exc in raised
    )
    if errors := [error for error in errors if error[:1].isupper()][:2]:
        facts.append(f"It may raise {_quoted_list(errors)}.")
    return tuple(facts)


def _distinct(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _quoted_list(names: list[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


# --- chats ------------------------------------------------------------------------------------------------------------


def chat_about(definition: Definition, phrasing: int = 0) -> Chat:
    """Phrasing number `phrasing` of the chats about `definition`."""
    draw = _Draw(f"{definition.module}:{definition.qualname}:{phrasing}")
    kind = draw.kind()
    turns, tools = _WRITERS[kind](definition, draw)
    thinking = any("reasoning_content" in turn for turn in turns)
    if draw.below("system", SYSTEM_SHARE):
        turns = [{"role": "system", "content": draw.one_of("system text", _SYSTEM_TEXTS)}, *turns]
    metadata = {
        "group": definition.module,
        "kind": kind,
        "name": definition.qualname,
        "thinking": thinking,
    }
    return {"messages": turns, "tools": tools, "metadata": metadata}


@dataclass(frozen=True, slots=True)
class _Draw:
    """Choices that look random and depend on nothing but a key and the name of the choice."""

    key: str

    def unit(self, choice: str) -> float:
        return int(hashlib.sha256(f"{self.key}:{choice}".encode()).hexdigest()[:8], 16) / 2**32

    def below(self, choice: str, share: float) -> bool:
        return self.unit(choice) < share

    def number(self, choice: str, below: int) -> int:
        return int(self.unit(choice) * below)

    def one_of(self, choice: str, options: tuple[str, ...]) -> str:
        return options[self.number(choice, len(options))]

    def kind(self) -> str:
        unit, total = self.unit("kind"), 0.0
        for kind, share in KIND_SHARES.items():
            total += share
            if unit < total:
                return kind
        return "code"  # rounding of the shares' sum


_SYSTEM_TEXTS = (
    "You write plain, correct Python.",
    "You are a careful Python programmer. Answer with code.",
    "You help with the Python standard library.",
)

_CODE_REQUESTS = (
    "Write the {noun} `{qualname}` of the module `{module}`.\n\n{stub}",
    "Implement this {noun}:\n\n{stub}",
    "Fill in the body.\n\n{stub}",
    "I need a Python {noun} called `{name}`.{doc} The signature is `{header}`",
    "How would you write `{header}` in Python?{doc}",
    "Please write `{qualname}` from `{module}`:\n\n{stub}",
    "Give me the code of this {noun}.{doc}\n\n{stub_bare}",
    "`{header}`\n\nWrite it.{doc}",
    "Write Python code for `{name}`.{doc}\n\nIt starts with:\n\n{stub_bare}",
)

_CODE_OPENINGS = ("", "", "", "Here is `{name}`:\n\n", "This is the {noun} `{qualname}`.\n\n")

_COMPLETE_REQUESTS = (
    "Complete this code:\n\n{start}",
    "Finish the {noun} `{name}`.\n\n{start}",
    "The rest of this {noun} is missing. Write all of it.\n\n{start}",
    "Continue:\n\n{start}",
)

_EXPLAIN_REQUESTS = (
    "Explain what `{name}` does.\n\n{code}",
    "What does this {noun} do?\n\n{code}",
    "Describe this code from `{module}`.\n\n{code}",
    "{code}\n\nSummarise it, please.",
)

_FOLLOW_UPS = (
    "Now explain it.",
    "What does it do?",
    "Thanks. Describe it in a few sentences.",
)


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _words(definition: Definition) -> dict[str, str]:
    """The named parts that requests and openings are filled with."""
    doc = f'\n    """{definition.summary}"""' if definition.summary else ""
    return {
        "noun": definition.noun,
        "name": definition.name,
        "qualname": definition.qualname,
        "module": definition.module,
        "header": definition.header,
        "code": _fence(definition.code),
        "stub": _fence(f"{definition.header}{doc}"),
        "stub_bare": _fence(definition.header),
        "doc": f" {definition.summary}" if definition.summary else "",
    }


def _fill(template: str, words: dict[str, str]) -> str:
    return template.format_map(words)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _explanation(definition: Definition) -> str:
    opening = (
        definition.summary
        or f"`{definition.name}` is a {definition.noun} of `{definition.module}`."
    )
    return f"{opening}\n\n{' '.join(definition.facts)}"


def _write_code(definition: Definition, draw: _Draw) -> tuple[list[Message], None]:
    words = _words(definition)
    request = _fill(draw.one_of("request", _CODE_REQUESTS), words)
    answer = _assistant(
        _fill(draw.one_of("opening", _CODE_OPENINGS), words) + _fence(definition.code)
    )
    if draw.below("thinking", THINKING_SHARE):
        answer["reasoning_content"] = (
            f"They want the {definition.noun} `{definition.name}`. {' '.join(definition.facts)}"
        )
    return [_user(request), answer], None


def _write_complete(definition: Definition, draw: _Draw) -> tuple[list[Message], None]:
    lines = definition.code.splitlines()
    shown = 1 + draw.number("shown", max(1, len(lines) - 1))
    words = _words(definition) | {"start": _fence("\n".join(lines[:shown]))}
    request = _fill(draw.one_of("request", _COMPLETE_REQUESTS), words)
    return [_user(request), _assistant(_fence(definition.code))], None


def _write_explain(definition: Definition, draw: _Draw) -> tuple[list[Message], None]:
    request = _fill(draw.one_of("request", _EXPLAIN_REQUESTS), _words(definition))
    return [_user(request), _assistant(_explanation(definition))], None


def _write_dialogue(definition: Definition, draw: _Draw) -> tuple[list[Message], None]:
    request = _fill(draw.one_of("request", _CODE_REQUESTS), _words(definition))
    return [
        _user(request),
        _assistant(_fence(definition.code)),
        _user(draw.one_of("follow-up", _FOLLOW_UPS)),
        _assistant(_explanation(definition)),
    ], None


# --- tools ------------------------------------------------------------------------------------------------------------


def _tool(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """An OpenAI function schema whose parameters are all required strings."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


TOOLS = {
    "look_up_function": _tool(
        "look_up_function",
        "Signature and summary of a library function",
        module="dotted module name",
        name="qualified name",
    ),
    "run_code": _tool("run_code", "Runs Python code and returns what it prints", code="the code"),
    "search_docs": _tool("search_docs", "Searches the documentation", query="words to look for"),
}
"""The tools offered in "tool" chats, by name."""

_LOOK_UP_REQUESTS = (
    "Look up `{qualname}` in `{module}`.",
    "What is the signature of `{module}.{qualname}`?",
    "Find out what `{qualname}` of `{module}` does.",
)
_RUN_REQUESTS = (
    "Run this and tell me what it prints:\n\n{snippet}",
    "What does this print? Please run it.\n\n{snippet}",
)
_SEARCH_REQUESTS = (
    "Which {noun} is meant? {summary}",
    "Search the docs: {summary}",
    "I look for a {noun} in the library. {summary}",
)

_SNIPPETS: tuple[tuple[str, Callable[[str, int], object]], ...] = (
    ('print(len("{name}"))', lambda name, number: len(name)),
    ('print("{name}".upper())', lambda name, number: name.upper()),
    ('print("{name}"[:{number}])', lambda name, number: name[:number]),
    ('print("{name}".count("{letter}"))', lambda name, number: name.count(name[0])),
    ("print(sum(range({number})))", lambda name, number: sum(range(number))),
    ("print({number} * {number})", lambda name, number: number * number),
)
"""Code and what it prints, for a definition's name and a small number."""


def _write_tool(definition: Definition, draw: _Draw) -> tuple[list[Message], list[dict[str, Any]]]:
    wanted = draw.one_of("tool", tuple(TOOLS))
    if wanted == "search_docs" and not definition.summary:
        wanted = "look_up_function"  # without a summary there is nothing to search for
    request, arguments, result, answer = _TOOL_STORIES[wanted](definition, draw)
    call = {
        "id": "call_0",
        "type": "function",
        "function": {"name": wanted, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }
    turns = [
        _user(request),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": result},
        _assistant(answer),
    ]
    offered = [name for name in TOOLS if name == wanted or draw.below(f"offer {name}", 0.5)]
    return turns, [TOOLS[name] for name in offered]


def _look_up_story(definition: Definition, draw: _Draw) -> tuple[str, dict[str, str], str, str]:
    request = _fill(draw.one_of("request", _LOOK_UP_REQUESTS), _words(definition))
    arguments = {"module": definition.module, "name": definition.qualname}
    summary = definition.summary or definition.facts[0]
    result = json.dumps({"signature": definition.header, "summary": summary}, ensure_ascii=False)
    return request, arguments, result, f"{summary}\n\n{_fence(definition.header)}"


def _run_story(definition: Definition, draw: _Draw) -> tuple[str, dict[str, str], str, str]:
    template, outcome = _SNIPPETS[draw.number("snippet", len(_SNIPPETS))]
    name, number = definition.name, 2 + draw.number("number", 20)
    snippet = template.format(name=name, number=number, letter=name[0])
    printed = str(outcome(name, number))
    request = _fill(draw.one_of("request", _RUN_REQUESTS), {"snippet": _fence(snippet)})
    return request, {"code": snippet}, printed, f"It prints `{printed}`."


def _search_story(definition: Definition, draw: _Draw) -> tuple[str, dict[str, str], str, str]:
    words = {"noun": definition.noun, "summary": definition.summary}
    request = _fill(draw.one_of("request", _SEARCH_REQUESTS), words)
    query = " ".join(definition.summary.replace("`", "").rstrip(".").split()[:8])
    found = f"{definition.module}.{definition.qualname}"
    return request, {"query": query}, f"{found}: {definition.summary}", f"It is `{found}`."


_TOOL_STORIES = {
    "look_up_function": _look_up_story,
    "run_code": _run_story,
    "search_docs": _search_story,
}

_WRITERS: dict[
    str, Callable[[Definition, _Draw], tuple[list[Message], list[dict[str, Any]] | None]]
] = {
    "code": _write_code,
    "complete": _write_complete,
    "explain": _write_explain,
    "dialogue": _write_dialogue,
    "tool": _write_tool,
}
