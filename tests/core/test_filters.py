import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.config import FilterConfig
from dflash_core.corpus.filters import cleared_of_secrets, require_fit
from dflash_core.corpus.rows import Malformed, Row
from tests.chats import assistant, user

PROSE = (
    "The lighthouse keeper counted the boats each evening, wrote their names into a ledger, and compared "
    "them with what the harbour master had promised in spring. On most days the lists agreed; on some a "
    "name was missing, and then she climbed the stairs again and looked towards the reef until it was dark. "
)


def row(*messages, tools=None):
    return Row("id", "s", list(messages), tools, {})


def reason(candidate, **config):
    try:
        require_fit(candidate, FilterConfig(**config))
    except Malformed as error:
        return error.reason
    return None


CALLING = assistant(
    None,
    tool_calls=[{"type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}],
)


@pytest.mark.parametrize(
    ("answer", "config", "expected"),
    [
        ("fine", {}, None),
        ("x" * 50, {"max_characters": 40}, "too many characters"),
        ("ok", {"min_answer_characters": 3}, "answers are too short"),
        ("ok", {"min_answer_characters": 2}, None),
        ("ok", {"min_supervised_share": 0.5}, "too small a share is answers"),
        ("a long enough answer", {"min_supervised_share": 0.5}, None),
        ("caf\ufffd", {}, "broken Unicode"),
        ("nul \x00 byte", {}, "broken Unicode"),
        ("itâ€™s mojibake", {}, "broken Unicode"),
        ("cafÃ© too", {}, "broken Unicode"),
        ("caf\ufffd", {"broken_unicode": "keep"}, None),
        ("S\u00c3O Paulo, caf\u00e9, \u20ac 5, tab\t, page\x0c", {}, None),
        ("na na " * 400, {}, "repetitive answer"),
        ("na na " * 400, {"max_compression": 0}, None),
        (PROSE * 2, {}, None),
        (PROSE * 20 + "na na " * 600, {}, "repetitive answer"),
        ("I'm sorry, but I can't help with that.", {"refusals": "reject"}, "refusal"),
        ("I cannot assist with this.", {"refusals": "reject"}, "refusal"),
        ("I'm sorry, but I can't help with that.", {}, None),
        ("Sorry for the long text. It works.", {"refusals": "reject"}, None),
        ("The function cannot help here, use a loop.", {"refusals": "reject"}, None),
    ],
)
def test_an_unfit_answer_has_its_reason_and_others_pass(answer, config, expected):
    assert reason(row(user("please"), assistant(answer)), **config) == expected


def test_what_users_and_tools_say_is_not_filtered_as_an_answer():
    asked = user("why does it print caf\ufffd? " + "na na " * 400)
    terminal = {"role": "tool", "content": "\x1b[31mred\x1b[0m"}
    assert reason(row(asked, CALLING, terminal, assistant("Latin-1."))) is None


def test_reasoning_is_filtered_too_and_prompts_pass():
    looping = assistant("yes", reasoning_content="wait, no. " * 300)
    assert reason(row(user("x"), looping)) == "repetitive answer"
    assert reason(row(user("x")), min_answer_characters=9, min_supervised_share=0.9) is None


def test_calls_count_as_answers():
    assert reason(row(user("x"), CALLING), min_answer_characters=16) is None


def test_languages_are_told_apart():
    pytest.importorskip("py3langid")
    german = row(
        user("Wie spät ist es in der Stadt?"), assistant("Es ist kurz nach drei Uhr nachmittags.")
    )
    english = row(user("What time is it in town?"), assistant("It is shortly after three."))
    assert reason(german, languages=["en"]) == "another language"
    assert reason(german, languages=["en", "de"]) is None
    assert reason(english, languages=["en"]) is None


# Put together here, so that no scanner takes this file for a leak.
SECRETS = {
    "aws-access-key": "AKIA" + "ABCDEFGHIJKLMNOP",
    "github-token": "ghp_" + "a1B2" * 9,
    "gitlab-token": "glpat-" + "a1B2" * 5,
    "slack-token": "xoxb-" + "1234567890-" * 2 + "ab",
    "google-api-key": "AIza" + "a1B2c" * 7,
    "anthropic-key": "sk-ant-" + "a1B2" * 9,
    "openai-key": "sk-proj-" + "a1B2" * 10,
    "stripe-key": "sk_live_" + "a1B2" * 6,
    "hugging-face-token": "hf_" + "a1B2" * 9,
    "npm-token": "npm_" + "a1B2" * 9,
    "json-web-token": "eyJ" + "a1B2" * 4 + ".eyJ" + "a1B2" * 4 + "." + "a1B2" * 4,
    "private-key": "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc=\n-----END RSA PRIVATE KEY-----",
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_redacted_wherever_it_stands_and_never_told(kind):
    secret = SECRETS[kind]
    arguments = json.dumps({"header": f"Bearer:\n{secret}"})
    messages = [
        user(f"my key is {secret}."),
        assistant(
            "ok",
            reasoning_content=f"{secret} again",
            tool_calls=[{"type": "function", "function": {"name": "f", "arguments": arguments}}],
        ),
    ]
    redacted = Counter()
    found, tools = cleared_of_secrets((messages, [secret]), FilterConfig(), redacted)
    text = json.dumps([found, tools])
    assert secret not in text
    assert json.dumps(secret)[1:-1] not in text
    assert redacted == {kind: 4}
    assert found[0]["content"] == f"my key is <redacted:{kind}>."
    called = found[1]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(called) == {"header": f"Bearer:\n<redacted:{kind}>"}
    with pytest.raises(Malformed) as caught:
        cleared_of_secrets(messages, FilterConfig(secrets="reject"), Counter())
    assert (caught.value.reason, caught.value.detail) == ("secret", kind)
    assert cleared_of_secrets(messages, FilterConfig(secrets="keep"), Counter()) is messages


@pytest.mark.parametrize(
    "text",
    [
        "sk-learn is a library, task-oriented-programming-is-another-way-of-saying-it",
        "the class is sk-toggleable-content-label-arrow-and-more-of-it",
        "AKIAIOSFODNN7 is too short, ghp_short too",
        "eyJhbGciOiJIUzI1NiJ9 alone is only a header",
        "-----BEGIN PUBLIC KEY-----\nMIIB\n-----END PUBLIC KEY-----",
    ],
)
def test_text_that_looks_a_little_like_a_secret_stays(text):
    assert cleared_of_secrets([user(text)], FilterConfig(), Counter()) == [user(text)]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300), st.sampled_from(sorted(SECRETS)), st.text(max_size=50))
def test_redaction_leaves_no_secret_and_changes_nothing_else(before, kind, behind):
    text = f"{before} {SECRETS[kind]} {behind}"
    [found] = cleared_of_secrets([text], FilterConfig(), Counter())
    assert found == f"{before} <redacted:{kind}> {behind}"
    assert cleared_of_secrets([found], FilterConfig(), Counter()) == [found]
