"""Masks of random conversations under the templates of six families, against rendering every turn alone."""

import functools
import json
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from transformers.utils import chat_template_utils
from transformers.utils.chat_template_utils import _cached_compile_jinja_template

from dflash_core.chat import Chat, Unrenderable, _compiled
from dflash_core.corpus.rows import Row, content_id
from dflash_core.masking import _Views, renderings, samples_of, survives
from tests import chats
from tests.chats import REWRITING, STABLE, assistant, user
from tests.templates import FAMILIES

MODES = [(name, thinking) for name in FAMILIES for thinking in (False, True)]
OPTIONS = {
    "qwen3.5": {"preserve_thinking": True},
    "llama3": {"date_string": "1 May 2031"},
    "gpt-oss": {"reasoning_effort": "high"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("look_up", "add")
]


@functools.cache
def chat_of(name, thinking=False, with_options=False):
    family, options = FAMILIES[name], OPTIONS[name] if with_options else {}
    return Chat(chats.tokenizer(family.template, family.markers, family.eos), thinking, options)


def row_of(messages, tools=None, **metadata):
    return Row(content_id(messages, tools), "test", messages, tools, metadata)


def samples(chat, row):
    """Each sample of a row with its rendering."""
    found = []
    for rendering in renderings(chat, row)[0]:
        [(ids, offsets)] = chat.encode_with_offsets([rendering.text])
        found += [(rendering, it) for it in samples_of(chat, rendering, ids, offsets)]
    return found


def spans(chat, row):
    """(ids before, supervised ids) of every supervised turn."""
    return sorted(
        (tuple(sample.input_ids[:a]), tuple(sample.input_ids[a:b]))
        for _, sample in samples(chat, row)
        for a, b in sample.spans
    )


def as_served(chat, row):
    """The same by the plain rule: each turn rendered and encoded by itself, up to its last end of turn."""
    found = []
    for place, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        prompt = chat.render(row.messages[:place], row.tools, prompt=True)
        full = chat.render(row.messages[: place + 1], row.tools, prompt=False)
        if not full.startswith(prompt):  # gpt-oss: the prompt's reasoning is gone from the text
            bare = [{**m, "reasoning_content": None} for m in row.messages[:place]]
            longer = chat.render([*bare, message], row.tools, prompt=False)
            shorter = chat.render(bare, row.tools, prompt=True)
            if not longer.startswith(shorter):
                continue
            full = prompt + longer[len(shorter) :]
        head, ids = chat.encode(prompt), chat.encode(full)
        joined = ids[: len(head)] == head
        tail = ids[len(head) :] if joined else chat.encode(full[len(prompt) :])
        last = max(i for i, token in enumerate(tail) if token in chat.ends_of_turn)
        found.append((tuple(head), tuple(tail[: last + 1])))
    return sorted(found)


# --- random conversations: users write 7 and 8, tools 9, assistants none of them -----------------

MARKERS = sorted({marker for family in FAMILIES.values() for marker in family.markers})
TYPED = st.sampled_from(
    [
        *MARKERS,
        *chats.MARKERS,
        *chats.TAGS,
        "<|im_start|>assistant\n",
        "<start_of_turn>model\n",
        "\n",
    ]
)
LETTERS = st.text(st.sampled_from("abc \n\té中😀́."), min_size=1, max_size=8)


def text_with(digits):
    mark = st.sampled_from(digits)
    pieces = st.lists(st.one_of(LETTERS, TYPED), max_size=3).map("".join)
    return st.tuples(pieces, mark, pieces).map("".join)


ANSWER = st.lists(st.one_of(LETTERS, TYPED), min_size=1, max_size=3).map("".join).filter(str.strip)
REASONING = LETTERS.filter(str.strip)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b c"]), LETTERS, max_size=2)


@st.composite
def conversations(draw, tasks=(1, 4), calls=2):
    """Messages of some tasks; each is a question, perhaps some calls with their results, and an answer."""
    messages = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(text_with("7"))})
    uses_tools = False
    for _ in range(draw(st.integers(*tasks))):
        messages.append(user(draw(text_with("78"))))
        for _ in range(draw(st.integers(0, 2)) if calls else 0):
            uses_tools = True
            made = [_call(draw) for _ in range(draw(st.integers(1, calls)))]
            messages.append(_with_reasoning(draw, assistant(None, tool_calls=made)))
            messages += [{"role": "tool", "content": draw(text_with("9"))} for _ in made]
        messages.append(_with_reasoning(draw, assistant(draw(ANSWER))))
    return row_of(messages, TOOLS if uses_tools else None)


