"""Formats in which models mark what they think before they answer: two tokens, with the thinking between them.

Formats are chosen by name, or by the chat template and the tokenizer that know the marks (`marks_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from adaserve_jax.errors import ConfigError
from adaserve_jax.sampling import Thinking

_BLANKS = ("\n", "\n\n", " ", "\n \n")


@dataclass(frozen=True)
class ReasoningFormat:
    """Texts of the marks, each one token of the model's tokenizer."""

    opening: str
    closing: str


FORMATS = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>"),
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}
"""Every format by its name in `--reasoning-parser`. Whether a template opens the thinking is read from the prompt."""


class KnowsMarks(Protocol):
    """The part of a tokenizer that finds marks."""

    def id_of(self, text: str) -> int | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    @property
    def chat_template(self) -> str: ...


@dataclass(frozen=True)
class ReasoningMarks:
    """Marks of one model: texts, and ids of tokens."""

    form: ReasoningFormat
    tokens: Thinking

    def thinking(self, prompt_ids: Sequence[int], continued: str | None = None) -> Thinking:
        """Return the marks of a text after this prompt. continued: the message, if any, that the text goes on with.

        A template that opens the thinking ends with the mark, or with white space behind it. A mark before that may be
        anybody's words.
        """
        if continued is not None:
            started = continued.rfind(self.form.opening) > continued.rfind(self.form.closing)
        else:
            last = next((token for token in reversed(prompt_ids) if token not in self.tokens.blanks), None)
            started = last == self.tokens.opening
        return replace(self.tokens, started=started)


def marks_of(parser: str, tokenizer: KnowsMarks) -> ReasoningMarks | None:
    """Return the marks of a model; None: it has none.

    parser: a name of FORMATS, "none", or "auto": the format whose marks are tokens and which the chat template writes.
    Raises ConfigError: a format was named, and its marks are no tokens.
    """
    template = tokenizer.chat_template
    for name, form in FORMATS.items():
        if parser not in (name, "auto"):
            continue
        opening, closing = tokenizer.id_of(form.opening), tokenizer.id_of(form.closing)
        if opening is not None and closing is not None:
            if parser == name or form.opening in template or form.closing in template:
                tokens = {token for text in _BLANKS for token in tokenizer.encode(text, add_special_tokens=False)}
                blanks = sorted(token for token in tokens if not tokenizer.decode([token]).strip())
                return ReasoningMarks(form, Thinking(opening, closing, blanks=tuple(blanks)))
        elif parser == name:
            raise ConfigError(
                f"reasoning_parser must be a format whose marks are tokens of the model, got {name!r}, whose marks "
                f"{form.opening} and {form.closing} its tokenizer lacks; leave it at auto"
            )
    return None
