"""Which of several drafts a request gets: the one it names, else that of its language or topic, else the default.

The text does not depend on it, only how fast it comes. Imports no jax.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from adaserve_jax.config import ROUTES
from adaserve_jax.errors import CheckpointError, ConfigError, RequestError

# In which language a prompt is, as far as a draft is there for it. Imports no jax.

LEAST_CHANCE = 0.2
"""Probability of the likeliest language from which on it is believed."""
MOST_CHARS = 1000
"""The end of a prompt that is looked at: what was asked last, which is in the language of the answer."""
_log = logging.getLogger(__name__)


class LanguageDetector:
    """Finds the draft that is named for a text's language: `zh`, or `pt-BR` for any Portuguese.

    names: of the drafts, in order; the first is the default and stands for no language. Names that are no languages are
    logged: only a tag leads to them. Raises ConfigError when no name is a language, or py3langid is not installed.
    """

    def __init__(self, names: Sequence[str]):
        try:
            from py3langid.langid import MODEL_FILE, LanguageIdentifier
        except ImportError as error:
            raise ConfigError(
                "route language needs py3langid; install it: pip install 'adaserve-jax[routing]'"
            ) from error
        self._identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=LEAST_CHANCE)
        known = set(self._identifier.labels)
        languages = {name: name.replace("_", "-").partition("-")[0].lower() for name in names[1:]}
        others = [name for name, language in languages.items() if language not in known]
        if len(others) == len(languages):
            raise ConfigError(
                f"with route language, drafts are named by the ISO 639 code of a language, such as de=FOLDER; "
                f"got {', '.join(others) or 'no further draft'}"
            )
        if others:
            _log.warning("drafts whose names are no languages, so that only a tag leads to them: %s", ", ".join(others))
        self._draft_of: dict[str, int] = {}
        for index, name in enumerate(names[1:], 1):
            self._draft_of.setdefault(languages[name], index)

    def route(self, text: str) -> int:
        """The index of the draft for this text; 0 when its language has none or cannot be told."""
        language, _ = self._identifier.classify(text[-MOST_CHARS:])
        return self._draft_of.get(language, 0)


# What a prompt is about, told from the draft's own token embeddings: which topic is nearest. Imports no jax.
#
# A prompt's vector is the mean embedding of its distinct tokens, so that words which every prompt repeats weigh
# little, as a direction from the mean of the vocabulary. A topic is the mean over its prompts: examples, and
# requests whose tag said which draft they want. Untagged traffic never moves a topic: the mean of traffic that
# is mostly about one thing lies within that thing, and told nothing apart when it was tried as the centre.
#
# Directions are compared by their cosine, seen from the middle of all topics. The default draft is a topic like
# others once it has prompts of its own. Until then a prompt is its when it is farther from the nearest topic
# than that topic's own prompts are.

EXAMPLES_FILE = "topic_examples.txt"
LEAST_PROMPTS = 8
"""Prompts from which on a topic is one: fewer say more of themselves than of it."""
LEAST_BEFORE = 4
"""Prompts from which on their mean says how near the next ones are to it."""
MEMORY = 1000
"""Prompts that a topic goes back, about; so it follows what the traffic becomes."""
TENANT_SHARE = 0.5
"""Most of a topic's mean that is one client's while others have any of it, from LEAST_PROMPTS on."""
MARGIN = 0.05
"""How much nearer, in cosines, the nearest topic must be than the next where the default is one of them."""
MOST_DEVIATIONS = 2.0
"""How many standard deviations of a topic's own cosines below their mean a prompt may be, and still be of the topic."""
FORGOTTEN = 0.1 / MEMORY
"""Part of a mean below which a client counts as having none."""
MOST_TOKENS = 1024
"""The end of a prompt that is looked at."""
FINGERPRINT_ROWS = 256
VERSION = 1


@dataclass(eq=False)
class Topic:
    """Running means over the prompts of one draft. mean: f32[d], of their directions; near, near_square: of the cosine
    between each after the first LEAST_BEFORE and the mean before it, and of its square. count: prompts so far. shares:
    what part of the mean is whose, of all clients that have a prompt's worth of it; the rest is of examples."""

    mean: np.ndarray
    near: float = 0.0
    near_square: float = 0.0
    count: int = 0
    shares: dict[str, float] = field(default_factory=dict)

    def add(self, direction: np.ndarray, tenant: str | None = None) -> None:
        """Take in a prompt. tenant: the client's; None: it is an example. What would give a client more than
        TENANT_SHARE, while others have any, is passed over."""
        share = 1 / min(self.count + 1, MEMORY)
        shares = {name: part * (1 - share) for name, part in self.shares.items()}
        if tenant is not None:
            shares[tenant] = shares.get(tenant, 0.0) + share
            if len(shares) > 1 and self.count >= LEAST_PROMPTS and shares[tenant] > TENANT_SHARE:
                return
        self.shares = {name: part for name, part in shares.items() if part >= FORGOTTEN}
        if self.count >= LEAST_BEFORE:
            weight = 1 / min(self.count - LEAST_BEFORE + 1, MEMORY)
            cosine = float(_cosines(self.mean[None], direction)[0])
            self.near += weight * (cosine - self.near)
            self.near_square += weight * (cosine**2 - self.near_square)
        self.count += 1
        self.mean += share * (direction - self.mean)

    def has(self, direction: np.ndarray) -> bool:
        """Whether a prompt is as near as the topic's own are."""
        deviation = math.sqrt(max(0.0, self.near_square - self.near**2))
        return bool(_cosines(self.mean[None], direction)[0] >= self.near - MOST_DEVIATIONS * deviation)