def _call(draw):
    arguments = json.dumps(draw(ARGUMENTS), ensure_ascii=False)
    name = draw(st.sampled_from(["look_up", "add"]))
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _with_reasoning(draw, message):
    if draw(st.booleans()):
        message["reasoning_content"] = draw(REASONING)
    return message


@pytest.mark.parametrize(
    ("name", "thinking", "with_options"),
    [*((*mode, False) for mode in MODES), *((name, True, True) for name in OPTIONS)],
)
def test_any_conversation_is_masked_as_it_was_served(name, thinking, with_options):
    chat = chat_of(name, thinking, with_options)

    @settings(max_examples=25, deadline=None)
    @given(conversations(calls=FAMILIES[name].calls))
    def check(row):
        assert spans(chat, row) == as_served(chat, row)
        for rendering, sample in samples(chat, row):
            spoken = chat.decode_all([sample.input_ids[a:b] for a, b in sample.spans])
            assert survives(chat, rendering, sample, spoken)
            for turn, text in zip(sample.turns, spoken, strict=True):
                assert not set(text) & set("789"), "what users and tools wrote is supervised"
                content = row.messages[turn.place]["content"]
                assert content is None or content.split("</think>")[-1].strip() in text

    check()


@pytest.mark.parametrize(
    ("name", "thinking", "with_options"),
    [*((*mode, False) for mode in MODES), *((name, True, True) for name in OPTIONS)],
)
def test_parts_of_a_conversation_are_printed_as_transformers_alone_would(
    name, thinking, with_options
):
    chat = chat_of(name, thinking, with_options)
    untouched = _cached_compile_jinja_template(chat.tokenizer.chat_template)
    switch = {"enable_thinking": thinking} if chat.switchable else {}
    switch |= OPTIONS[name] if with_options else {}

    @settings(max_examples=15, deadline=None)
    @given(conversations(calls=FAMILIES[name].calls), st.booleans())
    def check(row, prompt):
        given = chat.given(row.messages, row.tools)
        turns = [chat._for_template(message) for message in row.messages]
        for stop in range(2, len(turns) + 1):
            with mock.patch.object(
                chat_template_utils, "_compile_jinja_template", return_value=untouched
            ):
                expected = chat.tokenizer.apply_chat_template(
                    turns[:stop],
                    tools=row.tools,
                    add_generation_prompt=prompt,
                    tokenize=False,
                    **switch,
                )
            assert chat.print(given, given["messages"][:stop], prompt=prompt) == expected

    check()


@pytest.mark.parametrize(
    "expression",
    [
        "m.role ~ (m.items is callable) ~ m.nothing ~ m.get('role')",
        "loop.index0 ~ loop.previtem.role ~ ns.set ~ ns.unset",
        "'{0.role} {0.__class__}'.format(m)",
        "m.__class__ ~ loop._iterator ~ ns.__class__ ~ m.content.upper.__self__",
        "raise_exception.__globals__",
        "m.nothing.more",
        "messages.append(m)",
        "m.update(role='x')",
    ],
)
def test_a_template_reaches_no_more_than_in_that_sandbox(expression):
    template = "{% set ns = namespace(set=1) %}{% for m in messages %}{{ ` }} {{ m.role }} {{ ` }}{% endfor %}"
    template = template.replace("`", expression)
    messages = [{"role": "user", "content": "a", "items": 3}, {"role": "b", "content": "c"}]

    def printed(compiled):
        try:
            return compiled.render(messages=messages)
        except TemplateError as error:
            return repr(error)

    remembering = _compiled(template)
    expected = printed(_cached_compile_jinja_template(template))
    assert [printed(remembering) for _ in range(2)] == [expected] * 2


