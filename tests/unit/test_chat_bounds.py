"""A chat template comes from anywhere: it cannot hang, fill the memory or fail in any odd way."""

# ruff: noqa: E501 - templates are long lines

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from foredraft.core.errors import InvalidRequest, ModelError
from foredraft.models.chat import MAX_SOURCE, ChatTemplate, ControlSplitter
from foredraft.models.template_budget import MAX_VALUE, TemplateLimit, budget, weigh

NAMED = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"},
    {"role": "user", "content": "日本 and 100%"},
]
BIG = "{% set big = 'ab' * 2000000 %}"


def render(source: str, messages: Any = MESSAGES[1:2]) -> str:
    return ChatTemplate(source, NAMED, ControlSplitter([])).render(messages)


TOO_MUCH = {
    "nested ranges": "{% for i in range(10**4) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "filtered ranges": (
        "{% for i in range(10**5) %}{% for j in range(10**5) if j < 0 %}{% endfor %}{% endfor %}"
    ),
    "recursive loop": (
        "{% for i in range(90000) recursive %}{{ loop(range(90000)) if loop.depth < 4 }}{% endfor %}"
    ),
    "lazy filters": "{% for i in range(9**4) %}{{ range(99999) | map('abs') | sum }}{% endfor %}",
    "calls that double": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "words of a macro": (
        "{% macro f() %}" + "long text " * 9999 + "{% endmacro %}"
        "{% for i in range(99999) %}{% set x = f() %}{% endfor %}"
    ),
    "no end of recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "lorem ipsum": "{{ lipsum(n=10**7) }}",
    "times": "{{ 'a' * 10**11 }}",
    "times from the left": "{{ 10**11 * ['a'] }}",
    "power": "{{ 9**(9**9) }}",
    "powers in turns": "{% set n = namespace(v=9) %}{% for i in range(99) %}{% set n.v = n.v * n.v %}"
    "{% endfor %}",
    "percent width": "{{ '%10000000000d' % 1 }}",
    "percent precision": "{{ '%.1000000000f' % 1 }}",
    "percent star": "{{ '%*d' % (10**10, 1) }}",
    "percent filter": "{{ '%10000000000d' | format(1) }}",
    "percent often": BIG + "{{ ('%(a)s' * 9999) % {'a': big} }}",
    "format width": "{{ '{:10000000000d}'.format(1) }}",
    "format width given": "{{ '{:{w}d}'.format(1, w=10**10) }}",
    "format often": BIG + "{{ ('{0}' * 9999).format(big) }}",
    "format by a mapping": BIG + "{{ ('{a}' * 9999).format_map({'a': big}) }}",
    "ljust": "{{ 'a'.ljust(10**11) }}",
    "rjust": "{{ 'a'.rjust(10**11) }}",
    "zfill": "{{ 'a'.zfill(10**11) }}",
    "center": "{{ 'a'.center(10**11) }}",
    "center filter": "{{ 'a' | center(10**11) }}",
    "indent": "{{ 'a' | indent(10**11, true) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**11) }}",
    "bytes": "{{ (1).to_bytes(10**11, 'big') }}",
    "translate": BIG + "{{ big.translate({97: big}) }}",
    "replace": BIG + "{{ big.replace('a', big) }}",
    "replace filter": BIG + "{{ big | replace('a', big) }}",
    "join": BIG + "{{ big.join(big) }}",
    "join filter": BIG + "{{ big | join(big) }}",
    "batch": "{{ [1] | batch(10**11, 'x') | list }}",
    "slice": "{{ [1] | slice(10**11) | list }}",
    "sum of lists": "{{ [[1]] * 99 | sum(start=[]) }}",
    "round": "{{ 1.5 | round(10**9, 'ceil') }}",
    "json indent": "{{ {1: 2} | tojson(indent=10**9) }}",
    "json": BIG + "{{ [big, big] | tojson }}",
    "doubled by tilde": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled by plus": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(40) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled in lists": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "doubled in objects": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}"
    "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x }}",
    "doubled in namespaces": "{% set n = namespace(x=1) %}{% for i in range(40) %}"
    "{% set n = namespace(x=n, y=n) %}{{ n }}{% endfor %}" + "{% set a = namespace() %}"
    + "".join(f"{{% set a{i} = namespace(x=a{i - 1 if i else ''}, y=a{i - 1 if i else ''}) %}}"
              for i in range(40)) + "{{ a39 }}",
    "deep": "{% set n = namespace(x=[1]) %}{% for i in range(9999) %}{% set n.x = [n.x] %}{% endfor %}",
    "much output": BIG + "{{ big }}{{ big }}",
    "searched often": BIG + "{% for i in range(99999) %}{% if 'c' in big %}{% endif %}{% endfor %}",
    "cut often": BIG + "{% for i in range(99999) %}{% set x = big[1:] %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("kind", TOO_MUCH)
def test_what_no_conversation_needs_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match="chat template") as caught:
        render(TOO_MUCH[kind])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[9].role }}",
        "{{ undefined.foo }}",
        "{{ ('hi' ~ range(9)) | xmlattr }}",
        "{{ [3] | tojson(4, 5, 6, 7, 8) }}",
        "{{ cycler | tojson }}",
        "{{ strftime_now(3) }}",
        "{{ strftime_now('\ud800') }}",
        "{{ '%s %s' % 'a' }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "9" * 5000 + " }}",
        "{% if %}",
        "{{" * 5,
        "x" * (MAX_SOURCE + 1),
    ],
    ids=lambda source: source[:30],
)
def test_every_failure_is_one_line_about_the_template(source: str) -> None:
    with pytest.raises(ModelError, match="chat template") as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_a_refusal_is_about_the_messages() -> None:
    with pytest.raises(InvalidRequest, match=r"^chat template refuses: no way$"):
        render("{{ raise_exception('no\\nway') }}")
    with pytest.raises(InvalidRequest, match="refuses: 3"):
        render("{{ raise_exception(3) }}")


