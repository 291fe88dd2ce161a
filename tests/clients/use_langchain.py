"""What langchain-openai's chat model reports of the server: a stream, tools, JSON. URL -> one line of JSON."""

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Rome", "Oslo"]
    sky: Literal["clear", "grey"]


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """Return the weather of a city."""
    return f"warm in {city}"


model = ChatOpenAI(model="demo", base_url=f"{sys.argv[1]}/v1", api_key="unused", seed=5, max_tokens=120, max_retries=0)  # pyright: ignore
question = HumanMessage("How is the weather?")
pieces = list(model.stream([question]))
called = model.bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False).invoke([question])
results = [ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
last = model.bind_tools([get_weather], tool_choice="none").invoke([question, called, *results])
found = {
    method: model.with_structured_output(Weather, method=method).invoke([question]).model_dump()
    for method in ("json_schema", "function_calling")
}
print(json.dumps({
    "text": model.invoke([question]).content,
    "streamed": "".join(str(piece.content) for piece in pieces),
    "calls": [[call["name"], call["args"]] for call in called.tool_calls],
    "invalid": called.invalid_tool_calls,
    "results": [result.content for result in results],
    "last": last.content,
    "structured": found,
}))  # fmt: skip