@pytest.mark.parametrize(("name", "thinking"), MODES)
def test_windows_find_the_same_turns_as_rendering_the_whole_for_each(name, thinking):
    chat = chat_of(name, thinking)

    @settings(max_examples=15, deadline=None)
    @given(conversations(tasks=(2, 6), calls=FAMILIES[name].calls))
    def check(row):
        views = _Views(chat, row)
        found = views.by_windows()
        whole, unsupervised = views.turn_by_turn()
        assert not unsupervised or found is None
        if found is not None:
            assert turns_in(found) == turns_in(whole)

    check()


def turns_in(some):
    """What each turn's prompt and text are, wherever it was found."""
    return sorted(
        (turn.place, text[: turn.begin], text[: turn.end]) for text, turns in some for turn in turns
    )


@pytest.mark.parametrize(("name", "thinking"), MODES)
def test_texts_that_begin_alike_are_encoded_as_each_would_be_alone(name, thinking):
    chat = chat_of(name, thinking)

    @settings(max_examples=15, deadline=None)
    @given(st.lists(conversations(calls=FAMILIES[name].calls), min_size=1, max_size=3))
    def check(rows):
        chains = [[it.text for it in renderings(chat, row)[0]] for row in rows]
        alone = [chat.encode_with_offsets(texts) for texts in chains]
        assert chat.encode_chains(chains) == alone

    check()


def test_a_template_that_rewrites_history_has_each_answer_encoded_twice_and_the_rest_once():
    chat = chat_of("qwen3")
    texts = [it.text for it in renderings(chat, long_conversation(20))[0]]
    assert len(texts) == 20
    chat.counts.clear()
    [found] = chat.encode_chains([texts])
    assert chat.counts["encoded_tokens"] <= 2 * len(found[-1][0])
    assert sum(len(ids) for ids, _ in found) > 9 * len(found[-1][0])


# --- work --------------------------------------------------------------------------------------


def long_conversation(turns):
    asked = [(user(f"question {i} " * 20), assistant(f"answer {i} " * 40)) for i in range(turns)]
    return row_of([message for pair in asked for message in pair])


@pytest.mark.parametrize("name", ["llama3", "smollm2", "gemma3"])
@pytest.mark.parametrize("turns", [1, 2, 5, 20, 50])
def test_a_template_that_keeps_history_costs_one_pass(name, turns):
    chat = chat_of(name)
    chat.counts.clear()
    [(_, sample)] = samples(chat, long_conversation(turns))
    assert len(sample.spans) == turns
    assert chat.counts["encoded_tokens"] <= 1.1 * len(sample.input_ids)
    assert chat.counts["renders"] <= 3 * turns + 1


def test_a_long_run_of_calls_is_one_text_even_where_history_is_rewritten():
    chat = chat_of("qwen3.5", thinking=True)
    messages = [user("do it")]
    for i in range(30):
        call = {"function": {"name": "add", "arguments": json.dumps({"n": i})}}
        messages += [
            assistant(None, tool_calls=[call], reasoning_content=f"step {i} " * 10),
            {"role": "tool", "content": f"result {i} " * 10},
        ]
    messages.append(assistant("done", reasoning_content="good"))
    row = row_of(messages, TOOLS)
    chat.counts.clear()
    [(_, sample)] = samples(chat, row)
    assert len(sample.spans) == 31
    assert chat.counts["renders"] <= 3 * 31 + 1
    assert chat.counts["encoded_tokens"] <= 1.15 * len(sample.input_ids)
    assert spans(chat, row) == as_served(chat, row)


def test_where_reasoning_is_preserved_a_conversation_is_one_text():
    row = row_of(
        [
            user("a"),
            assistant("b", reasoning_content="hm"),
            user("c"),
            assistant("d", reasoning_content="so"),
        ]
    )
    assert len(renderings(chat_of("qwen3.5", True), row)[0]) == 2
    [rendering] = renderings(chat_of("qwen3.5", True, with_options=True), row)[0]
    assert len(rendering.turns) == 2


