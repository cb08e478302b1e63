"""Chat templates of six families in our own words: what they print differently matters, their wording does not.

Each prints a conversation in its family's markers and keeps the family's habits: defaults of the system
message, where tools go, the form of calls, which reasoning of earlier turns is dropped, what ends a turn.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """A template, the tokens it needs beside those of `tests.chats`, and the token named as end of text."""

    template: str
    markers: tuple[str, ...]
    eos: str
    calls: int = 2
    """Most calls in one turn that it prints; 0 where it prints none."""


_LAST_QUERY = (
    "{%- set ns = namespace(query=-1) %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}"
)
_SYSTEM_AND_TOOLS = (
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{%- if tools %}{{- '<|im_start|>system\n' }}"
    "{%- for tool in tools %}{{- (tool | tojson) + '\n' }}{% endfor %}"
    "{{- system + '<|im_end|>\n' }}"
    "{%- elif system %}{{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}{% endif %}"
)
_RESULTS = (
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}"
)

QWEN3 = Family(
    _LAST_QUERY
    + _SYSTEM_AND_TOOLS
    + "{%- for m in messages %}"
    + "{%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    + "{%- elif m.role == 'tool' %}"
    + _RESULTS
    + "{%- elif m.role == 'assistant' %}"
    + "{%- set thought = m.reasoning_content or '' %}{% set content = m.content %}"
    + "{%- if not thought and '</think>' in content %}"
    + "{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    + "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    + "{{- '<|im_start|>assistant\n' }}"
    + "{%- if loop.index0 > ns.query and (loop.last or thought) %}"
    + "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    + "{%- else %}{{- content }}{% endif %}"
    + "{%- for call in m.tool_calls or [] %}"
    + "{%- if content or not loop.first %}{{- '\n' }}{% endif %}"
    + '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    + "{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}{% endfor %}"
    + "{{- '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    + "{%- if enable_thinking is defined and not enable_thinking %}"
    + "{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
    markers=("<tool_response>", "</tool_response>"),
    eos="<|im_end|>",
)
"""Earlier reasoning is dropped; only a last answer, or one with reasoning in the running task, has a block."""

QWEN3_5 = Family(
    _LAST_QUERY
    + _SYSTEM_AND_TOOLS
    + "{%- if ns.query < 0 %}{{ raise_exception('No user query found') }}{% endif %}"
    + "{%- for m in messages %}"
    + "{%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content | trim + '<|im_end|>\n' }}"
    + "{%- elif m.role == 'tool' %}"
    + _RESULTS
    + "{%- elif m.role == 'assistant' %}"
    + "{%- set content = (m.content or '') | trim %}"
    + "{{- '<|im_start|>assistant\n' }}"
    + "{%- if (preserve_thinking is defined and preserve_thinking) or loop.index0 > ns.query %}"
    + "{{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}{% endif %}"
    + "{{- content }}"
    + "{%- for call in m.tool_calls or [] %}"
    + "{{- ('\n\n' if content and loop.first else '' if loop.first else '\n') }}"
    + "{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    + "{%- for key, value in call.function.arguments | items %}"
    + "{{- '<parameter=' + key + '>\n' }}"
    + "{{- (value if value is string else value | tojson) + '\n</parameter>\n' }}{% endfor %}"
    + "{{- '</function>\n</tool_call>' }}{% endfor %}"
    + "{{- '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}"
    + "{{- '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '<think>\n' }}"
    + "{%- endif %}",
    markers=("<tool_response>", "</tool_response>"),
    eos="<|im_end|>",
)
"""Qwen3.5 and 3.6: the prompt opens the think block; calls in XML; blocks of earlier tasks are dropped."""

LLAMA3 = Family(
    "{{- '<|begin_of_text|>' }}"
    "{%- set system = messages[0].content | trim if messages[0].role == 'system' else '' %}"
    "{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday: ' + (date_string or '26 Jul 2024') }}"
    "{{- '\n\n' + system + '<|eot_id|>' }}"
    "{%- for m in rest %}"
    "{%- if m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}"
    "{{- (m.content | tojson) + '<|eot_id|>' }}"
    "{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' + (call.arguments | tojson) + '}' }}"
    "{%- else %}"
    "{%- if loop.first and tools %}{% for tool in tools %}{{- (tool | tojson) + '\n\n' }}{% endfor %}{% endif %}"
    "{{- m.content | trim }}{% endif %}"
    "{{- '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
    markers=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    eos="<|eot_id|>",
    calls=1,
)
"""A system message in any case, tools inside the first user message, content trimmed, one call a turn."""

SMOLLM2 = Family(
    "{%- for m in messages %}"
    "{%- if loop.first and m.role != 'system' %}"
    "{{- '<|im_start|>system\nthe assistant answers the user<|im_end|>\n' }}{% endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}",
    markers=(),
    eos="<|im_end|>",
    calls=0,
)
"""Plain; a default system message; calls are left out without a word."""

GEMMA3 = Family(
    "{{- '<bos>' }}"
    "{%- set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{%- for m in (messages[1:] if messages[0].role == 'system' else messages) %}"
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{- (system if loop.first else '') + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}",
    markers=("<bos>", "<start_of_turn>", "<end_of_turn>"),
    eos="<end_of_turn>",
    calls=0,
)
"""Another name for the assistant, the system message inside the first user message, strict alternation."""

GPT_OSS = Family(
    "{{- '<|start|>system<|message|>reasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}"
    "{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{%- if tools or messages[0].role == 'system' %}{{- '<|start|>developer<|message|>' }}"
    "{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}"
    "{%- for tool in tools or [] %}{{- '\ntype ' + tool.function.name + ' = any' }}{% endfor %}"
    "{{- '<|end|>' }}{% endif %}"
    "{%- set ns = namespace(called='') %}"
    "{%- for m in rest %}"
    "{%- if m.role == 'assistant' and m.tool_calls %}"
    "{%- set later = namespace(final=false) %}"
    "{%- for other in rest[loop.index:] %}"
    "{%- if other.role == 'assistant' and not other.tool_calls %}{% set later.final = true %}{% endif %}{% endfor %}"
    "{%- if m.thinking and not later.final %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}{% set ns.called = call.name %}"
    "{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}"
    "{{- (call.arguments | tojson) + '<|call|>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if m.thinking and loop.last and not add_generation_prompt %}"
    "{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{- (m.content | tojson) + '<|end|>' }}"
    "{%- else %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}",
    markers=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"),
    eos="<|return|>",
    calls=1,
)
"""Channels; reasoning has another name; a last answer ends in another token than an earlier one and a call in a third; earlier reasoning
is dropped, that of calls as soon as a final answer follows; only the first call of a turn is printed."""

FAMILIES = {
    "qwen3": QWEN3,
    "qwen3.5": QWEN3_5,
    "llama3": LLAMA3,
    "smollm2": SMOLLM2,
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
}
