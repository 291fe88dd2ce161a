"""Turns the tokens of one running sequence into text, piece by piece.

A character whose bytes are spread over tokens appears when it is complete; stop strings and parts of them never appear.
Tokens are decoded after a few tokens of context, since some decoders treat the first token of a text differently. Each
call decodes only the context and the text not yet shown, so that work per token does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A cut character is at most three bytes, and each of them may show as one U+FFFD.
_MOST_UNFINISHED = 3
_LONG_WINDOW = 8
MOST_CONTEXT = 8
"""Last tokens of a prompt that the text after it depends on."""


class Decodes(Protocol):
    """The part of a tokenizer that detokenization uses."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def has_text(self, token_id: int) -> bool: ...


@dataclass(frozen=True)
class _Window:
    """The end of a text. context: tokens shown in full, whose text is context_text. pending: later tokens, not shown in
    full. shown: number of characters shown of pending's text. tail: the rest of it."""

    context: tuple[int, ...] = ()
    context_text: str = ""
    pending: tuple[int, ...] = ()
    shown: int = 0
    tail: str = ""


class IncrementalDetokenizer:
    """Text of one sequence."""

    def __init__(self, tokenizer: Decodes, prompt_ids: Sequence[int], stop: tuple[str, ...] = ()):
        """Start after a prompt. stop: strings that end the text."""
        self.stopped_by: str | None = None
        """The stop string that ended the text."""
        self._tokenizer = tokenizer
        self._window = self._after(prompt_ids)
        self._stop = stop
        self._held = ""
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """Add tokens. Return the text to show now, and how many of these tokens to keep if a stop string ended it.

        The second value is None while no stop string is complete. After the end, returns ("", 0).
        """
        if self._ended:
            return "", 0
        before = self._window
        self._window, text = self._advance(before, token_ids)
        shown, stopped_at = self._show(text)
        if stopped_at is None:
            return shown, None
        return shown, self._tokens_for(before, token_ids, stopped_at)

    def finish(self) -> str:
        """End the text. Return the text held back: a cut character as U+FFFD, or the beginning of a stop string."""
        if self._ended:
            return ""
        shown, stopped_at = self._show(self._window.tail)
        self._ended = True
        return shown if stopped_at is not None else shown + self._held

    def _after(self, prompt_ids: Sequence[int]) -> _Window:
        """Return the window after a prompt: its last tokens that are whole characters; empty after a special token."""
        context: tuple[int, ...] = ()
        for token in reversed(prompt_ids[-MOST_CONTEXT:]):
            if not self._tokenizer.has_text(token):
                break
            context = (int(token), *context)
            text = self._tokenizer.decode(context)
            if text and _REPLACEMENT not in text:
                return _Window(context, text)
        return _Window()

    def _advance(self, window: _Window, token_ids: Sequence[int]) -> tuple[_Window, str]:
        """Return the window after more tokens, and the text that is final now, however the tokens are grouped."""
        added = tuple(int(token) for token in token_ids if self._tokenizer.has_text(token))
        if not added:
            return window, ""
        pending = window.pending + added
        text = self._tokenizer.decode(window.context + pending)
        if text.startswith(window.context_text):
            text = text[len(window.context_text) :]
        else:  # the decoder took back the text of a run of byte tokens that is no UTF-8 as a whole
            text = self._tokenizer.decode(pending)
        if len(added) > 1 and _REPLACEMENT in text:
            return self._advance_singly(window, added)
        unfinished = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MOST_UNFINISHED)
        certain = max(len(text) - unfinished, window.shown)
        if text and not unfinished:
            return _Window(pending, self._tokenizer.decode(pending)), text[window.shown :]
        longer = _Window(window.context, window.context_text, pending, certain, text[certain:])
        return self._shortened(longer, text), text[window.shown : certain]

    def _advance_singly(self, window: _Window, token_ids: tuple[int, ...]) -> tuple[_Window, str]:
        """Advance one token at a time: some decoders drop a whole run of bytes when its last character is cut."""
        pieces = []
        for token in token_ids:
            window, piece = self._advance(window, (token,))
            pieces.append(piece)
        return window, "".join(pieces)

    def _shortened(self, window: _Window, text: str) -> _Window:
        """Make the oldest pending tokens context if many wait, as in a long run of bytes that are no UTF-8."""
        if len(window.pending) < _LONG_WINDOW:
            return window
        cut = len(window.pending) - _MOST_UNFINISHED - 1
        head, rest = window.pending[:cut], window.pending[cut:]
        head_text = self._tokenizer.decode(head)
        if head_text + self._tokenizer.decode(rest) != text or len(head_text) > window.shown:
            return window  # the cut falls inside a character; another will not
        return _Window(head, head_text, rest, window.shown - len(head_text), window.tail)

    def _show(self, text: str) -> tuple[str, int | None]:
        """Return the text to show once `text` is final, and how many of its characters end a stop string."""
        if not self._stop:
            return text, None
        before, whole = len(self._held), self._held + text
        found = _first_stop(whole, self._stop)
        if found is not None:
            end, start, self.stopped_by = found
            self._ended, self._held = True, ""
            return whole[:start], end - before
        split = len(whole) - _begun_stop(whole, self._stop)
        self._held = whole[split:]
        return whole[:split], None

    def _tokens_for(self, before: _Window, token_ids: Sequence[int], characters: int) -> int:
        """Return the fewest tokens that make so many characters final."""
        for count in range(1, len(token_ids)):
            if len(self._advance(before, token_ids[:count])[1]) >= characters:
                return count
        return len(token_ids)


def _first_stop(text: str, stop: tuple[str, ...]) -> tuple[int, int, str] | None:
    """Return end, start and text of the stop string that completes first; of several that complete together, the
    longest."""
    return min(((start + len(one), start, one) for one in stop if (start := text.find(one)) >= 0), default=None)


def _begun_stop(text: str, stop: tuple[str, ...]) -> int:
    """Return the length of the longest end of a text that begins a stop string; none is complete in it."""
    longest = 0
    for one in stop:
        at = text.find(one[0], max(0, len(text) - len(one) + 1))
        while at >= 0 and not one.startswith(text[at:]):
            at = text.find(one[0], at + 1)
        longest = max(longest, len(text) - at if at >= 0 else 0)
    return longest
