"""Ends of prefixes to keep: their places in what real templates make of a conversation."""

from typing import Any

import pytest
from gateway.chat_templates import BY_NAME, CHATML, LLAMA3, MISTRAL

from quire.gateway.chat.prefix_ends import BehindAll, BehindTool, InMessage, Place, PrefixEnd
from quire.gateway.chat.rendering import CannotRender, compile_template, render
from quire.gateway.chat.stand_ins import StandIns

NOWHERE = "nowhere"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


MESSAGES = [
    {"role": "system", "content": "You are kind.\nYou are brief."},
    {"role": "user", "content": "First question?  "},
    {"role": "assistant", "content": "An answer."},
    {"role": "user", "content": "one\ntwo\nthree"},
]


def rendered(text: str, messages: list[dict[str, Any]], tools: Any = ()) -> str:
    values = {"messages": messages, "tools": list(tools) or None, "add_generation_prompt": True, **SPECIAL}
    return render(compile_template(text), values)


def prefixes(text: str, *places: Place, messages: Any = MESSAGES, tools: Any = ()) -> list[str]:
    """Return the prompt before each place; NOWHERE if it has none."""
    stand_ins = StandIns([PrefixEnd(f"p{index}", place, 60.0) for index, place in enumerate(places)])
    whole = rendered(text, messages, tools)
    found = stand_ins.places_in(whole, rendered(text, *stand_ins.put(messages, tools)))
    return [NOWHERE if place is None else whole[:place] for place in found]


@pytest.mark.parametrize("text", [CHATML, LLAMA3], ids=["chatml", "llama3"])
def test_a_prefix_ends_where_its_part_ends(text: str) -> None:
    system, first, part, last, end = prefixes(
        text,
        InMessage(0, 13),
        InMessage(1, len(MESSAGES[1]["content"])),
        InMessage(3, 3),
        InMessage(3, 13),
        BehindAll(),
    )
    assert system.endswith("You are kind.")
    assert first.endswith("First question?"), "a template may strip the spaces"
    assert part.endswith("one")
    assert last.endswith("one\ntwo\nthree")
    assert end == rendered(text, MESSAGES)
    assert all(end.startswith(each) for each in (system, first, part, last))


@pytest.mark.parametrize("content", ["First question?  ", "  First question?", "First question?"])
def test_ends_among_the_same_spaces_are_all_found(content: str) -> None:
    """The second stand-in was put into the first one, and the end of that was told to be unplaced."""
    messages = [MESSAGES[0], {"role": "user", "content": content}, *MESSAGES[2:]]
    num_chars = len(content)
    behind = prefixes(CHATML, *(InMessage(1, num_chars - less) for less in (0, 0, 1)), messages=messages)
    before = prefixes(CHATML, InMessage(0), InMessage(1, 0), InMessage(1, 1), messages=messages)
    assert NOWHERE not in behind + before
    assert behind[0] == behind[1] == rendered(CHATML, messages).partition("question?")[0] + "question?"
    assert before[0] == before[1]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_what_is_found_is_a_prefix_that_other_text_behind_it_does_not_change(name: str) -> None:
    """For any template: two conversations that are equal up to the end have this prefix in common."""
    text, place = BY_NAME[name], InMessage(1, len(MESSAGES[1]["content"]))
    others = [*MESSAGES[:2], {"role": "assistant", "content": "Other."}, {"role": "user", "content": "x"}]
    try:
        [one], [other] = prefixes(text, place), prefixes(text, place, messages=others)
    except CannotRender:
        others, messages = others[1:], MESSAGES[1:]
        place = InMessage(0, len(messages[0]["content"]))
        [one], [other] = prefixes(text, place, messages=messages), prefixes(text, place, messages=others)
    assert one == other
    assert one != NOWHERE


def test_a_prefix_of_tools_ends_before_the_next_tool() -> None:
    tools = [tool("weather"), tool("news"), tool("time")]
    first, second, last = prefixes(CHATML, BehindTool(0), BehindTool(1), BehindTool(2), tools=tools)
    assert '"weather"' in first
    assert '"news"' not in first
    assert '"news"' in second
    assert '"time"' not in second
    assert '"time"' in last
    assert "First question" not in last


def test_a_template_that_does_not_keep_a_prefix_ends_it_early() -> None:
    """Mistral's writes the tools before the last question: with another question they are elsewhere."""
    [behind] = prefixes(MISTRAL, BehindTool(0), messages=MESSAGES[1:], tools=[tool("weather")])
    assert '"weather"' not in behind


def test_a_part_that_a_template_leaves_out_has_no_place() -> None:
    assert prefixes("{{ messages[-1]['content'] }}", InMessage(1, 3)) == [NOWHERE]


def test_a_change_of_the_template_by_the_stand_in_ends_all_prefixes_behind_it() -> None:
    text = "{% for m in messages %}{{ m['content'] | length }}:{{ m['content'] }};{% endfor %}"
    early, late = prefixes(text, InMessage(0, 13), InMessage(3, 13))
    assert early == late == ""


def test_two_ends_at_one_place_and_a_text_that_looks_like_a_stand_in() -> None:
    messages = [{"role": "user", "content": "0123456789abcdefy0y"}]
    one, other = prefixes("{{ messages[0]['content'] }}!", InMessage(0, 5), InMessage(0, 5), messages=messages)
    assert one == other == "01234"


def test_behind_a_call_is_before_the_next_content() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "12 degrees"},
    ]
    [behind] = prefixes(CHATML, InMessage(1), messages=messages, tools=[tool("weather")])
    assert "Ulm" in behind
    assert "12 degrees" not in behind
