"""Chat templates in the manner of well-known model families, and chats to render with them."""

from __future__ import annotations

from typing import Any

from tests.support.tiny_tokenizer import TINY_TEMPLATE

Chat = list[dict[str, Any]]

SPECIAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>"),
    *(
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<image>",
    ),
)
ADDED_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "[TOOLS]")
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<image>", "add_bos_token": True}

TEMPLATES = {
    "chatml": TINY_TEMPLATE,
    "chatml_default_system": """\
{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful assistant<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""",
    "llama2": """\
{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}\
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}\
{% set system_message = false %}{% endif %}{% for message in loop_messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if loop.index0 == 0 and system_message != false %}\
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama3": """\
{{- '<|begin_of_text|>' }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have access to the following functions.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' }}
            {{- call.function.arguments | tojson }}{{- "}" }}
        {%- endfor %}{{- "<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "role_built": """\
{% for message in messages %}{{ '<|' + message['role'] + '|>' + '\\n' }}\
{{ message['content'] + '<|end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "gemma": """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}\
{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "reasoning": """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools> Call with <tool_call></tool_call>.<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == "user" %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if '</think>' in content and not reasoning %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "extensions": """\
{% for message in messages %}
{% if message.role == 'tool' %}{% continue %}{% endif %}
{% if loop.index > 4 %}{% break %}{% endif %}
{{ message.role }}: {% generation %}{{ message.content }}{% endgeneration %}{{ '</s>' }}
{% endfor %}
{% set d = dict(a=1, b='x') %}{{ d['b'] }}{{ dict.fromkeys(['k']) }}{{ pad_token }}{{ image_token }}
{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages | length) }}{% if documents %}docs{% endif %}""",
    "repr_of_everything": "{{ bos_token }}{{ messages }}{{ tools }}{{ tools | string }}{{ '%r' % (messages[0],) }}",
    "ascii_json": """\
{{ bos_token }}{% for m in messages %}{{ m | tojson(ensure_ascii=true, sort_keys=true) }}</s>{% endfor %}""",
    "joined_parts": """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content | trim }}{% else %}{% for part in message.content or [] %}\
{{ part.text | trim }}{% endfor %}{% endif %}{{ message.name }}<|im_end|>{% endfor %}""",
    "refuses": "{{ raise_exception('no <chat> for you: ' + messages[0].content) }}",
    "fails": "{{ messages[0].content + 1 }}{{ undefined_name.attribute }}",
}

_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Oslo", "días": [1, 2.5, None, True]}},
}
CHATS: dict[str, Chat] = {
    "one": [{"role": "user", "content": "Hello world"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi\r\nthere  "}],
    "turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "日本語 🙂 é ñ \t ok"},
        {"role": "assistant", "content": "<b>fine</b> & \"quoted\" 'single'"},
        {"role": "user", "content": "\n\nthe end \ue000 \u2028 of it"},
    ],
    "not_alternating": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    "tool_loop": [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": -3}'},
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "Thanks"},
    ],
    "reasoning": [
        {"role": "user", "content": "think"},
        {"role": "assistant", "content": "yes", "reasoning": "because it is so\n"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "no", "thinking": "hm", "reasoning_content": None},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}],
    "empty_text": [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
}
"""No text that spells a control token: with and without marking, these render alike."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city; units are °C",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
