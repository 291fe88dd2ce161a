"""A small OpenAI-compatible server over transformers' assisted generation: one request at a time, in order of arrival.

Each verification's tokens are sent as one event with the count so far, so that a client counts them exactly.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HALF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
LIVES_S = 600.0
"""A connection that asks for nothing for so long is closed."""


class Generator:
    """Target and draft. dtype: of torch, by name."""

    def __init__(self, target: str, draft: str, *, dtype: str, device: str, draft_tokens: int):
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        self._torch = torch
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        kind = getattr(torch, dtype)
        self._target, self._draft = (load(name, dtype=kind).to(device).eval() for name in (target, draft))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(target)
        settings = self._draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = draft_tokens, "constant"
        settings.assistant_confidence_threshold = 0.0
        self.max_context = int(self._target.config.max_position_embeddings)

    def encode(self, body: dict[str, Any]) -> list[int]:
        if "messages" not in body:
            prompt = body["prompt"]
            return prompt if isinstance(prompt, list) else self.tokenizer(prompt)["input_ids"]
        text = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(self, prompt: list[int], body: dict[str, Any], streamer: Streamer) -> None:
        """streamer: is given the prompt, then the tokens of each verification."""
        torch, temperature = self._torch, float(body.get("temperature", 1.0))
        options: dict[str, Any] = {"max_new_tokens": int(body.get("max_tokens", 16)), "do_sample": temperature > 0}
        if temperature > 0:
            options |= {"temperature": temperature, "top_k": 0, "top_p": float(body.get("top_p", 1.0))}
        if body.get("ignore_eos"):
            options["eos_token_id"] = None
        if body.get("seed") is not None:
            torch.manual_seed(int(body["seed"]))
        ids = torch.tensor([prompt], device=self._target.device)
        with torch.inference_mode():
            self._target.generate(
                ids, attention_mask=torch.ones_like(ids), assistant_model=self._draft, streamer=streamer, **options
            )


class Streamer:
    """Turns tokens into events. send: raises OSError when the client has gone, which ends the generation."""

    def __init__(self, decode: Callable[[list[int]], str], send: Callable[[str, int], None]):
        self._decode, self._send = decode, send
        self._tokens: list[int] = []
        self._told = 0
        self._seen_prompt = False

    @property
    def count(self) -> int:
        return len(self._tokens)

    def put(self, value: Any) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
            return
        self._tokens += value.flatten().tolist()
        text = self._decode(self._tokens)
        if text.endswith(HALF_A_CHARACTER):
            text = text[: self._told]
        self._send(text[self._told :], self.count)
        self._told = len(text)

    def end(self) -> None:
        """Nothing is held back."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout = LIVES_S
    generator: Generator
    name: str
    turns: ThreadPoolExecutor

    def do_GET(self) -> None:
        if self.path == "/health":
            return self._whole(200, {"status": "ok"})
        if self.path == "/v1/models":
            card = {"id": self.name, "object": "model", "owned_by": "transformers",
                    "max_model_len": self.generator.max_context}  # fmt: skip
            return self._whole(200, {"object": "list", "data": [card]})
        return self._refuse(404, f"no such path: {self.path}")

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self._refuse(404, f"no such path: {self.path}")
        try:
            body = json.loads(content)
            if not body.get("stream"):
                return self._refuse(400, "stream must be true: this server streams only")
            prompt = self.generator.encode(body)
            wanted = len(prompt) + int(body.get("max_tokens", 16))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return self._refuse(400, f"expected a request for a completion, got {type(error).__name__}: {error}")
        if wanted > self.generator.max_context:
            return self._refuse(400, f"prompt and max_tokens are {wanted} tokens, of {self.generator.max_context}")
        return self.turns.submit(self._answer, prompt, body).result()

    def _answer(self, prompt: list[int], body: dict[str, Any]) -> None:
        """Runs when it is this request's turn."""
        chat = "messages" in body

        def send(text: str, count: int, reason: str | None = None) -> None:
            said = {"delta": {"content": text}} if chat else {"text": text}
            usage = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
            choice = {"index": 0, **said, "finish_reason": reason}
            self._chunk(b"data: " + json.dumps({"model": self.name, "choices": [choice], "usage": usage}).encode())

        if self._gone():
            self.close_connection = True
            return
        streamer = Streamer(lambda tokens: self.generator.tokenizer.decode(tokens, skip_special_tokens=True), send)
        try:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.generator.generate(prompt, body, streamer)
            send("", streamer.count, "length" if streamer.count >= int(body.get("max_tokens", 16)) else "stop")
            self._chunk(b"data: [DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the client has gone: there is nobody to tell
            self.close_connection = True

    def _chunk(self, line: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\n\n\r\n" % (len(line) + 2, line))
        self.wfile.flush()

    def _gone(self) -> bool:
        """The client closed the connection while the request waited."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _whole(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, message: str) -> None:
        self._whole(status, {"error": {"message": message, "code": status}})

    def log_message(self, format: str, *args: Any) -> None:
        """Only what failed is of interest."""
        if not str(args[1] if len(args) > 1 else "").startswith("2"):
            print(time.strftime("%H:%M:%S"), format % args, file=sys.stderr)


def serve(generator: Generator, name: str, host: str, port: int) -> ThreadingHTTPServer:
    """A server that is bound. It serves when `serve_forever` is called."""
    bound = type("Bound", (Handler,), {"generator": generator, "name": name, "turns": ThreadPoolExecutor(1)})
    server = ThreadingHTTPServer((host, port), bound)
    server.daemon_threads = True
    return server


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("target")
    made.add_argument("draft")
    made.add_argument("--name", help="of the model, for clients; without, the target's folder's")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, required=True)
    made.add_argument("--dtype", default="float32")
    made.add_argument("--device", default="cpu")
    made.add_argument("--draft-tokens", type=int, default=4)
    given = made.parse_args()
    generator = Generator(
        given.target, given.draft, dtype=given.dtype, device=given.device, draft_tokens=given.draft_tokens
    )
    serve(generator, given.name or Path(given.target).name, given.host, given.port).serve_forever()


if __name__ == "__main__":
    main()
