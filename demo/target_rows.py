"""Training rows of the demo target: tokenizer, chats as token ids with weights, plain source text.

A chat is one row of its own, padded on the right: no document sees another, which a packed row of a linear-attention
model could not promise on every machine. Source text is one long stream from which windows are drawn.
"""

import ast
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dflash_core.corpus.readers.python_stdlib import (
    Chat,
    Definition,
    chat_about,
    definitions,
    facts_of,
    header_of,
    is_held_out,
    module_sources,
    parses,
)

VOCAB_SIZE = 5120
"""Entries of the tokenizer, the added ones included."""

HELD_OUT_FRACTION = 0.05
"""Share of modules that neither tokenizer nor weights have seen; the corpus split uses the same rule."""

MAX_ROW_TOKENS = 768
MAX_CODE_CHARACTERS = 800

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that stay visible when special tokens are skipped, because parsers need them."""

# A word takes one character before it, punctuation takes the line ends after it, and line ends are never split from
# each other: so the "\n\n" that closes a generation prompt is the same token whatever the answer begins with.
_PRE_TOKEN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

ASSISTANT_WEIGHT, PROMPT_WEIGHT = 10, 1
"""Loss weights of a chat's tokens, in tenths."""


# --- tokenizer --------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], chat_template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts`, the added tokens last, ready for `save_pretrained`."""
    added = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    added += [AddedToken(token, special=False, normalized=False) for token in MARKER_TOKENS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(added)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        mask_token="<|mask|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def render(tokenizer: PreTrainedTokenizerFast, chat: Chat) -> str:
    """The chat as the template writes it, with thinking on where it holds reasoning."""
    text = tokenizer.apply_chat_template(
        chat["messages"],
        tools=chat["tools"],
        tokenize=False,
        enable_thinking=chat["metadata"]["thinking"],
    )
    return str(text)


# --- chats and text ---------------------------------------------------------------------------------------------------


def split_definitions(
    modules: list[str] | None = None,
) -> tuple[list[Definition], list[Definition]]:
    """Definitions of the training and of the held-out modules, each code once and no code on both sides."""
    seen: set[str] = set()
    sides: tuple[list[Definition], list[Definition]] = ([], [])
    sources = [(is_held_out(m, HELD_OUT_FRACTION), m, s) for m, s in module_sources(modules)]
    for held_out, module, source in sorted(sources):  # training first: held-out copies are dropped
        for definition in definitions(module, source, MAX_CODE_CHARACTERS):
            if definition.code not in seen:
                seen.add(definition.code)
                sides[held_out].append(definition)
    return sides


def training_chats(
    some_definitions: list[Definition], phrasings: int, renamed_share: float
) -> Iterator[Chat]:
    """Several chats about each definition; in a share of them it carries other names.

    Renaming teaches a small model to copy names from the request instead of recalling the library's own.
    """
    names = _name_pool()
    for definition in some_definitions:
        draw = random.Random(f"{definition.module}:{definition.qualname}")
        for phrasing in range(phrasings):
            subject = definition
            if phrasing and draw.random() < renamed_share:
                subject = renamed(definition, names, draw)
            yield chat_about(subject, phrasing)


def source_texts(with_tests: bool) -> Iterator[str]:
    """Source of every module of the training side, and of the library's tests of such modules."""
    held_out = set()
    for module, source in module_sources():
        if is_held_out(module, HELD_OUT_FRACTION):
            held_out.update(module.split("."))
        else:
            yield source
    if not with_tests:
        return
    tests = Path(ast.__file__).parent / "test"
    for path in sorted(tests.glob("test_*.py")):
        # test_json tests json, test_asyncio/test_queues.py would be in a folder and is not read
        if not held_out.intersection(path.stem.split("_")):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if parses(text):
                yield text


def _name_pool() -> list[str]:
    """Parameter names of the training modules, each as often as it occurs: names to rename to."""
    counts: Counter[str] = Counter()
    for module, source in module_sources():
        if not is_held_out(module, HELD_OUT_FRACTION):
            counts.update(re.findall(r"(?<=[(,] )([a-z][a-z_]{2,11})(?=[,)=])", source))
    return sorted(counts.elements())


def renamed(definition: Definition, names: list[str], draw: random.Random) -> Definition:
    """`definition` with most parameters and local names replaced, or itself where that is not safe.

    Only names whose every use is an `ast.Name` or `ast.arg` node are touched. Code with f-strings, `global`,
    `nonlocal`, pattern matching or non-ASCII text is left alone: there, names hide outside such nodes or their
    positions can't be trusted.
    """
    unsafe = ast.JoinedStr | ast.Global | ast.Nonlocal | ast.Match | ast.ClassDef
    tree = ast.parse(definition.code)
    if not definition.code.isascii() or any(isinstance(n, unsafe) for n in ast.walk(tree)):
        return definition
    mapping = _new_names(tree, names, draw)
    lines = definition.code.split("\n")
    places = [
        (node.lineno, node.col_offset, name)
        for node in ast.walk(tree)
        if isinstance(node, ast.Name | ast.arg) and (name := _local_name(node)) in mapping
    ]
    for line, column, name in sorted(places, reverse=True):
        text = lines[line - 1]
        lines[line - 1] = text[:column] + mapping[name] + text[column + len(name) :]
    code = "\n".join(lines)
    if not parses(code):
        return definition
    node = ast.parse(code).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    summary = re.sub(r"\w+", lambda word: mapping.get(word[0], word[0]), definition.summary)
    return replace(
        definition,
        header=header_of(node),
        summary=summary,
        code=code,
        facts=facts_of(node, definition.noun),
    )


def _local_name(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


def _new_names(tree: ast.AST, names: list[str], draw: random.Random) -> dict[str, str]:
    nodes = list(ast.walk(tree))
    taken = {_local_name(node) for node in nodes}
    handlers = {node.name for node in nodes if isinstance(node, ast.ExceptHandler)}
    bound = {
        _local_name(node)
        for node in nodes
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }
    mapping = {}
    for name in sorted(bound - handlers - {"self", "cls", ""}):
        new = draw.choice(names)
        if new not in taken and draw.random() < 0.7:
            taken.add(new)
            mapping[name] = new
    return mapping


# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows of different lengths, end to end."""

    ids: np.ndarray
    """uint16 [total]"""
    weights: np.ndarray
    """uint8 [total]: loss weight in tenths of predicting this token from those before it."""
    offsets: np.ndarray
    """int64 [rows + 1]"""

    def save(self, path: Path) -> None:
        np.savez_compressed(path, ids=self.ids, weights=self.weights, offsets=self.offsets)

    @classmethod
    def load(cls, path: Path) -> "Rows":
        with np.load(path) as arrays:
            return cls(arrays["ids"], arrays["weights"], arrays["offsets"])


def rows_of(tokenizer: PreTrainedTokenizerFast, some_chats: Iterable[Chat]) -> Rows:
    """Renders and encodes chats; those longer than `MAX_ROW_TOKENS` are left out."""
    texts = [render(tokenizer, chat) for chat in some_chats]
    encodings = tokenizer.backend_tokenizer.encode_batch(texts)
    ids = [encoding.ids for encoding in encodings if len(encoding.ids) <= MAX_ROW_TOKENS]
    find = _AnswerFinder(tokenizer)
    return Rows(
        np.array([token for row in ids for token in row], dtype=np.uint16),
        np.concatenate([find.weights(row) for row in ids]),
        np.cumsum([0, *map(len, ids)], dtype=np.int64),
    )


class _AnswerFinder:
    """Weights of a rendered chat: full from the first token the model writes to `<|im_end|>`.

    Looks for marker ids. That is safe here because the library's text holds no marker of ours; a corpus of other
    people's text needs the comparison of prefixes instead.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        def encode(text: str) -> list[int]:
            return tokenizer(text)["input_ids"]

        self.opening = encode("<|im_start|>assistant\n")
        self.empty_think = encode("<think>\n\n</think>\n\n")
        self.end = encode("<|im_end|>")[0]

    def weights(self, ids: list[int]) -> np.ndarray:
        """uint8 [len(ids)]"""
        weights = np.full(len(ids), PROMPT_WEIGHT, dtype=np.uint8)
        for at in (i for i, token in enumerate(ids) if token == self.opening[0]):
            first = at + len(self.opening)
            if ids[at:first] != self.opening:
                continue
            if ids[first : first + len(self.empty_think)] == self.empty_think:
                first += len(self.empty_think)
            weights[first : ids.index(self.end, first) + 1] = ASSISTANT_WEIGHT
        return weights


def stream_of(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> np.ndarray:
    """uint16 [total]: the texts with the pad token between them."""
    encodings = tokenizer.backend_tokenizer.encode_batch(list(texts))
    separator = tokenizer.pad_token_id
    return np.concatenate(
        [np.array([*encoding.ids, separator], dtype=np.uint16) for encoding in encodings]
    )
