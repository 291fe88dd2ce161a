"""From tokens to text: one detokeniser per running choice, stop strings, and the chunks that clients receive.

Imports no jax. The scheduler asks it, as `types.StopCheck`, where a text ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from adaserve_jax.engine.client import OutputChunk
from adaserve_jax.models.detokenizer import Decodes, IncrementalDetokenizer
from adaserve_jax.types import Request, RequestUpdate


@dataclass
class _Choice:
    request_id: str
    index: int
    detokenizer: IncrementalDetokenizer
    text: str = ""


class OutputTracker:
    """Text state of all choices in flight, by the scheduler's request id."""

    def __init__(self, tokenizer: Decodes):
        self._tokenizer = tokenizer
        self._choices: dict[str, _Choice] = {}

    def __len__(self) -> int:
        return len(self._choices)

    def add(self, client_id: str, request: Request) -> None:
        """Follow one choice. client_id: the id that the client gave the whole request."""
        prompt = request.prompt_ids.tolist()
        detokenizer = IncrementalDetokenizer(self._tokenizer, prompt, request.sampling.stop)
        self._choices[request.request_id] = _Choice(client_id, request.choice, detokenizer)

    def discard(self, request_id: str) -> None:
        self._choices.pop(request_id, None)

    def stop_check(self, request_id: str, token_ids: Sequence[int]) -> int | None:
        """Take in new tokens; how many to keep when a stop string ended the text, else None."""
        choice = self._choices[request_id]
        shown, kept = choice.detokenizer.push(token_ids)
        choice.text += shown
        return kept

    def chunk(self, update: RequestUpdate) -> OutputChunk:
        """The chunk of one update; forgets the choice when it ended."""
        choice = self._choices[update.request_id]
        if update.finish_reason is not None:
            del self._choices[update.request_id]
            choice.text += choice.detokenizer.finish()
        text, choice.text = choice.text, ""
        return OutputChunk(
            choice.request_id,
            choice.index,
            text,
            list(update.token_ids),
            update.finish_reason,
            update.metrics,
            logprobs=list(update.logprobs),
        )
