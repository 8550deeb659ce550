"""A program of LlamaIndex: URL MODEL. It fails if an answer, a stream or a call of a tool is not whole."""

import sys
from typing import Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Place(BaseModel):
    """A place."""

    city: Literal["Rome", "Oslo"]


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"12 degrees in {city}"


def model(**fields: object) -> OpenAILike:
    """Return the model with what every request has."""
    every = {"model": MODEL, "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0, "context_window": 2048}
    return OpenAILike(**every, temperature=0, is_chat_model=True, is_function_calling_model=True, **fields)


HELLO = [ChatMessage(role="user", content="The weather?")]
short = model(max_tokens=8)
assert short.chat(HELLO).message.content
assert "".join(chunk.delta or "" for chunk in short.stream_chat(HELLO))
assert OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", max_tokens=8).complete("Once").text

tool = FunctionTool.from_defaults(weather)
called = model(max_tokens=200).predict_and_call([tool], user_msg="The weather?", tool_required=True)
assert str(called) in ("12 degrees in Rome", "12 degrees in Oslo"), called
place = model(max_tokens=200, should_use_structured_outputs=True).as_structured_llm(Place).chat(HELLO).raw
assert isinstance(place, Place)
place = model(max_tokens=200).as_structured_llm(Place).chat(HELLO).raw
assert isinstance(place, Place)
print("done")