def test_a_long_conversation_is_within_the_budget() -> None:
    messages = [{"role": "user", "content": "word " * 1000}] * 300
    assert len(render(LIKE["qwen"], messages)) > 300 * 5000
    assert len(render(LIKE["llama 3"], messages)) > 300 * 4999


LIKE = {
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' "
        "+ message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama 3": (
        "{{- bos_token }}\n{%- if not date_string is defined %}\n"
        "    {%- set date_string = '26 Jul 2024' %}\n{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content']|trim %}\n"
        "    {%- set messages = messages[1:] %}\n{%- else %}\n"
        "    {%- set system_message = '' %}\n{%- endif %}\n"
        "{{- '<|start|>system<|end|>\\n\\n' }}{{- 'Today Date: ' + date_string + '\\n\\n' }}\n"
        "{{- system_message }}{{- '<|eot|>' }}\n"
        "{%- for message in messages %}\n"
        "    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}\n"
        "        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim "
        "+ '<|eot|>' }}\n    {%- endif %}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}"
    ),
    "mistral": (
        "{%- set loop_messages = messages %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system_message = messages[0]['content'] %}\n"
        "    {%- set loop_messages = messages[1:] %}\n{%- endif %}\n"
        "{%- set ns = namespace(index=0) %}\n{{- bos_token }}\n"
        "{%- for message in loop_messages %}\n"
        "    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}\n"
        "        {{- raise_exception('roles must alternate') }}\n    {%- endif %}\n"
        "    {%- if message['role'] == 'user' %}\n"
        "        {%- if loop.last and system_message is defined %}\n"
        "            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}\n"
        "        {%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}\n"
        "    {%- else %}{{- ' ' + message['content']|trim + eos_token}}{%- endif %}\n"
        "    {%- set ns.index = ns.index + 1 %}\n{%- endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "qwen": (
        "{%- set ns = namespace(multi_step_tool=true, last=messages|length - 1) %}\n"
        "{%- for message in messages[::-1] %}\n"
        "    {%- set index = (messages|length - 1) - loop.index0 %}\n"
        "    {%- if ns.multi_step_tool and message.role == 'user' and message.content is string and "
        "not(message.content.startswith('<r>') and message.content.endswith('</r>')) %}\n"
        "        {%- set ns.multi_step_tool = false %}{%- set ns.last = index %}\n"
        "    {%- endif %}\n{%- endfor %}\n"
        "{%- for message in messages %}\n    {%- set content = message.content %}\n"
        "    {%- set reasoning = '' %}\n"
        "    {%- if message.role == 'assistant' and '</think>' in content %}\n"
        "        {%- set reasoning = content.split('</think>')[0].rstrip('\\n')"
        ".split('<think>')[-1].lstrip('\\n') %}\n"
        "        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n"
        "    {%- endif %}\n"
        "    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ reasoning ~ content.strip('\\n') "
        "~ '<|im_end|>\\n' }}\n"
        "    {%- if loop.last or not loop.nextitem %}{{- '' }}{%- endif %}\n{%- endfor %}"
    ),
    "all sorts": (
        "{% macro head(role) %}[{{ role | title | replace('U', 'u') }}]{% endmacro %}"
        "{% for m in messages if m.role != 'system' %}{{ head(m['role']) }}{{ loop.index }}"
        "{{ loop.cycle('a', 'b') }}{{ '%s:%03d' % (m.role, 7) }}{{ '{:>4}|{x}'.format('é', x=1.5) }}"
        "{{ m.items() | list | length }}{{ m | tojson(indent=2) }}{{ [1, 2.5] | sum }}"
        "{{ ['b', 'a'] | sort | join(',') }}{{ 'x' in ['x'] and 3 not in (1, 2) }}"
        "{{ m.content | indent(2) }}{{ 2 ** 10 // 3 % 7 }}{{ 1.25 | round(1) }}{{ none }}"
        "{{ {'k': [1, (2,)]} }}{{ m.content[:3][::-1] }}{{ 'a\nb'.splitlines() }}{{ 'ab' * 3 }}"
        "{% set kept %}{{ m.role | upper }}{% endset %}{{ kept }}{% filter trim %} y {% endfilter %}"
        "{{ dict(a=1) | dictsort }}{{ range(3) | map('string') | join }}"
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}"
        "{{ messages | groupby('role') | length }}{{ 'é' | urlencode }}{{ '<' | e }}"
        "{{ m.get('name', 'none') }}{{ ''.join(['p', 'q']) }}{{ 'abc'.center(9, '*') }}"
        "{% call(x) caller_of() %}{{ x }}{% endcall %}{% endfor %}"
    ).replace(
        "{% for m", "{% macro caller_of() %}<{{ caller(3) }}>{% endmacro %}{% for m", 1
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", LIKE)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_templates_of_the_families_give_transformers_text(kind: str, count: int) -> None:
    messages = MESSAGES[:count] if kind != "mistral" or count > 1 else MESSAGES[1:2]
    (expected,), _ = render_jinja_template(
        conversations=[messages], chat_template=LIKE[kind], add_generation_prompt=True, **NAMED
    )
    assert render(LIKE[kind], messages) == expected


def test_a_value_weighs_what_it_would_print() -> None:
    assert weigh("abc") == 4
    assert weigh(["abc", ["d"]]) > weigh(["abc"]) > weigh("abc")
    shared = [0] * 1000
    assert weigh([shared, shared]) > 2 * weigh(shared)
    with pytest.raises(TemplateLimit):
        weigh("a" * (MAX_VALUE + 1))
    with budget(), budget():
        pass