# --- habits of families that would go wrong silently ---------------------------------------------


def test_a_call_and_an_answer_may_end_in_different_tokens():
    chat = chat_of("gpt-oss")
    call = {"function": {"name": "add", "arguments": '{"n": 1}'}}
    row = row_of(
        [
            user("a"),
            assistant(None, tool_calls=[call], reasoning_content="b"),
            {"role": "tool", "content": "c"},
            assistant("d"),
        ],
        TOOLS,
    )
    spoken = [chat.decode(ids) for _, ids in spans(chat, row)]
    thought = "<|channel|>analysis<|message|>b<|end|><|start|>assistant"
    called = ' to=functions.add<|channel|>commentary json<|message|>{"n": 1}<|call|>'
    assert sorted(spoken) == [thought + called, "<|channel|>final<|message|>d<|return|>"]


@pytest.mark.parametrize("name", ["gpt-oss", "smollm2"])
def test_a_call_that_the_template_leaves_out_rejects_the_row(name):
    call = {"function": {"name": "add", "arguments": "{}"}}
    row = row_of([user("a"), assistant(None, tool_calls=[call, call])], TOOLS)
    with pytest.raises(Unrenderable):
        renderings(chat_of(name), row)


@pytest.mark.parametrize(
    ("name", "content", "called"),
    [
        ("smollm2", "I add", [{}]),
        ("gpt-oss", None, [{"then": "look_up"}, {}]),
        ("llama3", None, [{"then": "look_up"}, {}]),
    ],
)
def test_a_call_that_is_left_out_is_noticed_where_its_name_is_printed_for_other_reasons(
    name, content, called
):
    names = ("add", "look_up")
    calls = [
        {"function": {"name": it, "arguments": json.dumps(arguments)}}
        for it, arguments in zip(names, called, strict=False)
    ]
    row = row_of([user("a"), assistant(content, tool_calls=calls)], TOOLS)
    with pytest.raises(Unrenderable):
        renderings(chat_of(name), row)


MISTRAL = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.tool_calls %}{% for call in message.tool_calls %}{% if call.id is not defined or call.id|length != 9 %}
{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
{{ call.function | tojson }}{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SCHEMAS = STABLE.replace("tool | tojson", "tool.function.parameters['properties'].items() | list")


@pytest.mark.parametrize("template", [MISTRAL, SCHEMAS], ids=["ids", "schemas"])
def test_templates_that_are_strict_with_calls_and_tools_keep_rows_that_satisfy_them(template):
    call = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": "{}"}}
    turns = [
        user("a"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "content": "3"},
        assistant("It is 3."),
    ]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    row = row_of(turns, tools)
    made, _ = renderings(Chat(chats.tokenizer(template), thinking=False), row)
    assert sum(len(rendering.turns) for rendering in made) == 2


def test_an_answer_in_decomposed_unicode_is_kept_where_the_tokenizer_composes_it():
    from tokenizers import normalizers

    tokenizer = chats.tokenizer(STABLE)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    chat = Chat(tokenizer, thinking=False)
    [(rendering, sample)] = samples(chat, row_of([user("a"), assistant("cafe\u0301")]))
    spoken = chat.decode_all([sample.input_ids[a:b] for a, b in sample.spans])
    assert spoken == ["caf\u00e9<|im_end|>"]
    assert survives(chat, rendering, sample, spoken)
    assert not survives(chat, rendering, sample, ["cafe<|im_end|>"])
    assert not survives(chat, rendering, sample, ["caf\u00e9"[:2]])


def test_what_the_target_was_served_without_thinking_holds_no_reasoning():
    chat = Chat(chats.tokenizer(REWRITING), thinking=False)
    row = row_of([user("a"), assistant("b", reasoning_content="hm"), user("c"), assistant("d")])
    assert all("hm" not in rendering.text for rendering, _ in samples(chat, row))
