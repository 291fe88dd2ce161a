"""What litellm's client reports of the server: texts, a stream, a tool call, tokens. URL -> one line of JSON."""

import json
import sys
from typing import Any

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "required": ["city"], "properties": {"city": {"enum": ["Rome", "Oslo"]}}},
    },
}
MESSAGES = [{"role": "user", "content": "How is the weather?"}]
ASK: dict[str, Any] = {
    "model": "openai/demo", "api_base": f"{sys.argv[1]}/v1", "api_key": "unused", "messages": MESSAGES, "seed": 3,
    "max_tokens": 60, "num_retries": 0,
}  # fmt: skip

whole = litellm.completion(**ASK)
chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
built = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
called = litellm.completion(**ASK, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": TOOL["function"]["parameters"]}}
shaped = litellm.completion(**ASK, response_format=form)
plain = litellm.text_completion(**{key: value for key, value in ASK.items() if key != "messages"}, prompt="def add(")
try:
    litellm.completion(**ASK | {"temperature": -1})
    refused = ""
except litellm.BadRequestError as error:
    refused = str(error)
print(json.dumps({
    "text": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "streamed": built.choices[0].message.content,
    "streamed_tokens": built.usage.completion_tokens,
    "calls": [[c.function.name, json.loads(c.function.arguments)] for c in called.choices[0].message.tool_calls],
    "shaped": json.loads(shaped.choices[0].message.content),
    "plain": plain.choices[0].text,
    "refused": refused,
}))  # fmt: skip