class TopicClassifier:
    """Finds the draft whose topic is a prompt's. Safe from any thread.

    num_drafts: the first is the default. embedding: [V, d] of any float type, of which a copy is kept: the array may be
    a view of memory that a draft gives back.
    """

    def __init__(self, num_drafts: int, embedding: np.ndarray):
        self._embedding = np.array(embedding)
        self._middle = embedding.mean(0, dtype=np.float32)
        self._fingerprint = fingerprint_of(embedding)
        self._topics = [Topic(np.zeros_like(self._middle)) for _ in range(num_drafts)]
        self._lock = threading.Lock()

    def direction(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """f32[d] of length 1: from the mean of the vocabulary to that of the distinct tokens among the last
        MOST_TOKENS. All 0 where there is no such direction: none of them is in the table, which a target's vocabulary
        may reach beyond, or they lie in the middle of it."""
        distinct = np.unique(np.asarray(token_ids[-MOST_TOKENS:], np.int64))
        distinct = distinct[distinct < len(self._embedding)]
        if not len(distinct):
            return np.zeros_like(self._middle)
        vector = self._embedding[distinct].mean(0, dtype=np.float32) - self._middle
        length = np.linalg.norm(vector)
        return vector / length if length > 0 else vector

    def learn(self, draft: int, token_ids: Sequence[int] | np.ndarray, tenant: str | None = None) -> None:
        """This prompt is of the draft's topic. tenant: the client's; None: it is an example. Nothing happens where it
        has no direction, or where its client has its share of the topic."""
        direction = self.direction(token_ids)
        if not direction.any():
            return
        with self._lock:
            self._topics[draft].add(direction, tenant)

    def route(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """The index of the draft for this prompt; 0 where it is not clear."""
        direction = self.direction(token_ids)
        if not direction.any():
            return 0
        with self._lock:
            known = [index for index, topic in enumerate(self._topics) if topic.count >= LEAST_PROMPTS]
            if not known or known == [0]:
                return 0
            means = np.array([self._topics[index].mean for index in known])
            centre = means.mean(0) if len(known) > 1 else np.zeros_like(direction)
            near = _cosines(means - centre, direction - centre)
            best = known[int(near.argmax())]
            if 0 in known:
                last, first = np.sort(near)[-2:]
                return best if first - last >= MARGIN else 0
            return best if self._topics[best].has(direction) else 0

    def to_state(self, names: Sequence[str]) -> dict[str, Any]:
        """What was learned, as plain values for JSON. names: of the drafts."""
        with self._lock:
            topics = {name: _as_plain(topic) for name, topic in zip(names, self._topics, strict=True)}
        return {"version": VERSION, "embedding": self._fingerprint, "topics": topics}

    def from_state(self, names: Sequence[str], state: dict[str, Any]) -> None:
        """Go on from what `to_state` gave; drafts that it does not know begin anew. Raises CheckpointError, having
        changed nothing, when it is of another embedding or is none."""
        try:
            version, embedding, plain = state["version"], state["embedding"], state["topics"]
            if version != VERSION or embedding != self._fingerprint:
                raise CheckpointError(
                    f"kept topics must be of version {VERSION} and of this draft's embedding; got version {version!r} "
                    f"of embedding {embedding!r}; topics are learned anew"
                )
            topics = {index: self._from_plain(plain[name]) for index, name in enumerate(names) if name in plain}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"kept topics cannot be read ({error!r}); topics are learned anew") from error
        with self._lock:
            for index, topic in topics.items():
                self._topics[index] = topic

    def _from_plain(self, plain: dict[str, Any]) -> Topic:
        topic = Topic(np.array(plain["mean"], np.float32), float(plain["near"]), float(plain["near_square"]))
        numbers = [*topic.mean.ravel(), topic.near, topic.near_square]
        if topic.mean.shape != self._middle.shape or not np.isfinite(numbers).all():
            raise ValueError(f"a topic has a mean of {len(self._middle)} finite numbers, near and near_square")
        topic.count = plain["count"]
        if type(topic.count) is not int or topic.count < 0:
            raise ValueError(f"a count is an integer of at least 0, got {topic.count!r}")
        topic.shares = {str(name): float(part) for name, part in plain.get("shares", {}).items()}
        if not all(0 < part <= 1 for part in topic.shares.values()):
            raise ValueError(f"shares are above 0 and at most 1, got {topic.shares}")
        return topic


def fingerprint_of(embedding: np.ndarray) -> str:
    """Of the shape and about FINGERPRINT_ROWS rows: another table has another one."""
    rows = embedding[:: max(1, len(embedding) // FINGERPRINT_ROWS)].astype(np.float32)
    return blake2b(rows.tobytes(), digest_size=16, person=f"{embedding.shape}".encode()[:16]).hexdigest()


def read_examples(folder: Path) -> list[str]:
    """The prompts of a draft's topic_examples.txt, one a line; none where there is no such file. Raises ConfigError
    when it is there and cannot be read."""
    path = folder / EXAMPLES_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected prompts in UTF-8, one a line; cannot read it ({error})") from error
    return [line for line in lines if line.strip()]


def _cosines(rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Of each row with the vector; 0 where one of them has no length."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(vector)
    return np.divide(rows @ vector, lengths, out=np.zeros(len(rows), np.float32), where=lengths > 0)


def _as_plain(topic: Topic) -> dict[str, Any]:
    return asdict(topic) | {"mean": topic.mean.tolist()}


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
