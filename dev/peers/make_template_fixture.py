#!/usr/bin/env python3
"""Makes the fixture of chat templates: what transformers renders from them.

    python dev/peers/make_template_fixture.py dev/fixtures/chat_templates.json

needs transformers, jinja2 and tokenizers. The templates below are written for this fixture. Each has the structure and
the output format of a model family's own template and uses what that uses: loops from the end, namespaces, macros,
dates, filters. `families` holds for each the conversations as text and as ids of a tokenizer of
dev/fixtures/tokenizer with the family's special tokens, and `examples`: whole conversations with their loss mask.
`small` holds templates of a line, each for one rule of the
language, with the text that transformers renders or the fact that it fails.
"""

import copy
import datetime
import json
import sys
import unittest.mock
from pathlib import Path

from jinja2.exceptions import SecurityError, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

NOW = datetime.datetime(2026, 7, 4, 9, 5, 0)
TOKENIZERS = Path(__file__).resolve().parent.parent.parent / "dev/fixtures/tokenizer/tokenizers.json"

CHATML = """\
{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system
You are small and helpful.<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}
{% set turns = messages[1:] %}
{% set system_text = messages[0]['content'] %}
{% else %}
{% set turns = messages %}
{% set system_text = false %}
{% endif %}
{% for turn in turns %}
{% if (turn['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Turns of user and assistant must alternate') }}
{% endif %}
{% if loop.index0 == 0 and system_text != false %}
{% set content = '<<SYS>>\\n' + system_text + '\\n<</SYS>>\\n\\n' + turn['content'] %}
{% else %}
{% set content = turn['content'] %}
{% endif %}
{% if turn['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{% elif turn['role'] == 'assistant' %}
{{ ' ' + content.strip() + ' ' + eos_token }}
{% endif %}
{% endfor %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "1 Jan 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{#- The system message has a place of its own. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Tools: " + tools|map(attribute='name')|join(', ') + "\\n" }}{%- endif %}
{{- "Today: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- else %}
        {{- raise_exception("Tools are not used here!") }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL_V1 = """\
{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}\
{{ message['content'] + eos_token + ' ' }}{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}\
{% endfor %}"""

# v0.3 (brackets are tokens) and Nemo (without spaces): the system message goes into the last user turn.
MISTRAL_V3 = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if message["role"] in ["user", "assistant"] and message.tool_calls is not defined %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] " ~ tools|tojson ~ "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]SP" + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST]SP" + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- "SP" + message["content"]|trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, not " + message["role"]) }}
    {%- endif %}
{%- endfor %}
"""

QWEN25 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0]['content'] if messages[0]['role'] == 'system' else 'You are Q.' }}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query and (loop.last or thought) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

SMOLLM3 = """\
{# ---- defaults ---- #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{{- "<|im_start|>system\\n" -}}
{%- if messages[0].role == "system" -%}
  {%- set system_message = messages[0].content -%}
  {%- if "/no_think" in system_message -%}{%- set mode = "/no_think" -%}
  {%- elif "/think" in system_message -%}{%- set mode = "/think" -%}{%- endif -%}
  {%- set instructions = system_message.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- if "/bare" in system_message -%}
  {{- instructions.replace("/bare", "").rstrip() -}}
{%- else -%}
  {{- "## Metadata\\n\\nToday: " ~ strftime_now("%d %B %Y") ~ "\\nMode: " + mode + "\\n\\n" -}}
  {{- "## Instructions\\n\\n" -}}
  {%- if instructions -%}{{- instructions + "\\n\\n" -}}{%- else -%}{{- "Think, then answer.\\n\\n" -}}{%- endif -%}
  {%- if xml_tools or python_tools or tools -%}
    {%- set ns = namespace(text="<tools>\\n") -%}
    {%- for tool in xml_tools or tools or [] -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\\n" -%}{%- endfor -%}
    {{- ns.text + "</tools>\\n" -}}
  {%- endif -%}
{%- endif -%}
{{- "<|im_end|>\\n" -}}
{# ---- turns ---- #}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}
    {{ "<|im_start|>" + message.role + "\\n" + content + "<|im_end|>\\n" }}
  {%- elif message.role == "assistant" -%}
    {% generation %}
    {%- if mode == "/think" -%}
      {{ "<|im_start|>assistant\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- else -%}
      {{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" + content.lstrip("\\n") + "<|im_end|>\\n" }}
    {%- endif -%}
    {% endgeneration %}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- if mode == "/think" -%}{{ "<|im_start|>assistant\\n" }}
  {%- else -%}{{ "<|im_start|>assistant\\n<think>\\n\\n</think>\\n" }}{%- endif -%}
{%- endif -%}
"""

