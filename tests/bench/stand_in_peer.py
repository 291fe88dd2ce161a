"""A peer for tests, run as a program: benchmarks/peers/assisted_server.py over a generator without a model.

Usage: stand_in_peer.py BENCHMARKS_FOLDER --port N. Each verification brings two tokens, of a character each.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PACE_S, MAX_CONTEXT = 0.004, 4096


class Tokenizer:
    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


class PacedGenerator:
    """Repeats the prompt, a token a character."""

    tokenizer, max_context = Tokenizer(), MAX_CONTEXT

    def encode(self, body: dict[str, Any]) -> list[int]:
        prompt = body["prompt"]
        return prompt if isinstance(prompt, list) else [ord(each) for each in prompt]

    def generate(self, prompt: list[int], body: dict[str, Any], streamer: Any) -> None:
        streamer.put(np.array(prompt))
        left = int(body["max_tokens"])
        while left:
            time.sleep(PACE_S)
            streamer.put(np.array((prompt * 2)[: min(2, left)]))
            left -= min(2, left)
        streamer.end()


def main(folder: str, port: int) -> None:
    sys.path.insert(0, str(Path(folder).parents[1]))
    from benchmarks.peers import assisted_server  # pyright: ignore[reportMissingImports]

    assisted_server.serve(PacedGenerator(), "stand-in", "127.0.0.1", port).serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[3]))
