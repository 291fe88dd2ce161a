"""A conversation in which the model calls a function, gets its result, and answers; streams the arguments.

Start a server (`make serve`), then:

    python examples/tool_client.py --base-url http://127.0.0.1:8000/v1

Needs `pip install openai`. `--choice required` makes a model call that would rather talk, as the embedded pair would.
"""

from __future__ import annotations

import argparse
import json
import os

import openai

WEATHER = {"Rome": "sunny", "Oslo": "snow"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tell the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": list(WEATHER)},
                    "days": {"type": "integer", "minimum": 1, "maximum": 7},
                },
                "required": ["city", "days"],
            },
        },
    }
]


def get_weather(city: str, days: int) -> str:
    """Do what the tool says."""
    return f"{WEATHER[city]} for {days} days"


def ask(client: openai.OpenAI, model: str, messages: list[dict], choice: str) -> dict:
    """Stream one answer, print it as it comes, and return it as a message of the conversation."""
    message: dict = {"role": "assistant", "content": ""}
    calls: list[dict] = []
    stream = client.chat.completions.create(
        model=model, messages=messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=96,
        stream=True,
    )  # fmt: skip
    for event in stream:
        delta = event.choices[0].delta
        message["content"] += delta.content or ""
        print(delta.content or "", end="")
        for piece in delta.tool_calls or []:
            if piece.index == len(calls):
                calls.append({"id": piece.id, "type": "function", "function": {"name": "", "arguments": ""}})
                print(f"call of {piece.function.name}: ", end="")
            function = calls[piece.index]["function"]
            function["name"] += piece.function.name or ""
            function["arguments"] += piece.function.arguments or ""
            print(piece.function.arguments or "", end="", flush=True)
    print()
    return message | ({"tool_calls": calls} if calls else {})


def main() -> None:
    """Run the conversation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--choice", default="required", choices=("auto", "required"))
    chosen = parser.parse_args()
    with openai.OpenAI(base_url=chosen.base_url, api_key=os.environ.get("ADASERVE_API_KEY", "none")) as client:
        model = client.models.list().data[0].id
        messages: list[dict] = [{"role": "user", "content": "How will the weather be in Oslo?"}]
        messages.append(ask(client, model, messages, chosen.choice))
        for call in messages[-1].get("tool_calls", []):
            result = get_weather(**json.loads(call["function"]["arguments"]))
            print(f"result: {result}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if messages[-1]["role"] == "tool":
            ask(client, model, messages, "none")


if __name__ == "__main__":
    main()
