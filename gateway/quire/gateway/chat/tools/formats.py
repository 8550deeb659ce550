"""All formats by name, and those that a chat template writes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from quire.gateway.chat.tools.deepseek import DeepSeekV3, DeepSeekV31
from quire.gateway.chat.tools.events import Tool
from quire.gateway.chat.tools.glm import Glm
from quire.gateway.chat.tools.harmony import Harmony
from quire.gateway.chat.tools.hermes import Hermes
from quire.gateway.chat.tools.kimi import Kimi
from quire.gateway.chat.tools.llama3 import Llama3
from quire.gateway.chat.tools.mistral import MistralArgs, MistralList
from quire.gateway.chat.tools.pythonic import Pythonic
from quire.gateway.chat.tools.qwen3_coder import Qwen3Coder
from quire.gateway.chat.tools.thinking import MISTRAL_THINK, THINK, ThinkTags
from quire.gateway.chat.tools.tool_format import ToolFormat

HARMONY = Harmony()
_FORMATS = (
    *(Hermes(), Llama3(), MistralList(), MistralArgs(), Qwen3Coder(), Glm()),
    *(DeepSeekV3(), DeepSeekV31(), Kimi(), Pythonic(), HARMONY),
)
TOOL_FORMATS: Mapping[str, ToolFormat] = {each.name: each for each in _FORMATS}
"""By the name that `--tool-parser` gives them."""

ReasoningFormat = ThinkTags | Harmony
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {each.name: each for each in (THINK, MISTRAL_THINK, HARMONY)}
"""By the name that `--reasoning-parser` gives them."""

# A call that a template is asked to show.
PROBE = Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]})
PROBE_ARGUMENTS: Mapping[str, Any] = {"city": "Rome"}


def find_tool_format(prompt: str, answer: str) -> ToolFormat | None:
    """Return the format of a chat template; None if it is not known.

    prompt   a prompt that offers PROBE
    answer   the call of PROBE with PROBE_ARGUMENTS, as the template shows it in a chat
    """
    asked = (each for each in _FORMATS if each.instruction and each.instruction in prompt)
    shown = (each for each in _FORMATS if each.reads(answer, PROBE, PROBE_ARGUMENTS))
    return next(chain(asked, shown), None)


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """Return the format of reasoning that a chat template's text knows; None if it knows none."""
    if "<|channel|>" in template:
        return HARMONY
    return next((each for each in (THINK, MISTRAL_THINK) if each.is_in(template)), None)
