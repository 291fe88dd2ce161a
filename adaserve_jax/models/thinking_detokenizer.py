"""Turns the tokens of one running sequence into two texts: what it thinks between its marks, and its answer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from adaserve_jax.models.detokenizer import Decodes, IncrementalDetokenizer
from adaserve_jax.sampling import ANSWERING, BEFORE_THINKING, Thinking


class ThinkingDetokenizer:
    """Texts of one sequence, thought and answer, each by its own detokenizer: no stop string goes across a mark.

    reasoning, reasoning_tokens: what was thought and not yet taken.
    """

    def __init__(
        self, tokenizer: Decodes, answer_tokenizer: Decodes, prompt_ids: Sequence[int], stop: tuple[str, ...],
        thinking: Thinking,
    ):  # fmt: skip
        """Start after a prompt. answer_tokenizer: may show special tokens that the thought does not."""
        self.reasoning = ""
        self.reasoning_tokens = 0
        self._thinking = thinking
        self._state = thinking.state
        before = prompt_ids if thinking.started else (thinking.opening,)
        self._thought = IncrementalDetokenizer(tokenizer, before, stop)
        self._answer_after = partial(IncrementalDetokenizer, answer_tokenizer, stop=stop)
        self._answer = self._answer_after(prompt_ids)
        self._blank = ""

    def push(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """Add tokens, as `IncrementalDetokenizer.push` does; the text is the answer's. What was thought is added to
        `reasoning`."""
        shown, place = "", 0
        while place < len(token_ids):
            rest = token_ids[place:]
            if self._state == ANSWERING:
                text, kept = self._answer.push(rest)
                return shown + text, None if kept is None else place + kept
            if self._state >= 0:
                count, kept = self._think(rest)
            else:
                text, count, kept = self._begin(rest[0])
                shown += text
            if kept is not None:
                return shown, place + kept
            place += count
        return shown, None

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended thought or answer."""
        return (self._answer if self._state == ANSWERING else self._thought).stopped_by

    def take(self) -> tuple[str, int]:
        """Return `reasoning` and `reasoning_tokens`, and forget them."""
        taken = self.reasoning, self.reasoning_tokens
        self.reasoning, self.reasoning_tokens = "", 0
        return taken

    def finish(self) -> str:
        """End the text. Return the answer's text held back, and add that of the thought to `reasoning`."""
        if self._state >= 0:
            self.reasoning += self._thought.finish()
            return ""
        return self._blank + self._answer.finish()

    def _think(self, token_ids: Sequence[int]) -> tuple[int, int | None]:
        """Add thought tokens up to the closing mark. Return how many tokens were read, and how many a stop string
        keeps."""
        found = next((at for at, token in enumerate(token_ids) if token == self._thinking.closing), None)
        text, kept = self._thought.push(token_ids[:found])
        self.reasoning += text
        thought = len(token_ids[:found]) if kept is None else kept
        self.reasoning_tokens += thought
        self._state += thought
        if found is None or kept is not None:
            return len(token_ids), kept
        self.reasoning += self._thought.finish()
        self._state, self._answer = ANSWERING, self._answer_after((self._thinking.closing,))
        return found + 1, None

    def _begin(self, token: int) -> tuple[str, int, int | None]:
        """Read a token before which nothing was thought. Return text of the answer, how many tokens were read, and how
        many a stop string keeps."""
        self._state = self._thinking.after(BEFORE_THINKING, token)
        if self._state == BEFORE_THINKING:
            text, kept = self._answer.push((token,))
            self._blank += text
            return "", 1, kept
        blank, self._blank = self._blank, ""
        if self._state == ANSWERING:
            return blank, 0, None  # the token is left to the answer
        return "", 1, None
