"""Turns the tokens of one running request into text, piece by piece. Imports no jax.

A character whose bytes are spread over tokens appears when it is whole; a stop string never appears, nor a part of it.
Tokens are decoded behind a few tokens of context (some decoders treat the first token of a text differently), and each
call decodes only the context and what is not yet shown, so that the work per token does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# Finds stop strings in text that arrives in pieces, in one pass (Knuth-Morris-Pratt). Imports no jax.


class StopMatcher:
    """Follows one text. The stop string that completes first wins; of several that complete together, the longest.

    Work is constant per character and stop string, whatever the text.
    """

    def __init__(self, stop: tuple[str, ...]):
        self._stop = stop
        self._borders = [_borders(pattern) for pattern in stop]
        self._matched = [0] * len(stop)

    @property
    def held(self) -> int:
        """Characters at the end of the text so far that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> tuple[int, int] | None:
        """Take in the next piece. Returns (characters of it up to the end of the stop string, the stop string's
        length) once one is complete, and must not be fed again; else None."""
        for end, char in enumerate(text, start=1):
            done = 0
            for index, pattern in enumerate(self._stop):
                borders, matched = self._borders[index], self._matched[index]
                while matched and pattern[matched] != char:
                    matched = borders[matched]
                matched += pattern[matched] == char
                self._matched[index] = matched
                if matched == len(pattern):
                    done = max(done, matched)
            if done:
                return end, done
        return None


def _borders(pattern: str) -> list[int]:
    """borders[n]: length of the longest proper prefix of pattern[:n] that is also its suffix."""
    borders = [0, 0]
    for char in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != char:
            length = borders[length]
        borders.append(length + (pattern[length] == char))
    return borders


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A cut character is at most three bytes, and each of them may show as one U+FFFD.
_MOST_UNFINISHED = 3
_LONG_WINDOW = 8
_MOST_CONTEXT = 8


class Decodes(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def has_text(self, token_id: int) -> bool: ...


@dataclass(frozen=True)
class _Window:
    """The end of a text. context: tokens shown in full, whose text is context_text. pending: tokens after them, not
    shown in full. shown: characters of pending's text that were shown. tail: the others."""

    context: tuple[int, ...] = ()
    context_text: str = ""
    pending: tuple[int, ...] = ()
    shown: int = 0
    tail: str = ""


class IncrementalDetokenizer:
    """The text of one choice. prompt_ids: the prompt, so that text continues it. stop: strings that end the text."""

    def __init__(self, tokenizer: Decodes, prompt_ids: Sequence[int], stop: tuple[str, ...] = ()):
        self._tokenizer = tokenizer
        self._window = self._after(prompt_ids)
        self._matcher = StopMatcher(stop) if stop else None
        self._held = ""
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """Take in new tokens. Returns (text to show now, tokens to keep of these when a stop string ended the text).

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
        """End the text and return what was held back: a cut character as U+FFFD, the beginning of a stop string."""
        if self._ended:
            return ""
        shown, stopped_at = self._show(self._window.tail)
        self._ended = True
        return shown if stopped_at is not None else shown + self._held

    def _after(self, prompt_ids: Sequence[int]) -> _Window:
        """The window behind a prompt: its last tokens that are whole characters, none when a special token ends it."""
        context: tuple[int, ...] = ()
        for token in reversed(prompt_ids[-_MOST_CONTEXT:]):
            if not self._tokenizer.has_text(token):
                break
            context = (int(token), *context)
            text = self._tokenizer.decode(context)
            if text and _REPLACEMENT not in text:
                return _Window(context, text)
        return _Window()

    def _advance(self, window: _Window, token_ids: Sequence[int]) -> tuple[_Window, str]:
        """The window after more tokens, and the text that became certain. Independent of how tokens are grouped."""
        added = tuple(int(token) for token in token_ids if self._tokenizer.has_text(token))
        if not added:
            return window, ""
        pending = window.pending + added
        text = self._tokenizer.decode(window.context + pending)
        if text.startswith(window.context_text):
            text = text[len(window.context_text) :]
        else:  # a run of byte tokens is no UTF-8 as a whole, and the decoder takes back what it gave for its beginning
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
        """One token at a time: some decoders give up a whole run of bytes when its last character is cut."""
        pieces = []
        for token in token_ids:
            window, piece = self._advance(window, (token,))
            pieces.append(piece)
        return window, "".join(pieces)

    def _shortened(self, window: _Window, text: str) -> _Window:
        """Make the oldest pending tokens context when many wait, as in a long run of bytes that are no UTF-8."""
        if len(window.pending) < _LONG_WINDOW:
            return window
        cut = len(window.pending) - _MOST_UNFINISHED - 1
        head, rest = window.pending[:cut], window.pending[cut:]
        head_text = self._tokenizer.decode(head)
        if head_text + self._tokenizer.decode(rest) != text or len(head_text) > window.shown:
            return window  # the cut falls inside a character; another will not
        return _Window(head, head_text, rest, window.shown - len(head_text), window.tail)

    def _show(self, text: str) -> tuple[str, int | None]:
        """Text to show after `text` became certain, and the characters of it up to the end of a stop string."""
        if self._matcher is None:
            return text, None
        found = self._matcher.feed(text)
        if found is not None:
            end, length = found
            whole = self._held + text[:end]
            self._ended, self._held = True, ""
            return whole[: len(whole) - length], end
        whole = self._held + text
        split = len(whole) - self._matcher.held
        self._held = whole[split:]
        return whole[:split], None

    def _tokens_for(self, before: _Window, token_ids: Sequence[int], characters: int) -> int:
        """Fewest of the tokens that make so many characters certain."""
        for count in range(1, len(token_ids)):
            if len(self._advance(before, token_ids[:count])[1]) >= characters:
                return count
        return len(token_ids)
