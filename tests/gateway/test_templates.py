"""Chat templates: the same text as transformers', the places they are read from, and bounds of their cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import DEADLINE_S
from gateway.chat_templates import BY_NAME, CHATML, GEMMA, LLAMA3, MISTRAL

from quire.gateway.chat import rendering, templates
from quire.gateway.chat.rendering import CannotRender, compile_template, render
from quire.gateway.chat.templates import NUM_PROCESSES, TemplateRefused, Templates, TemplateSource, load_templates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "<b>&'é", "parameters": {"type": "object", "properties": {}}},
    }
]
CALL = {"id": "abcdef123", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
USER: dict[str, Any] = {"role": "user", "content": " Hello <b> "}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Hi there  "}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, ANSWER, USER],
    "call": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdef123", "content": "12 degrees"},
    ],
    "to continue": [USER, ANSWER],
}


def by_transformers(text: str, chat: list[dict[str, Any]], **given: Any) -> str | None:
    """Return the text that transformers makes; None if it raises."""
    from transformers.utils.chat_template_utils import render_jinja_template

    continues = given.pop("continues", False)
    chat = [{name: value for name, value in message.items() if value is not None} for message in chat]
    try:
        rendered, _ = render_jinja_template(
            conversations=[chat], chat_template=text, continue_final_message=continues, **SPECIAL, **given
        )
    except Exception:
        return None
    return str(rendered[0])


def by_us(text: str, chat: list[dict[str, Any]], **given: Any) -> str | None:
    continues = given.pop("continues", False)
    try:
        return render(compile_template(text), {**SPECIAL, "messages": chat, **given}, continues=continues)
    except CannotRender:
        return None


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", BY_NAME)
def test_a_chat_has_the_text_that_transformers_gives_it(name: str, chat: str) -> None:
    made = []
    for tools in (None, TOOLS):
        for prompted in (True, False):
            for extra in ({}, {"enable_thinking": False}):
                given = {"tools": tools, "add_generation_prompt": prompted, **extra}
                made.append(by_us(BY_NAME[name], CHATS[chat], **given))
                assert made[-1] == by_transformers(BY_NAME[name], CHATS[chat], **given)
    assert any(made) or (name, chat) in {("mistral", "system"), ("gemma", "system"), ("gemma", "call")}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_message_to_continue_ends_where_transformers_ends_it(name: str) -> None:
    for content in ("Hi", "Hi there  ", "two\nlines", " Hello"):
        chat = [USER, {"role": "assistant", "content": content}]
        ours = by_us(BY_NAME[name], chat, tools=None, add_generation_prompt=False, continues=True)
        theirs = by_transformers(BY_NAME[name], chat, tools=None, add_generation_prompt=False, continues=True)
        assert ours == theirs is not None


SNIPPETS = [
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ {'b': '<é>', 'a': [1, none, true]} | tojson }}",
    "{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}",
    "{{ {'b': 'é'} | tojson(ensure_ascii=true, separators=(',', ':')) }}",
    "{{ strftime_now('%Y') }}",
    "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{{ messages[0].missing is defined }}{{ messages[0].missing }}{{ messages[0].missing.deeper }}",
    "{{ messages.append(1) }}",
    "{{ messages.__class__ }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ dict(a=1) | tojson }}{{ '%s' % 3 }}{{ 'x'.upper() | trim | length }}",
    "  {% if true %}\n  a\n  {% endif %}\n",
    "{{ documents }}{{ tools }}{{ bos_token }}{{ pad_token is defined }}",
    "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.thinking or '' }}{% endfor %}",
]


@pytest.mark.parametrize("text", SNIPPETS)
def test_a_template_can_use_what_transformers_gives_it(text: str) -> None:
    chat = [USER, ANSWER | {"reasoning": "Since."}]
    given = {"tools": None, "documents": None, "add_generation_prompt": True}
    assert by_us(text, chat, **given) == by_transformers(text, chat, **given)


# -- files --------------------------------------------------------------------------------------------------------


def write(folder: Path, **files: object) -> str:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("_dot_", ".")).write_text(text)
    return str(folder)


def test_a_template_is_read_from_where_models_have_it(tmp_path: Path) -> None:
    token = {"content": "<end>", "lstrip": False}
    source = write(tmp_path, tokenizer_config_dot_json={"chat_template": "a", "eos_token": token, "bos_token": "<s>"})
    assert load_templates(source) == TemplateSource({"default": "a"}, {"bos_token": "<s>", "eos_token": "<end>"})
    files = {"chat_template_dot_jinja": "b", "special_tokens_map_dot_json": {"bos_token": "?", "pad_token": "<pad>"}}
    write(tmp_path, tokenizer_dot_json={}, **files)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("c")
    found = load_templates(str(tmp_path / "tokenizer.json"))
    assert found.by_name == {"default": "b", "tool_use": "c"}
    assert found.special_tokens == {"bos_token": "<s>", "eos_token": "<end>", "pad_token": "<pad>"}
    own = tmp_path / "own.jinja"
    own.write_text("d")
    assert load_templates(source, template_file=own).by_name == {"default": "d"}
    assert load_templates(None) == load_templates(str(tmp_path / "on/another/machine")) == TemplateSource()


def test_named_templates_are_chosen_by_the_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    source = load_templates(write(tmp_path, tokenizer_config_dot_json={"chat_template": named}))
    assert (source.choose(has_tools=False), source.choose(has_tools=True)) == ("default", "tool_use")
    other = TemplateSource({"rag": "c"})
    with pytest.raises(TemplateRefused, match="rag"):
        other.choose(has_tools=True)
    with pytest.raises(TemplateRefused, match="--chat-template FILE"):
        TemplateSource().choose(has_tools=False)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config_dot_json": "{"}, "tokenizer_config.json"),
        ({"tokenizer_config_dot_json": "[]"}, "not a JSON object"),
        ({"tokenizer_config_dot_json": {"chat_template": [3]}}, "named templates"),
        ({"chat_template_dot_jinja": "x" * (templates.MAX_TEMPLATE_BYTES + 1)}, "at most"),
    ],
)
def test_files_that_can_not_be_read_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_templates(write(tmp_path, **files))


# -- the process that renders -------------------------------------------------------------------------------------

BOUNDLESS = """\
{% if n is defined %}{% for i in range(n) %}{% for j in range(n) %}{% for k in range(n) %}{% endfor %}{% endfor %}
{% endfor %}{% endif %}{% if size is defined %}{{ 'x' * size }}{% endif %}
{% if depth is defined %}{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}{% endif %}
ok {{ messages[0].content }}"""


async def in_process(source: TemplateSource, *chats: dict[str, Any]) -> list[str]:
    """Return a text, or the refusal, for each set of further values."""
    made = Templates(source)
    try:
        await made.start()
        results = []
        for further in chats:
            try:
                results.append(await made.render([USER], further=further))
            except TemplateRefused as error:
                results.append(f"refused: {error}")
        return results
    finally:
        await made.close()


@pytest.fixture
def short_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(templates, "RENDER_TIMEOUT_S", 1.0)
    return


def test_what_a_template_takes_is_bounded_and_the_next_chat_is_rendered(short_time: None) -> None:
    fine, endless, long, huge, deep, last = asyncio.run(
        in_process(
            TemplateSource({"default": BOUNDLESS}),
            *({}, {"n": 99_999}, {"size": 20_000_000}, {"size": 10**11}, {"depth": 1}, {}),
        )
    )
    assert fine == last
    assert fine.endswith("ok  Hello <b> ")
    assert "takes more than 1 s" in endless
    assert f"more than {rendering.MAX_TEXT_CHARS} characters" in long
    assert "too much memory or stack" in huge
    assert "too much memory or stack" in deep


def test_callers_that_go_away_leave_the_others_their_answers() -> None:
    async def run() -> list[str]:
        made = Templates(TemplateSource({"default": "{{ messages[0].content }}"}))
        try:
            tasks = [asyncio.create_task(made.render([{"role": "user", "content": f"{index}"}])) for index in range(40)]
            await asyncio.sleep(0)  # all of them have begun
            for task in tasks[::2]:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            return [str(each) for each in results[1::2]]
        finally:
            await made.close()

    assert asyncio.run(run()) == [str(index) for index in range(1, 40, 2)]


def test_slow_chats_of_a_tenant_do_not_hold_up_those_of_another_one(short_time: None) -> None:
    """CVE-2026-115911: chats that took long kept the thread that renders for all."""

    async def run() -> list[str]:
        made, ended = Templates(TemplateSource({"default": BOUNDLESS})), list[str]()

        async def ask(tenant: str, **further: Any) -> None:
            with contextlib.suppress(TemplateRefused):
                await made.render([USER], further=further, tenant=tenant)
            ended.append(tenant)

        try:
            await made.start()
            slow = [asyncio.create_task(ask("slow", n=99_999)) for _ in range(NUM_PROCESSES + 3)]
            await asyncio.sleep(0)  # all of them have begun
            await asyncio.gather(*slow, *(ask("quick") for _ in range(2)))
            return ended
        finally:
            await made.close()

    ends = asyncio.run(run())
    assert ends.index("quick") <= NUM_PROCESSES, "one has waited for those that had begun"
    assert ends[-1] == "slow"


def test_a_caller_that_goes_away_keeps_its_place_until_its_chat_is_rendered(short_time: None) -> None:
    """Else a tenant that goes and comes again would have any number of chats under way."""

    async def run() -> list[str]:
        made, ended = Templates(TemplateSource({"default": BOUNDLESS})), list[str]()

        async def ask(tenant: str, **further: Any) -> None:
            with contextlib.suppress(TemplateRefused):
                await made.render([USER], further=further, tenant=tenant)
            ended.append(tenant)

        try:
            await made.start()
            gone = [asyncio.create_task(ask("slow", n=99_999)) for _ in range(NUM_PROCESSES)]
            while made._idle:  # until both are being rendered
                await asyncio.sleep(0)
            for task in gone:
                task.cancel()
            await asyncio.gather(*gone, return_exceptions=True)
            again = [asyncio.create_task(ask("slow", n=99_999)) for _ in range(NUM_PROCESSES)]
            await asyncio.sleep(0)
            await asyncio.gather(*again, ask("quick"))
            return ended
        finally:
            await made.close()

    assert asyncio.run(run())[0] == "quick"


FORKED_IN_VAIN = """
import ctypes, uvloop
from quire.gateway.chat.templates import Templates, TemplateSource
libc = ctypes.CDLL(None)
getattr(libc, "__register_atfork")(None, None, ctypes.cast(libc.abort, ctypes.c_void_p), None)
async def main():
    made = Templates(TemplateSource({"default": "{{ messages[0].content }}"}))
    await made.start()
    print(await made.render([{"role": "user", "content": "rendered"}]))
    await made.close()
