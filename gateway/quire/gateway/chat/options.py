"""The operator's choices for chats. It imports no template engine: `quire up` reads the flags of a gateway. Pure."""

from dataclasses import dataclass
from pathlib import Path

from quire.gateway.chat.tools.formats import ReasoningFormat
from quire.gateway.chat.tools.tool_format import ToolFormat


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The operator's choices.

    template_file            a template in place of the model's own; None: its own
    tools                    the format of calls; None: as the template writes them
    reasoning                the format of reasoning; None: as the template has it
    has_reasoning            False: answers are read without reasoning
    special_tokens_in_content    special tokens that callers write into messages are special tokens
    """

    template_file: Path | None = None
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    has_reasoning: bool = True
    special_tokens_in_content: bool = False


AS_THE_TEMPLATE_HAS_IT = ChatOptions()