OLMO2 = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>
' + message['content'] + '
' }}{% elif message['role'] == 'user' %}{{ '<|user|>
' + message['content'] + '
' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>
' + message['content'] + eos_token + '
' }}{% else %}{{ '<|assistant|>
' + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}{% endfor %}"""

# The role is a part of a special token.
PHI3 = """\
{% for message in messages %}{% if message['role'] in ['system', 'user', 'assistant'] %}\
{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

GEMMA = """\
{{ bos_token }}
{%- macro turn(role, text='', prefix='') -%}
{{ '<start_of_turn>' ~ role ~ '
' ~ prefix ~ (text | trim) ~ '<end_of_turn>
' }}
{%- endmacro -%}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {{ turn('model' if message['role'] == 'assistant' else message['role'], text=message['content']) }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model
' }}
{%- endif -%}
"""

IM = ["<|im_start|>", "<|im_end|>"]
# name: (template, tokenizer of dev/fixtures/tokenizer, further special tokens, named tokens)
FAMILIES = {
    "smollm2": (CHATML, "gpt2", IM, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
    "llama2": (LLAMA2, "llama2", [], {"bos_token": "<s>", "eos_token": "</s>"}),
    "llama3": (LLAMA3, "llama3", ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
               {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    "mistral-v0.1": (MISTRAL_V1, "llama2", [], {"bos_token": "<s>", "eos_token": "</s>"}),
    "mistral-v0.3": (MISTRAL_V3.replace("SP", " "), "llama2", ["[INST]", "[/INST]"], {"bos_token": "<s>", "eos_token": "</s>"}),
    "mistral-nemo": (MISTRAL_V3.replace("SP", ""), "llama3", ["<s>", "</s>", "[INST]", "[/INST]"],
                     {"bos_token": "<s>", "eos_token": "</s>"}),
    "qwen2.5": (QWEN25, "gpt2", IM, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "qwen3": (QWEN3, "gpt2", IM, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}),
    "smollm3": (SMOLLM3, "llama3", IM, {"eos_token": "<|im_end|>"}),
    "olmo2": (OLMO2, "gpt2", [], {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}),
    "phi3": (PHI3, "llama2", ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
             {"bos_token": "<s>", "eos_token": "</s>"}),
    "gemma": (GEMMA, "gpt2", ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
              {"bos_token": "<bos>", "eos_token": "<eos>"}),
}


def conversations():
    system, user, assistant = ("system", "user", "assistant")
    think = "<think>\nTwo and two.\n</think>\n\n4."
    turns = [
        [(user, "Hi")],
        [(system, "Be kind."), (user, "Hi")],
        [(user, " Hi \n"), (assistant, " Yes. "), (user, "Why?")],
        [(system, " Be <b>kind</b>.\n"), (user, "Hi"), (assistant, "Yes.\n"), (user, "caf\u00e9 \u6f22\u5b57\u00a0")],
        [(system, "Short. /no_think"), (user, "2+2?"), (assistant, think), (user, "And 3?"), (assistant, think)],
        [(user, "2+2?"), (assistant, think), (user, "Sure?")],
        [(assistant, "I begin.")],
        [(user, "a"), (user, "b")],
        [("narrator", "Once upon a time")],
    ]
    return [[{"role": role, "content": content} for role, content in one] for one in turns]


def training_conversations():
    system, user, assistant = ("system", "user", "assistant")
    turns = [
        [(user, "Hi"), (assistant, "Hello.")],
        [(system, "Be kind."), (user, "Hi"), (assistant, "\nYes, it was.\n")],
        [(user, "2+2?"), (assistant, "4"), (user, " Sure? \n"), (assistant, " caf\u00e9 \u6f22\u5b57 "), (user, "So?"),
         (assistant, "it was the best\n\nof times")],
        [(system, "Short."), (user, "a"), (assistant, "b"), (user, "c"), (assistant, "d")],
        [(user, "Hi"), (assistant, "the last turn"), (user, "is the user's")],
        [(user, "2+2?"), (assistant, "<think>\nTwo.\n</think>\n\n4."), (user, "Sure?"), (assistant, "Yes.")],
    ]
    return [[{"role": role, "content": content} for role, content in one] for one in turns]


# Expressions that test one rule of the language each. `m` is a list of two messages.
SMALL = r"""
1 + 2 * 3 - 4 // 3 % 2
7 // -2, 7 % -2, -7 // 2, -7 % 2, 7.5 // 2, -7.5 % 2, 2 ** 10, 2 ** -1, 4 / 2
1e16, 1.5e-7, 123456789.125, 1e22, 0.1, 1e15, -0.0, 1_000
true ~ none ~ false ~ missing
[1, 'a', "it's", none, true, 1.0, [{'k': 'v"\n\\'}], (1,), (1, 2), {}]
1 < 2 < 3, 1 < 3 < 2, 'a' < 'b', [1, 2] < [1, 3], 1 == 1.0, true == 1, (1,) == [1], none == false
'abcdef'[0] ~ 'abc'[-1] ~ 'abc'[::-1] ~ 'abc'[1:] ~ 'abcdef'[4:1:-2] ~ 'é漢x'[1] ~ 'abc'[9:] ~ 'abc'[-9:2]
[1, 2, 3, 4][::-1], [1, 2, 3, 4][-2:], [1, 2, 3, 4][3:0:-1], [1, 2, 3][true]
m[0].role ~ m[-1]['content'] ~ m[5] ~ m[0].nope ~ m.0.role
m[5].role
missing.x
missing + 1
'a' + 1
1 in 'a'
1 < 'a'
1 // 0
'a' * 3 ~ 2 * 'b'
[1] + [2], (1,) + (2,)
'x' in 'axb' and 'x' not in 'abc' and 1 in [1, 2] and 'role' in m[0] and 'x' not in missing
'a' if false
'a' if none else 'b' if 0 else 'c'
'  a b  '.strip() ~ '|' ~ '  a '.lstrip() ~ '|' ~ ' a '.rstrip() ~ '|' ~ 'xyaxy'.strip('yx') ~ '\u00a0\u2003x\u3000'.strip()
'a,b,,c'.split(','), 'a  b c '.split(), 'a b c d'.split(' ', 1), ' a b  c d '.split(none, 2), ''.split(), ''.split(',')
' a b c '.rsplit(none, 1), 'a,b,c'.rsplit(',', 1), 'a\nb\r\nc\n'.splitlines()
'abc'.startswith('ab'), 'abc'.endswith(('x', 'c')), 'abc'.replace('b', 'xx'), 'aaa'.replace('a', 'b', 2), 'ab'.replace('', '-')
'hello wORLD'.title() ~ ('it\'s o-k'|title) ~ 'it\'s o-k'.title() ~ 'hELLO'.capitalize() ~ ('a'|upper) ~ ('B'|lower) ~ ('xY'|capitalize)
'abcabc'.find('c'), 'abcabc'.rfind('c'), 'abcabc'.count('b'), 'x'.find('q'), 'éx'.find('x'), 'abc'.removeprefix('a').removesuffix('c')
'a\nb\n\nc'|indent ~ '|' ~ 'a\nb\n\nc'|indent(2, true) ~ '|' ~ 'a\n\nb'|indent(2, blank=true) ~ '|' ~ 'a\nb\n'|indent('>>')
' x '|trim ~ ('xax'|trim('x')) ~ [1, 2, 3]|length ~ 'é漢'|length ~ {'a': 1}|count ~ missing|length
5|length
m|tojson
m|tojson(indent=2)
{'b': [], 'a': {}, 'é': '\u2028\x01\x7f/<>&\'"'}|tojson ~ {'b': 1, 'a': 2.0}|tojson(sort_keys=true) ~ ('é🙂'|tojson(ensure_ascii=true)) ~ [1, 2]|tojson(separators=(',', ':'))
missing|tojson
missing|default('d') ~ ''|default('d') ~ ''|default('d', true) ~ none|default('x') ~ missing|d ~ 0|default(1, boolean=true)
[]|first ~ [1, 2]|first ~ [1, 2]|last ~ 'abc'|last ~ {'a': 1}|first
'abc'|list, {'a': 1}|list, missing|list, [1, 2]|reverse|list, 'abc'|reverse
m|map(attribute='role')|list, m|map(attribute='nope', default='z')|join('-'), ['a', 'b']|map('upper')|join, m|map(attribute='role')|map('length')|list
m|selectattr('role', 'equalto', 'user')|list|length, m|rejectattr('role', 'eq', 'user')|list|length, m|selectattr('nope')|list, [0, 1, 2]|select|list, [1, 2, 3]|select('odd')|list, [1, 2, 3]|reject('gt', 1)|list
'a generator is true' if m|selectattr('role', 'equalto', 'nobody') else 'false'
m|selectattr('role')|length
'12'|int, ' 1_000 '|int, 'x'|int, 'x'|int(7), '1.9'|int, -1.9|int, true|int, '1.5'|float, 3|float, 'x'|float(0.5), -3|abs
m[0].items()|list, m[0].keys()|list, m[0].values()|list, m[0]|items|list, m[0].get('role'), m[0].get('q'), m[0].get('q', 'd'), m[0].items()|length
m[0].items is defined, m[0]['items'] is defined, 'x'.strip is defined, m[0].nope is defined
{'B': 1, 'a': 2}|dictsort, 'x'|replace('x', 'y'), 5|string, ('a'|safe) ~ 'b', [1, none, true]|join, 'abc'|join('-')
1 is number, 1.0 is float, 1 is integer, true is integer, true is number, 'a' is iterable, 'a' is sequence, {} is sequence, {} is mapping, missing is sequence, none is none, 1 is true, false is false, [] is not string
3 is odd, 4 is even, 9 is divisibleby 3, 1 is eq 1, 1 is ne 2, 2 is ge(2), 'a' is in ['a'], m[0].items() is sequence, m[0].items() is iterable
-2 ** 2, -1|abs, not 1 == 2, not missing, missing or 'b', none and 1
1 ~ 2 + 3
'a' ~ 'b' * 2 ~ [1]|length
'a' 'b' "c" ~ '\x41\u00e9\U0001F642\101\q'
range(5)|list, range(5, 0, -2)|list, range(0)|list
range(1000000)
namespace(a=1).a ~ namespace({'b': 2}).b ~ dict(a=1)
raise_exception('no')
strftime_now('%d %b %Y %H:%M'), strftime_now is defined
m.append(1)
9 is
'%s and %d, %5s|%-5s|%05.1f|%x|%r|%%' % ('a', 3.7, 'b', 'c', 2.25, 255, "q'"), '%s' % 5, '%(a)s-%(b)03d' % {'a': 1, 'b': 2}, '%.2s|%+d|% d' % ('abc', 1, 2), '%c%c' % ('x', 65), '%e %G' % (12345.678, 1e-10), '%*d' % (4, 7), '%#x %o %X' % (10, 8, 171)
'%s %s' % ('a',)
'%s' % ('a', 'b')
'%d' % 'a'
'%q' % 1
'%s: %s'|format('a', 1), '%(x)s'|format(x=2), 'none'|format
'{0}-{1}-{0} {name} {name!r:>5}'.format('a', 2, name='n'), '{:>6}|{:<6}|{:^6}|{:*^7}|{:06.2f}|{:,}|{:+d}|{:x}|{:#b}|{:.1%}|{:e}'.format('r', 'l', 'm', 'c', 3.14159, 1234567, 5, 255, 5, 0.256, 12345.678)
'{a[k]} {b[1]} {c.role}'.format(a={'k': 'v'}, b=[1, 2], c=m[0]), '{:5}|{:5}|{:.2}|{:5.1f}|{}|{:.3}'.format(1, 'x', 'abc', 2.25, 1.5, 1000.0), '{}'.format(none), '{}'.format([1, 'a'])
'{}'.format()
'{x}'.format(y=1)
'{:d}'.format('a')
'{'.format(1)
[3, 1, 2]|sort, [3, 1, 2]|sort(reverse=true), ['b', 'A', 'a', 'C']|sort, ['b', 'A', 'a', 'C']|sort(case_sensitive=true), m|sort(attribute='role')|map(attribute='role')|list, m|sort(attribute='role,content', reverse=true)|map(attribute='role')|list, [[2, 1], [1, 3]]|sort(attribute=1), 'hello'|sort, {'b': 1, 'a': 2}|sort
[1, 'a']|sort
[1, 2, 1, 'a', 'A', 1.0, true]|unique|list, ['x', 'X']|unique(case_sensitive=true)|list, m|unique(attribute='role')|list|length, [(1, 2), (1, 2), none]|unique|list
[[1]]|unique|list
[1, 2, 3.5]|sum, []|sum, [{'n': 1}, {'n': 2}]|sum(attribute='n'), [1]|sum(start=5), [[1], [2]]|sum(start=[])
['a']|sum
[{'k': 'b', 'n': 1}, {'k': 'a', 'n': 2}, {'k': 'B', 'n': 3}]|groupby('k')|list, [{'k': 1}, {}]|groupby('k', default=0)|list, m|groupby('role')|map(attribute='grouper')|join(','), m|groupby('role')|map('last')|map('length')|list, (m|groupby('role')|first).list|length
[3, 1, 2]|min, [3, 1, 2]|max, ['b', 'A']|min, []|max, ['b', 'A']|max(case_sensitive=true), [{'n': 3}, {'n': 5}]|max(attribute='n')
2.5|round, 3.5|round, 2.675|round(2), 2.1|round(method='ceil'), 2.19|round(1, 'floor'), 7|round, -0.5|round
'a b  c'|wordcount, m[0]|attr('role') is defined, 'x'|attr('upper') is defined, {'B': 1, 'a': 0}|dictsort(by='value'), {'B': 1, 'a': 0}|dictsort(true), {'B': 1, 'a': 0}|dictsort(reverse=true), 'AB' is upper, 'ab' is lower, 'trim' is filter, 'odd' is test, 1 is sameas 1
{1: 'a', '1': 'b'}[1], {1: 'a'}[true], {1: 'a'}[1.0], {none: 2}[none], {(1, 2): 3}[(1, 2)], {1: 'a', 2.5: 'b', true: 'c', none: 'd'}, 1 in {1: 2}, '1' in {1: 2}, {1: 2}.get(1), {1: 2}|tojson, {2: 'x', none: 1, true: 0, 1.5: 3}|tojson
{[1]: 2}
[1] in {}
{1: 'a'}[[1]]
{2: 'x', 1: 'y'}|tojson(sort_keys=true), {2: 'x', 1: 'y'}|dictsort, {'a': 1, 'a': 2}, {1: 2} == {1.0: 2}, {(1, 2): 3}|list
{(1, 2): 3}|tojson
[1, 2] * 2, 2 * (1,), 'ab' * -1, [0] * 0, 'a' * true
[1, 2, 1].count(1), [1, 2].index(2), (1, 2, 1).count(1), (1, 2).index(2), 'abcabc'.count(''), 'abc'.find(''), 'abc'.rfind(''), 'aaaa'.count('aa'), 'aaa'.rsplit('aa'), 'aaa'.split('aa'), 'é漢x'.rfind('x'), 'a--b--c'.rsplit('--', 1), ' a  b  '.rsplit(none, 1), ' a  b  '.split(none, 0)
[1].index(2)
{'a': 1}.copy(), m[0].copy().role, 'a b'.split() | first, [1, 2]|first, 'é漢'|last, 'éx'|first, [[1, 2], [3]]|map('first')|list, ['%s', 'x%s']|map('format', 1)|list, ['a,b']|map('replace', ',', '-')|list, [3, 4]|map('string')|map('upper')|list
0x1F, 0b101, 0o17, 1_000.5, 0XfF
'abcdef'[1:-1:2], 'abcdef'[::-2], 'é漢x'[-2:], 'é漢x'[:2], 'é漢x'[::-1], ''[0] is defined, 'abc'[5:2], (1, 2, 3)[1:], 'é漢x'[-1], 'é漢x'[-4] is defined
'ab'.replace('', '-'), ''.replace('', '-'), 'éa'.replace('', '-', 2), 'aaa'.replace('aa', 'b'), 'abab'.replace('ab', '', 1), 'x'.replace('x', ''), ''.split(','), 'a\x0bb\x1cc\u2028d'.splitlines()
{'a': {'b': [1, {'c': []}]}}|tojson(indent=1), [[], {}, [1]]|tojson(indent='--'), {'a': 1}|tojson(indent=2, separators=(';', '=')), {'a': [1, 2]}|tojson(indent=0), 'a\tb\u2028"'|tojson(ensure_ascii=true)
(1
{% for i in [1, 2, 3] %}{{ loop.index }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}|{{ loop.nextitem }};{% endfor %}
{% for i in [1, 2, 3, 4] if i is even %}{{ loop.index }}{{ i }}{% else %}none{% endfor %}{% for i in [] %}x{% else %}none{% endfor %}
{% for k, v in m[0].items() %}{{ k }}={{ v }},{% endfor %}{% for (a, b) in [(1, 2)] %}{{ a }}{{ b }}{% endfor %}{% for k in m[0] %}{{ k }}{% endfor %}
{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i > 4 %}{% break %}{% endif %}{{ i }}{% endfor %}
{% for i in [1, 2] %}{{ i }}{% for j in [] %}{% else %}{% break %}{% endfor %}{{ i }}{% endfor %}
{% set x = 0 %}{% for i in [1, 2] %}{{ x }}{% set x = i %}{{ x }}{% endfor %}{{ x }}{% if true %}{% set x = 9 %}{% endif %}{{ x }}
{% set ns = namespace(x=0) %}{% for i in [1, 2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}
{% set x %}a{{ 1 }}b{% endset %}[{{ x }}]{% set y | upper | trim %} a {% endset %}[{{ y }}]{% set a, b = 1, 2 %}{{ b }}{{ a }}
{% macro f(a, b=2, c='x') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }}{{ f(1, c='z') }}{{ f() }}{{ f(a=5) }}
{% macro f(n) %}{{ n }}{% if n > 0 %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(4) }}
{% macro f() %}{{ x }}{% set y = 1 %}{% endmacro %}{% set x = 5 %}{{ f() }}{{ y is defined }}
{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}
{{ f() }}{% macro f() %}1{% endmacro %}
{%- if true -%}  a  {%- endif -%}  b
a\n  {% if true %}\n  b\n  {% endif %}\nc\n
a  {%+ if true %}\nb{% endif +%}\nc
  {{ 1 }}  \n{{ 2 -}}  \n x\n\n
  {# c #}\n x {#- d -#} y {# multi\nline #}\nz
{% raw %}{{ x }}{% endraw %}\ny{%- raw -%} {{ x {% endraw -%} \n y
x\r\ny{% if 1 %}\r\nz{% endif %}\r\n
{{ '}}' }}{{ {'a': {'b': 1}} }}
{% generation %}a{% set q = 1 %}{% endgeneration %}{{ q is defined }}
{% for m in m[::-1] %}{{ loop.index0 }}{{ m.role }}{% endfor %}
{% for a, b in [(1, 2, 3)] %}{% endfor %}
{% for i in 5 %}{% endfor %}
{% for i in missing %}x{% else %}y{% endfor %}
{% set g = m|selectattr('role') %}{{ g|list|length }}{{ g|list|length }}
{% break %}
{% if 1 %}
{% for i in [1, 2, 3] %}{{ loop.cycle('a', 'b') }}{{ loop.changed(i // 2) }}{% endfor %}
{% for i in [1] %}{{ loop.cycle() }}{% endfor %}
{% set x = [1] %}{% set _ = x.append(2) %}{% set y = x %}{% set _ = y.append([3]) %}{{ x }}{{ x.pop() }}{{ x.pop(0) }}{{ x }}{% set _ = x.extend('ab') %}{% set _ = x.insert(1, 'q') %}{% set _ = x.insert(-1, 'z') %}{{ x }}{{ y|length }}
{% set x = {'a': 1} %}{% set _ = x.update({'b': 2, 1: 3}, c=4) %}{{ x }}{{ x.pop('a') }}{{ x.pop('q', 7) }}{{ x.setdefault('d', 5) }}{{ x.setdefault('d', 6) }}{{ x }}{{ x.b }}
{% set x = [] %}{{ x.pop() }}
{% for i in [1, 2] %}{% set _ = m[0].update(n=i) %}{% endfor %}{{ m[0].n }}{% set _ = m.append({'role': 'x'}) %}{{ m|length }}{{ m[2].role }}
{% with a=1, b=m[0].role %}{{ a }}{{ b }}{% set a = 2 %}{% endwith %}{{ a is defined }}{% with %}x{% endwith %}
{% filter upper %}a{{ m[1].role }}b{% endfilter %}{% filter replace('a', 'x')|trim %} a {% endfilter %}
{% print 1, 2 %}{% print m[0].role %}
{% macro f(a, b=0, c=0) %}{{ a }}{{ b }}{{ c }};{% endmacro %}{{ f(*[1, 2]) }}{{ f(1, **{'c': 3}) }}{{ f(*'xyz') }}
{% macro f() %}x{% endmacro %}{% set ns = namespace(g=f) %}{{ ns.g() }}{{ (f)() }}{{ [f][0]() }}
{% set x = 5 %}{{ x() }}
{% if false %}{{ x|nofilter }}{{ x is notest }}{{ lipsum(1, html=false) }}{{ x.nomethod() }}{{ x[0](1) }}{% include 'a' %}{% import 'b' as c %}{% from 'd' import e with context %}{% for a in b recursive %}{{ loop(a) }}{% endfor %}{% call(u) f(1) %}y{% endcall %}{% autoescape true %}z{% endautoescape %}{{ '\N{BULLET}' }}{{ 99999999999999999999 }}{% for (a, (b, c)) in q %}{% endfor %}{{ x|map('nofilter')|list }}{{ x|a.b }}{% endif %}ok
{{ 'x' if true else ('y'|nofilter) }}
{% for i in [1] %}{% if false %}{% macro f() %}{% endmacro %}{% endif %}{{ i }}{% endfor %}
{% nosuchtag %}
{% if false %}{% nosuchtag %}{% endif %}
{% call f() %}
{% with a %}{% endwith %}
{% if false %}{{ x| }}{% endif %}
{% if false %}{{ 1 1 }}{% endif %}
{{ '{} {{ }} {}'.format(1, 2) }}{{ '{} {0}'.format(1, 2) }}
{{ 1
{{ }}
""".strip("\n").split("\n")


def rendered(template, messages):
    chat_template_utils._compile_jinja_template.cache_clear()
    return chat_template_utils._compile_jinja_template(template).render(m=copy.deepcopy(messages))


def small_cases():
    messages = [{"role": "user", "content": "q\"'\u00e9"}, {"role": "assistant", "content": "a"}]
    cases = []
    for line in SMALL:
        is_template = any(mark in line for mark in ("{%", "{{", "{#"))
        template = line.replace("\\n", "\n").replace("\\r", "\r") if is_template else "{{ " + line + " }}"
        case = {"template": template}
        try:
            case["text"] = rendered(template, messages)
        except SecurityError:
            # Transformers refuses methods that change a list. The values are those of jinja2 without that rule, with
            # which other programs render templates.
            with unittest.mock.patch.object(chat_template_utils, "ImmutableSandboxedEnvironment", SandboxedEnvironment):
                try:
                    case["text"] = rendered(template, messages)
                except Exception:
                    case["fails"] = True
        except Exception:  # of any type: the template is wrong, or Python cannot do this
            case["fails"] = True
        cases.append(case)
    return {"m": messages, "cases": cases}


def tokenizer_description(name, special):
    """The tokenizer.json that dev/tests/tokenizer_fixture.h makes of a fixture."""
    fixture = json.loads(TOKENIZERS.read_text(encoding="utf-8"))
    description = next(one["tokenizer"] for one in fixture["cases"] if one["name"] == name)
    added = description["added_tokens"]
    for text in special:
        ids = list(description["model"]["vocab"].values()) + [token["id"] for token in added]
        added.append({**added[0], "id": max(ids) + 1, "content": text})
    return description


def family_cases(template, tokenizer_name, special, named):
    description = tokenizer_description(tokenizer_name, special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(description)), **named)
    cases = []
    for messages in conversations():
        for prompt in (False, True):
            case = {"messages": messages, "add_generation_prompt": prompt}
            options = {"chat_template": template, "add_generation_prompt": prompt}
            try:
                case["text"] = tokenizer.apply_chat_template(copy.deepcopy(messages), tokenize=False, **options)
                case["ids"] = tokenizer.apply_chat_template(copy.deepcopy(messages), return_dict=False, **options)
            except TemplateError as e:
                case["fails"] = str(e)
            cases.append(case)
    examples = [example(tokenizer, template, messages) for messages in training_conversations()]
    return {"template": template, "tokenizer": tokenizer_name, "special": special, "named": named, "cases": cases,
            "examples": examples}


def shared_prefix(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def example(tokenizer, template, messages):
    """A conversation's ids, and as `mask` which of them are loss tokens: those of each assistant turn i between the
    rendering of messages[:i] with the generation prompt and that of messages[:i + 1], through the special token that
    follows the response."""

    def apply(count, prompt, tokenize):
        return tokenizer.apply_chat_template(copy.deepcopy(messages[:count]), chat_template=template, return_dict=False,
                                             tokenize=tokenize, add_generation_prompt=prompt)

    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    made = {"messages": messages}
    try:
        whole, ids = apply(len(messages), False, False), apply(len(messages), False, True)
        mask = [0] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt, turn = apply(i, True, False), apply(i + 1, False, False)
            # A difference from the whole conversation may only follow the response.
            response = turn.rfind(message["content"].strip()) + len(message["content"].strip())
            same = shared_prefix(turn, whole)
            if not turn.startswith(prompt) or not whole.startswith(prompt) or not len(prompt) < response <= same:
                return {**made, "refused": i + 1}
            begin = shared_prefix(apply(i, True, True), ids)
            end = shared_prefix(apply(i + 1, False, True), ids)
            end = next((k + 1 for k in range(begin + 1, end) if ids[k] in special), end)
            mask[begin:end] = [1] * (end - begin)
    except TemplateError as e:
        return {**made, "fails": str(e)}
    assert sum(mask) > 0
    return {**made, "ids": ids, "mask": mask}


class FixedDate(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    chat_template_utils.datetime = FixedDate
    fixture = {"families": [{"name": name, **family_cases(*family)} for name, family in FAMILIES.items()],
               "small": small_cases()}
    with open(sys.argv[1], "w", encoding="utf-8") as file:  # a family or a small template a line
        small = fixture["small"]
        lines = [",\n".join(json.dumps(one, ensure_ascii=False) for one in list_)
                 for list_ in (fixture["families"], small["cases"])]
        file.write('{"families": [\n%s],\n"small": {"m": %s, "cases": [\n%s]}}\n'
                   % (lines[0], json.dumps(small["m"], ensure_ascii=False), lines[1]))


if __name__ == "__main__":
    main()