uvloop.run(main())
"""


def test_no_handler_of_a_fork_ends_the_process_at_its_start() -> None:
    """gRPC's handlers end some children of a process that makes calls; the handler here ends all of them."""
    done = subprocess.run([sys.executable, "-c", FORKED_IN_VAIN], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.stdout, done.returncode) == ("rendered\n", 0), done.stderr


def test_values_of_the_caller_come_before_special_tokens() -> None:
    source = TemplateSource({"default": "{{ bos_token }}"}, {"bos_token": "<s>"})
    assert asyncio.run(in_process(source, {}, {"bos_token": "!"})) == ["<s>", "!"]


@pytest.mark.parametrize("text", ["{{", "a\n{% for %}", "{% nothing %}"])
def test_a_template_that_can_not_be_compiled_is_an_error_at_the_start(text: str) -> None:
    with pytest.raises(ValueError, match="'default': line"):
        asyncio.run(in_process(TemplateSource({"default": text})))


@pytest.mark.parametrize(("text", "why"), [(LLAMA3, "single tool-calls"), (GEMMA, "alternate"), (MISTRAL, "9 letters")])
def test_what_a_template_raises_is_its_refusal(text: str, why: str) -> None:
    call = CALL | {"id": "x"}
    chat = [USER, {"role": "assistant", "tool_calls": [call, call]}] if text != GEMMA else [USER, USER]
    with pytest.raises(CannotRender, match=why):
        render(compile_template(text), {**SPECIAL, "messages": chat, "tools": None})


def test_the_published_styles_differ() -> None:
    texts = {by_us(text, [USER], tools=None, add_generation_prompt=True) for text in BY_NAME.values()}
    assert len(texts) == len({CHATML, LLAMA3, MISTRAL, GEMMA})
