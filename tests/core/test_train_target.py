"""The pieces of the demo target's training that can be wrong without being noticed."""

import ast
import random

import pytest
import torch
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen3_5 import modeling_qwen3_5

from demo import target_rows, train_target
from demo.target_quality import Answer, code_parses, tool_call_of
from dflash_core.corpus.readers.python_stdlib import TOOLS, Chat, definitions, read


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(train_target.TEMPLATE.parent)


def test_shifted_convolution_equals_the_reference() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(2, 6, 13, requires_grad=True)
    weight = torch.randn(6, 4, requires_grad=True)
    results = []
    for convolution in (modeling_qwen3_5.causal_conv1d_fn, train_target.shifted_convolution):
        out = convolution(hidden, weight, None, activation="silu")
        results.append((out, *torch.autograd.grad(out.square().sum(), (hidden, weight))))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_weights_mark_exactly_the_answers(tokenizer: PreTrainedTokenizerFast) -> None:
    (chat, *_) = (c for c in read(["calendar"], phrasings=9) if c["metadata"]["thinking"])
    rows = target_rows.rows_of(tokenizer, [chat])
    answer = rows.ids[rows.weights == target_rows.ASSISTANT_WEIGHT]
    reasoning, text = chat["messages"][-1]["reasoning_content"], chat["messages"][-1]["content"]
    assert tokenizer.decode(answer) == f"<think>\n{reasoning}\n</think>\n\n{text}<|im_end|>"


def test_renaming_is_consistent_and_leaves_attributes() -> None:
    source = '''
def scale(self, values, factor=1):
    """Scales values by factor."""
    result = [value * factor for value in values]
    self.factor = factor
    return self.values(result, factor=factor)
'''
    (definition,) = definitions("m", source, 800)
    changed = target_rows.renamed(definition, ["apple", "pear", "plum", "fig"], random.Random(1))
    assert changed.code != definition.code
    assert "self.values(" in changed.code
    assert "self.factor" in changed.code
    names = [n.id for n in ast.walk(ast.parse(definition.code)) if isinstance(n, ast.Name)]
    others = [n.id for n in ast.walk(ast.parse(changed.code)) if isinstance(n, ast.Name)]
    assert len(dict(zip(names, others, strict=True))) == len(set(zip(names, others, strict=True)))
    assert changed.code.startswith(changed.header)


def test_code_with_format_strings_is_not_renamed() -> None:
    source = "def show(values, factor):\n    first = values[0]\n    text = f'{first} times {factor}'\n    return text\n"
    (definition,) = definitions("m", source, 800)
    assert target_rows.renamed(definition, ["apple"], random.Random(0)) is definition


def test_schedule_and_mixture() -> None:
    assert train_target.schedule(0.03, 0.03) == pytest.approx(1)
    assert train_target.schedule(1.0, 0.03) == pytest.approx(0.02)
    assert [train_target.text_share(done, 0.5) for done in (0.0, 0.5, 0.625, 0.75, 1.0)] == [
        0.5,
        0.5,
        0.25,
        0.0,
        0.0,
    ]


def _answer(text: str) -> Answer:
    chat: Chat = {"messages": [], "tools": [TOOLS["run_code"]], "metadata": {}}
    return Answer(chat, text, 1, True, 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\nx = 1\n```", True),
        ("Here:\n\n```python\nx = (1\n```", False),
        ("```python\nx = 1\n", False),
        ("x = 1", False),
    ],
)
def test_code_parses(text: str, expected: bool) -> None:
    assert code_parses(_answer(text)) is expected


@pytest.mark.parametrize(
    ("call", "well_formed"),
    [
        ('{"name": "run_code", "arguments": {"code": "1"}}', True),
        ('{"name": "run_code", "arguments": {}}', False),
        ('{"name": "search_docs", "arguments": {"query": "1"}}', False),
        ('{"name": "run_code", "arguments": {"code": "1"}', False),
        ("[]", False),
    ],
)
def test_tool_call_of(call: str, well_formed: bool) -> None:
    assert (tool_call_of(_answer(f"<tool_call>\n{call}\n</tool_call>")) is not None) is well_formed
