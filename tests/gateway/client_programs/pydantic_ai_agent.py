"""A program of pydantic-ai: URL MODEL. It fails if an answer, a stream, structured output or a tool is not whole."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = sys.argv[1:]
PROVIDER = OpenAIProvider(base_url=f"{URL}/v1", api_key="none")


class Place(BaseModel):
    """A place."""

    city: Literal["Rome", "Oslo"]


async def streamed(agent: Agent) -> str:
    """Return the text of a stream."""
    async with agent.run_stream("The weather?") as answer:
        return "".join([text async for text in answer.stream_text(delta=True, debounce_by=None)])


for kind in (OpenAIChatModel, OpenAIResponsesModel):
    chat = kind(MODEL, provider=PROVIDER)
    short = Agent(chat, instructions="Be brief.", model_settings={"max_tokens": 8, "temperature": 0})
    said = short.run_sync("The weather?")
    assert said.output
    assert said.usage.output_tokens == 8
    assert asyncio.run(streamed(short))
    for output in (NativeOutput(Place), ToolOutput(Place)):
        typed = Agent(chat, output_type=output, model_settings={"max_tokens": 200, "temperature": 0}, retries=0)
        assert isinstance(typed.run_sync("The weather?").output, Place), (kind, output)
print("done")
