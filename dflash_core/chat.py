"""A target's chat template: conversations to exactly the text its server would build from them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Generator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from jinja2 import meta, pass_context

from dflash_core.errors import InputError

if TYPE_CHECKING:
    from jinja2.runtime import Context
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# How templates want a call's arguments (as objects, or as text) and the content beside it (empty, or none).
_CALL_FORMS = ((True, ""), (True, None), (False, ""), (False, None))
# Where templates look for an answer's reasoning (gpt-oss: thinking).
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_PROBE_PARAMETERS = {
    "type": "object",
    "properties": {"probe_key": {"type": "integer"}},
    "required": [],
}
# What a template gets for a message's key of that name is the method.
_OF_DICTS = frozenset(dir(dict))


class Unrenderable(Exception):
    """The template refuses a conversation; the text says why."""


class Chat:
    """Renders and encodes with the tokenizer's own template, thinking mode explicit.

    Attributes:
        tokenizer: a fast tokenizer.
        after_answer: what the template prints after an answer that ends a conversation.
        after_turn: that, and what it prints after a tool call, where that differs.
        end_of_turn: id of the token in `after_answer` that ends an assistant's turn.
        ends_of_turn: that, and the token that ends a turn with a call (gpt-oss has another one).
        counts: texts rendered and tokens encoded so far (`renders`, `encoded_tokens`).
        switchable: whether the template has a thinking switch.
        separators: ids of added tokens. Encoding never merges across them, so text on both sides of one
            can be encoded apart.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        thinking: bool,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Probes the template.

        Args:
            tokenizer: the target's.
            thinking: the mode, where the template has a switch.
            options: the target's `template_options`.

        Raises:
            InputError: there is no template, no fast tokenizer, or no token that ends a turn; or see
                `require_options`.
        """
        template = tokenizer.chat_template
        if not template:
            raise InputError(
                f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use an "
                "instruction-tuned target, or put a chat_template.jinja beside its tokenizer"
            )
        if not tokenizer.is_fast:
            raise InputError(
                f"the tokenizer of {tokenizer.name_or_path!r} is not a fast one, so it cannot say which "
                "characters a token stands for; add a tokenizer.json"
            )
        require_options(tokenizer, options or {})
        text = template if isinstance(template, str) else json.dumps(template)
        self.tokenizer = tokenizer
        self.counts: Counter[str] = Counter()
        added = tokenizer.added_tokens_decoder
        self._markers = {index for index, token in added.items() if token.special}
        self._encode_short = functools.lru_cache(maxsize=256)(
            lambda text: tuple(self._encode(text))
        )
        self.switchable = "enable_thinking" in text
        self._options = dict(options or {})
        if self.switchable:
            self._options["enable_thinking"] = thinking
        self._drop_reasoning = self.switchable and not thinking
        self._reasoning_key = _REASONING_KEYS[0]
        self.separators = set(tokenizer.get_added_vocab().values())
        self.after_answer = self._find_after_answer()
        self.end_of_turn = self._find_end_of_turn()
        self.after_turn, self.ends_of_turn = {self.after_answer}, {self.end_of_turn}
        self._call_form = next(filter(self._prints_calls, _CALL_FORMS), _CALL_FORMS[0])
        self._reasoning_key = next(
            filter(self._prints_reasoning, _REASONING_KEYS), _REASONING_KEYS[0]
        )
        cases = itertools.product((False, True), repeat=3)
        self._calls_left_out = {case for case in cases if not self._prints_all_calls(*case)}
        self.counts.clear()

    def render(self, messages: list[dict], tools: list[dict] | None, *, prompt: bool) -> str:
        """The text of a conversation; with `prompt`, up to where the assistant begins to write.

        Where the template has a thinking switch and it is off, recorded reasoning is left out: served
        like that, the target writes none.

        Raises:
            Unrenderable: the template cannot print it.
        """
        given = self.given(messages, tools)
        return self.print(given, given["messages"], prompt=prompt)

    def given(self, messages: list[dict], tools: list[dict] | None) -> dict[str, Any]:
        """All that transformers gives the template for a conversation; it converts each message by itself.

        Raises:
            Unrenderable: there is no message, or one that cannot be converted.
        """
        apply: Any = self.tokenizer.apply_chat_template
        turns = [self._for_template(message) for message in messages]
        _compiled(_TAKE).environment.globals["take"] = _take
        with _refusals():
            apply(turns, tools=tools, chat_template=_TAKE, tokenize=False, **self._options)
        return _taken.get()

    def print(self, given: dict[str, Any], messages: list[dict], *, prompt: bool) -> str:
        """The text of some of the messages in `given`, as `render` would convert and print them.

        Raises:
            Unrenderable: there is no message, or the template cannot print it.
        """
        self.counts["renders"] += 1
        if not messages:
            raise Unrenderable("there is no message to answer")
        with _refusals():
            template = _compiled(self.tokenizer.get_chat_template(tools=given["tools"]))
            return template.render({**given, "messages": messages, "add_generation_prompt": prompt})

    def leaves_out_calls(self, message: dict, tools: list[dict] | None) -> bool:
        """Whether the template prints fewer calls than the message has, as templates do without a word.

        Some print none, some only the first of several, some none beside text or without declarations.
        """
        many = len(message["tool_calls"]) > 1
        return (bool(message["content"]), many, bool(tools)) in self._calls_left_out

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered text; the template has printed all special tokens already."""
        # Short texts are generation prompts, nearly always one and the same.
        return list(self._encode_short(text)) if len(text) < 200 else self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        self.counts["encoded_tokens"] += len(ids)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of the ids, special tokens printed."""
        text = self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def decode_all(self, many: list[list[int]]) -> list[str]:
        """The texts of many lists of ids at once, special tokens printed."""
        return self._backend.decode_batch(many, skip_special_tokens=False)

    def normalized(self, text: str) -> str:
        """The text after the tokenizer's own normalization (Qwen: Unicode NFC)."""
        normalizer = self._backend.normalizer
        return normalizer.normalize_str(text) if normalizer else text

    def encode_with_offsets(
        self, texts: list[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Token ids and the characters (start, end) each stands for, of many texts at once."""
        if not texts:
            return []
        found = self.tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        self.counts["encoded_tokens"] += sum(map(len, found["input_ids"]))
        return list(zip(found["input_ids"], found["offset_mapping"], strict=True))

    def encode_chains(
        self, chains: list[list[str]]
    ) -> list[list[tuple[list[int], list[tuple[int, int]]]]]:
        """As `encode_with_offsets`, for lists of texts; what a text shares with the one before is encoded once."""
        found: list[list] = [[] for _ in chains]
        for place in range(max(map(len, chains), default=0)):
            some = [k for k, chain in enumerate(chains) if place < len(chain)]
            kept = [
                self._shared(found[k][-1], *chains[k][place - 1 : place + 1]) if place else 0
                for k in some
            ]
            cuts = [found[k][-1][1][n][0] if n else 0 for k, n in zip(some, kept, strict=True)]
            texts = [chains[k][place][cut:] for k, cut in zip(some, cuts, strict=True)]
            encoded = self.encode_with_offsets(texts)
            for k, n, cut, (ids, offsets) in zip(some, kept, cuts, encoded, strict=True):
                if n:
                    before_ids, before_offsets = found[k][-1]
                    ids = before_ids[:n] + ids
                    offsets = before_offsets[:n] + [(a + cut, b + cut) for a, b in offsets]
                found[k].append((ids, offsets))
        return found

    def _shared(self, encoded: tuple[list, list], text: str, other: str) -> int:
        """How many of a text's tokens lie before the last special token that `other` has at the same place."""
        low, high = 0, min(len(text), len(other))
        while low < high:  # longest common beginning
            middle = (low + high + 1) // 2
            if text[low:middle] == other[low:middle]:
                low = middle
            else:
                high = middle - 1
        ids, offsets = encoded
        place = bisect_left(offsets, (low, low)) - 1
        while place > 0 and (ids[place] not in self._markers or offsets[place][1] > low):
            place -= 1
        return max(place, 0)

    @property
    def _special(self) -> set[int]:
        return self.separators | {self.tokenizer.eos_token_id}

    @property
    def _backend(self) -> Tokenizer:
        return self.tokenizer.backend_tokenizer

    def _for_template(self, message: dict) -> dict:
        """The message in the form that this template prints."""
        message = dict(message)
        reasoning = message.pop("reasoning_content", None)
        if reasoning and not self._drop_reasoning:
            message[self._reasoning_key] = reasoning
        if message.get("tool_calls"):
            as_objects, no_content = self._call_form
            message["content"] = message["content"] or no_content
            if as_objects:
                message["tool_calls"] = [_with_object(call) for call in message["tool_calls"]]
        return message

    def _prints_calls(self, form: tuple[bool, str | None]) -> bool:
        """Whether the template prints a call in this form. Qwen3 fails on no content, DeepSeek V3 on objects."""
        self._call_form = form
        called = [{"role": "user", "content": "x"}, _answer(None, tool_calls=[_call("probe_name")])]
        try:
            text = self.render(called, None, prompt=False)
        except Unrenderable:
            return False
        if "probe_name" not in text or "probe_key" not in text:
            return False
        [(ids, offsets)] = self.encode_with_offsets([text])
        last = max((i for i, token in enumerate(ids) if token in self._special), default=None)
        if last is not None and offsets[last][0] > text.rindex("probe_key"):
            self.after_turn.add(text[offsets[last][0] :])
            self.ends_of_turn.add(ids[last])
        return True

    def _prints_reasoning(self, key: str) -> bool:
        """Whether the template prints an answer's reasoning that it gets under this key."""
        self._reasoning_key = key
        answered = [
            {"role": "user", "content": "x"},
            _answer("y", reasoning_content="probe_thought"),
        ]
        try:
            return "probe_thought" in self.render(answered, None, prompt=False)
        except Unrenderable:
            return False

    def _prints_all_calls(self, content: bool, many: bool, declared: bool) -> bool:
        """Whether a turn with one or two calls, with or without text and declared tools, shows each of them."""
        names = ("probe_one", "probe_two")[: 1 + many]
        tools = [
            {
                "type": "function",
                "function": {"name": name, "description": "", "parameters": _PROBE_PARAMETERS},
            }
            for name in names
        ]
        question = {"role": "user", "content": "x"}
        turns = [question, _answer("y" if content else None, tool_calls=list(map(_call, names)))]
        try:
            asked = self.render([question], tools if declared else None, prompt=True)
            text = self.render(turns, tools if declared else None, prompt=False)
        except Unrenderable:
            return True  # a refused probe proves nothing; names are counted in every row
        return all(text.count(name) > asked.count(name) for name in names)

    def _find_after_answer(self) -> str:
        question = {"role": "user", "content": "x"}
        try:
            one, other = (
                self.render([question, _answer(text)], None, prompt=False) for text in ("A", "B")
            )
        except Unrenderable as error:
            raise InputError(
                f"the chat template of {self.tokenizer.name_or_path!r} cannot print a question and its "
                f"answer ({error}); correct the template"
            ) from error
        if one == other:
            raise InputError(
                f"the chat template of {self.tokenizer.name_or_path!r} leaves answers out; correct it"
            )
        return one[_common_prefix(one, other) + 1 :]

    def _find_end_of_turn(self) -> int:
        """The first special token that the template prints after an answer, whatever the answer is."""
        for token in self.encode(self.after_answer):
            if token in self._special:
                return token
        raise InputError(
            f"the chat template of {self.tokenizer.name_or_path!r} prints {self.after_answer!r} after an "
            "answer, which holds no special token that could end it; correct the template"
        )


def require_options(tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]) -> None:
    """Checks that the tokenizer's chat template has a use for each option, and that it is free to be set.

    Raises:
        InputError: the template does not read it, or the stages set it themselves.
    """
    if not options:
        return
    template = tokenizer.chat_template or ""
    texts = [template] if isinstance(template, str) else template.values()
    read: set[str] = set()
    for text in texts:
        environment = _compiled(text).environment
        read |= meta.find_undeclared_variables(environment.parse(text))
    taken = {"messages", "enable_thinking", *tokenizer.special_tokens_map}
    taken |= set(inspect.signature(tokenizer.apply_chat_template).parameters)
    for name in options:
        if name in taken:
            raise InputError(
                f"target.template_options sets {name!r}, which is set from what is printed, or by the options named "
                "`thinking`; leave it out"
            )
        if name not in read:
            known = ", ".join(sorted(read - taken)) or "none"
            raise InputError(
                f"target.template_options sets {name!r}, which the chat template of {tokenizer.name_or_path!r} does "
                f"not read; variables that it reads: {known}"
            )


@contextlib.contextmanager
def _refusals() -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:  # templates are programs: they raise whatever they like
        reason = (str(error).strip().splitlines() or [""])[0]
        raise Unrenderable(f"{type(error).__name__}: {reason}"[:200]) from error


_TAKE = "{{ take() }}"
_taken: ContextVar[dict[str, Any]] = ContextVar("taken")


@pass_context
def _take(context: Context) -> str:
    """Puts aside all that the template is given."""
    own = context.environment.globals
    _taken.set({name: value for name, value in context.get_all().items() if name not in own})
    return ""


def _compiled(template: str) -> Any:
    """A template as transformers compiles it, in a sandbox that checks each attribute of a type only once.

    The checks look at type and name alone, and took most of a rendering's time.
    """
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled: Any = _compile_jinja_template(template)
    environment = compiled.environment
    if "getattr" in vars(environment):
        return compiled
    checked, safe = environment.getattr, set()

    def look_up(obj: Any, name: str) -> Any:
        kind = type(obj)
        if kind is dict and name in obj and name not in _OF_DICTS:
            return obj[name]
        if (kind, name) in safe:
            try:
                return getattr(obj, name)
            except AttributeError:
                return checked(obj, name)
        value = checked(obj, name)
        found = getattr(obj, name, None)
        if (
            found is not None
            and environment.wrap_str_format(found) is None
            and environment.is_safe_attribute(obj, name, found)
        ):
            safe.add((kind, name))
        return value

    environment.getattr = look_up
    return compiled


def _answer(content: str | None, **more: Any) -> dict:
    return {"role": "assistant", "content": content, **more}


def _call(name: str) -> dict:
    function = {"name": name, "arguments": '{"probe_key": 1}'}
    # Mistral wants ids of 9 characters.
    return {"type": "function", "id": "probecall", "function": function}


def _with_object(call: dict) -> dict:
    arguments = json.loads(call["function"]["arguments"])
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _common_prefix(one: str, other: str) -> int:
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
