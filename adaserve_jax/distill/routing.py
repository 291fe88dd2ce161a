"""Which of several drafts a request gets: the one it names, else that of its language or topic, else the default.

The text does not depend on it, only how fast it comes. Imports no jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from adaserve_jax.config import ROUTES
from adaserve_jax.distill.languages import LanguageDetector
from adaserve_jax.distill.topics import TopicClassifier, read_examples
from adaserve_jax.errors import ConfigError, RequestError


class Routed(Protocol):
    """What routing looks at. draft_tag: the name of a draft, or ""; learn: whether anything may learn from it; tenant:
    on whose behalf it is, as far as learning must not follow one client; "": not said."""

    @property
    def draft_tag(self) -> str: ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def learn(self) -> bool: ...

    @property
    def tenant(self) -> str: ...


class Router:
    """Finds a request's draft. Safe from any thread.

    names: of the drafts, the default first. how: one of ROUTES. embedding: [V, d], the default draft's, for topics
    only; examples: prompts of topics, tokenised, by name of the draft. Raises ConfigError on what `how` cannot
    work with.
    """

    def __init__(
        self,
        names: Sequence[str],
        how: str = "tag",
        *,
        embedding: np.ndarray | None = None,
        examples: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ):
        self.names = tuple(names)
        if how not in ROUTES:
            raise ConfigError(f"route must be one of {', '.join(ROUTES)}, got {how!r}")
        several = len(names) > 1
        self._language = LanguageDetector(names) if several and how == "language" else None
        self._topic: TopicClassifier | None = None
        if several and how == "topic":
            if embedding is None:
                raise ConfigError("route topic needs the embedding of the default draft; none was given")
            self._topic = TopicClassifier(len(names), embedding)
        for name, prompts in (examples or {}).items():
            for token_ids in prompts:
                if self._topic is not None and len(token_ids):
                    self._topic.learn(self.index(name), token_ids)

    @property
    def needs_text(self) -> bool:
        """Whether `route` looks at the text, or at token ids only."""
        return self._language is not None

    def index(self, name: str) -> int:
        """The index of the draft of this name. Raises RequestError(param="draft_tag") naming those that are there."""
        if name not in self.names:
            raise RequestError(
                f"draft_tag must name one of the drafts: {', '.join(self.names)}; got {name!r}", param="draft_tag"
            )
        return self.names.index(name)

    def route(self, request: Routed, text: str = "") -> int:
        """The index of the draft for this request. text: its prompt, where `needs_text`. Raises RequestError when its
        tag names no draft."""
        if request.draft_tag:
            draft = self.index(request.draft_tag)
            if self._topic is not None and request.learn:
                self._topic.learn(draft, request.prompt_ids, request.tenant)
            return draft
        if self._language is not None:
            return self._language.route(text)
        if self._topic is not None:
            return self._topic.route(request.prompt_ids)
        return 0

    def to_state(self) -> dict[str, Any]:
        """What was learned of topics, as plain values for JSON; empty where nothing is."""
        return {} if self._topic is None else self._topic.to_state(self.names)

    def from_state(self, state: dict[str, Any]) -> None:
        """Go on from what `to_state` gave. Raises CheckpointError, having changed nothing, when it does not fit."""
        if self._topic is not None and state:
            self._topic.from_state(self.names, state)


def make_router(
    how: str,
    folders: Mapping[str, Path],
    *,
    embedding: Callable[[], np.ndarray],
    encode: Callable[[str], Sequence[int]],
) -> Router:
    """The router between drafts that lie in `folders`, by name, the default first. embedding: gives [V, d] of the
    default draft as it was loaded, not as it was trained; it is called for topics only, and so is `encode`, on the
    prompts of each draft's topic_examples.txt. Raises ConfigError."""
    names = list(folders)
    if how != "topic" or len(names) == 1:
        return Router(names, how)
    examples = {name: [encode(prompt) for prompt in read_examples(folder)] for name, folder in folders.items()}
    return Router(names, how, embedding=embedding(), examples=examples)
