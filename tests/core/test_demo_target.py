"""The embedded demo target: its size, its chat template, and that it writes something."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_core.corpus.readers.python_stdlib import TOOLS, parses

FOLDER = Path(__file__).parents[2] / "demo" / "target"
EMPTY_THINK = "<think>\n\n</think>\n\n"

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You write plain, correct Python."},
    {"role": "user", "content": "Look up `dedent` in `textwrap`."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {
                    "name": "look_up_function",
                    "arguments": '{"module": "textwrap", "name": "dedent"}',
                },
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": '{"signature": "def dedent(text):"}'},
    {"role": "assistant", "content": "\n  It takes `text`."},
    {"role": "user", "content": "Write it."},
    {"role": "assistant", "content": "```python\ndef dedent(text):\n    return text.strip()\n```"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def test_size(model) -> None:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 5e6 < parameters < 6e6
    assert (FOLDER / "model.safetensors").stat().st_size <= 12e6


def test_is_a_hybrid_stored_in_bfloat16(model) -> None:
    assert model.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert AutoModelForCausalLM.from_pretrained(FOLDER).dtype == torch.bfloat16


def test_special_tokens(tokenizer, model) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"
    assert tokenizer.mask_token == "<|mask|>"
    assert len(tokenizer) == model.config.vocab_size == 5120
    for token in ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert len(tokenizer(token)["input_ids"]) == 1


def test_text_survives_encoding(tokenizer) -> None:
    text = "def größe(x):\n\n\treturn x  # 你好 🙂\r\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_renders_tools_calls_and_results(tokenizer) -> None:
    text = tokenizer.apply_chat_template(
        CONVERSATION, tools=[TOOLS["look_up_function"]], tokenize=False
    )
    call = '{"name": "look_up_function", "arguments": {"module": "textwrap", "name": "dedent"}}'
    assert text.startswith("<|im_start|>system\nYou write plain, correct Python.\n\n")
    assert '{"name": "look_up_function", "description": "Signature' in text
    assert f"{EMPTY_THINK}<tool_call>\n{call}\n</tool_call><|im_end|>\n" in text
    assert '<|im_start|>tool\n{"signature": "def dedent(text):"}<|im_end|>\n' in text
    assert text.count("<|im_start|>system") == 1


def test_arguments_may_be_a_mapping_too(tokenizer) -> None:
    call = {"function": {"name": "run_code", "arguments": {"code": "print('é')"}}}
    message = {"role": "assistant", "content": "Running.", "tool_calls": [call, call]}
    text = tokenizer.apply_chat_template([message], tokenize=False)
    block = '<tool_call>\n{"name": "run_code", "arguments": {"code": "print(\'é\')"}}\n</tool_call>'
    assert text.endswith(f"Running.\n{block}\n{block}<|im_end|>\n")


@pytest.mark.parametrize(
    ("thinking", "ending"), [(True, "assistant\n"), (False, f"assistant\n{EMPTY_THINK}")]
)
def test_generation_prompt(tokenizer, thinking: bool, ending: str) -> None:
    text = tokenizer.apply_chat_template(
        CONVERSATION[:2], add_generation_prompt=True, enable_thinking=thinking, tokenize=False
    )
    assert text.endswith(f"<|im_end|>\n<|im_start|>{ending}")


def test_reasoning_is_written_with_thinking_on_only(tokenizer) -> None:
    message = {"role": "assistant", "reasoning_content": "Easy.", "content": "Yes."}
    on = tokenizer.apply_chat_template([message], enable_thinking=True, tokenize=False)
    off = tokenizer.apply_chat_template([message], enable_thinking=False, tokenize=False)
    assert on == "<|im_start|>assistant\n<think>\nEasy.\n</think>\n\nYes.<|im_end|>\n"
    assert off == f"<|im_start|>assistant\n{EMPTY_THINK}Yes.<|im_end|>\n"


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize(
    "turn", [i for i, m in enumerate(CONVERSATION) if m["role"] == "assistant"]
)
def test_every_prompt_is_a_prefix_of_the_whole(tokenizer, turn: int, thinking: bool) -> None:
    def encode(messages: list[dict[str, Any]], prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(
            messages,
            tools=list(TOOLS.values()),
            add_generation_prompt=prompt,
            enable_thinking=thinking,
            return_dict=False,
        )

    prompt, whole = encode(CONVERSATION[:turn], True), encode(CONVERSATION, False)
    assert whole[: len(prompt)] == prompt


def test_writes_code_and_stops(tokenizer, model) -> None:
    question = "How would you write `def close(self):` in Python?"
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    answer = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert answer[-1] == tokenizer.eos_token_id
    text = tokenizer.decode(answer[:-1])
    assert text.startswith("```python\ndef close(self):\n")
    assert parses(text.removeprefix("```python\n").removesuffix("```"))
