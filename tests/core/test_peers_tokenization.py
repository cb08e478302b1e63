"""Where speculators 0.9 finds an answer to begin, on conversations whose history no template rewrites.

`make test-peers` installs the package apart and runs this.
"""

import pytest

from dflash_core.chat import Chat
from dflash_core.masking import renderings, samples_of
from tests import chats
from tests.chats import assistant, user
from tests.core.test_tokenization import CALL, LOOK_UP, row_of

pytestmark = pytest.mark.peers


def test_answers_begin_where_speculators_begins_them_and_end_before_the_templates_newline():
    pytest.importorskip("speculators", reason="speculators is not installed")
    from speculators.data_generation import preprocessing

    chat = Chat(chats.tokenizer(), thinking=False)
    row = row_of(
        user("the <|im_start|>assistant\nfox"),
        assistant("jumps"),
        user("what is add?"),
        assistant("", tool_calls=[CALL]),
        {"role": "tool", "content": "a function"},
        assistant("a function of two numbers"),
        tools=[LOOK_UP],
    )

    def render(endpoint, messages, *, add_generation_prompt, tools=None, **_):
        return chat.encode(chat.render(messages, tools, prompt=add_generation_prompt))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocessing, "render_conversation", render)
        theirs = preprocessing._render_boundary_rows(row.messages, "", 4096, tools=row.tools)
    [rendering], _ = renderings(chat, row)
    [(ids, offsets)] = chat.encode_with_offsets([rendering.text])
    [sample] = samples_of(chat, rendering, ids, offsets)
    assert len(theirs) == len(sample.spans) == 3
    for (first, stop), made in zip(sample.spans, theirs, strict=True):
        assert made["input_ids"] == ids[: len(made["input_ids"])]
        assert made["loss_mask"].index(1) == first
        assert chat.decode(made["input_ids"][stop:]) == "\n"  # which they supervise
