"""Routing of requests to drafts: by the draft tag, else by language or topic, else to the default draft.

The generated text does not depend on the draft, only the speed does.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from adaserve_jax.config import ROUTES
from adaserve_jax.errors import CheckpointError, ConfigError, RequestError

LEAST_CHANCE = 0.2
"""Lowest probability at which the likeliest language is used."""
MAX_PROMPT_CHARS = 1000
"""Characters at the end of a prompt that tell its language: the question, which is in the language of the answer."""
EXAMPLES_FILE = "topic_examples.txt"
MIN_PROMPTS = 8
"""Prompts that a topic needs before requests are routed to it."""
MIN_MEAN_PROMPTS = 4
"""Prompts in a topic's mean before cosines to it are measured."""
MEMORY = 1000
"""Length of the running means in prompts, so that a topic follows the traffic."""
TENANT_SHARE = 0.5
"""Largest share of a topic's mean that one tenant has while others have any, from MIN_PROMPTS on."""
MARGIN = 0.05
"""Lead in cosine that the nearest topic needs over the next one, where the default draft has a topic."""
MAX_DEVIATIONS = 2.0
"""Standard deviations below the mean cosine of a topic's own prompts at which a prompt still belongs to it."""
FORGOTTEN = 0.1 / MEMORY
"""Share of a mean below which a tenant counts as having none."""
MAX_PROMPT_TOKENS = 1024
"""Tokens at the end of a prompt that tell its topic."""
FINGERPRINT_ROWS = 256
VERSION = 1
_log = logging.getLogger(__name__)


class LanguageDetector:
    """Finds the draft that is named after a text's language: `zh`, or `pt-BR` for any Portuguese."""

    def __init__(self, names: Sequence[str]):
        """Load the language model.

        The first name is the default draft and stands for no language. Other names that are no languages are logged:
        only a tag leads to them. Raises ConfigError if no name is a language, or py3langid is not installed.
        """
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
        """Return the index of the draft for a text; 0 if its language has none or cannot be told."""
        language, _ = self._identifier.classify(text[-MAX_PROMPT_CHARS:])
        return self._draft_of.get(language, 0)


@dataclass(eq=False)
class Topic:
    """Running means over the prompts of one draft.

    mean: f32[d], mean direction. near, near_square: mean cosine, and mean squared cosine, between each prompt after the
    first MIN_MEAN_PROMPTS and the mean before it. count: prompts so far. shares: of the mean by tenant; the rest comes
    from examples.
    """

    mean: np.ndarray
    near: float = 0.0
    near_square: float = 0.0
    count: int = 0
    shares: dict[str, float] = field(default_factory=dict)

    def add(self, direction: np.ndarray, tenant: str | None = None) -> None:
        """Add a prompt, unless its tenant would get more than TENANT_SHARE while others have any. tenant: None for an
        example."""
        share = 1 / min(self.count + 1, MEMORY)
        shares = {name: part * (1 - share) for name, part in self.shares.items()}
        if tenant is not None:
            shares[tenant] = shares.get(tenant, 0.0) + share
            if len(shares) > 1 and self.count >= MIN_PROMPTS and shares[tenant] > TENANT_SHARE:
                return
        self.shares = {name: part for name, part in shares.items() if part >= FORGOTTEN}
        if self.count >= MIN_MEAN_PROMPTS:
            weight = 1 / min(self.count - MIN_MEAN_PROMPTS + 1, MEMORY)
            cosine = float(_cosines(self.mean[None], direction)[0])
            self.near += weight * (cosine - self.near)
            self.near_square += weight * (cosine**2 - self.near_square)
        self.count += 1
        self.mean += share * (direction - self.mean)

    def has(self, direction: np.ndarray) -> bool:
        """Return True if a prompt is as near as the topic's own prompts."""
        deviation = math.sqrt(max(0.0, self.near_square - self.near**2))
        return bool(_cosines(self.mean[None], direction)[0] >= self.near - MAX_DEVIATIONS * deviation)


class TopicClassifier:
    """Finds the draft whose topic is nearest to a prompt. Safe in any thread.

    A prompt's vector is the mean draft embedding of its distinct tokens, so that words which every prompt repeats weigh
    little, as a direction from the mean of the vocabulary. A topic is the mean over its prompts: examples, and requests
    with its draft's tag. Untagged traffic never moves a topic: the mean of traffic that is mostly about one thing lies
    within that thing, and told nothing apart when it was tried as the centre.

    Directions are compared by cosine, seen from the centre of all topics. The default draft has a topic like others
    once it has prompts of its own; until then it gets the prompts that are farther from the nearest topic than that
    topic's own prompts are.
    """

    def __init__(self, num_drafts: int, embedding: np.ndarray):
        """Begin without topics.

        embedding: [V, d] of any float type. It is copied, since it may be a view of memory that a draft gives back.
        """
        self._embedding = np.array(embedding)
        self._middle = embedding.mean(0, dtype=np.float32)
        self._fingerprint = fingerprint_of(embedding)
        self._topics = [Topic(np.zeros_like(self._middle)) for _ in range(num_drafts)]
        self._lock = threading.Lock()

    def direction(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the unit vector f32[d] from the vocabulary's mean to the mean of the prompt's distinct last tokens.

        All 0 if there is none: no token is in the table (a target's vocabulary may be larger), or they lie at its
        mean.
        """
        distinct = np.unique(np.asarray(token_ids[-MAX_PROMPT_TOKENS:], np.int64))
        distinct = distinct[distinct < len(self._embedding)]
        if not len(distinct):
            return np.zeros_like(self._middle)
        vector = self._embedding[distinct].mean(0, dtype=np.float32) - self._middle
        length = np.linalg.norm(vector)
        return vector / length if length > 0 else vector

    def learn(self, draft: int, token_ids: Sequence[int] | np.ndarray, tenant: str | None = None) -> None:
        """Add a prompt to a draft's topic, if it has a direction. tenant: None for an example."""
        direction = self.direction(token_ids)
        if not direction.any():
            return
        with self._lock:
            self._topics[draft].add(direction, tenant)

    def route(self, token_ids: Sequence[int] | np.ndarray) -> int:
        """Return the index of the draft for a prompt; 0 if it is not clear."""
        direction = self.direction(token_ids)
        if not direction.any():
            return 0
        with self._lock:
            known = [index for index, topic in enumerate(self._topics) if topic.count >= MIN_PROMPTS]
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

    def to_state(self, examples: Mapping[str, str]) -> dict[str, Any]:
        """Return the topics as plain values for JSON. examples: hash of each draft's examples, by its name in order."""
        with self._lock:
            topics = {
                name: asdict(topic) | {"mean": topic.mean.tolist()}
                for name, topic in zip(examples, self._topics, strict=True)
            }
        return {
            "version": VERSION, "embedding": self._fingerprint, "examples": dict(examples), "topics": topics
        }  # fmt: skip

    def from_state(self, examples: Mapping[str, str], state: dict[str, Any]) -> None:
        """Restore what `to_state` returned, but for drafts that are not in it or now have other examples.

        Raises CheckpointError, having changed nothing, if it is malformed or of another embedding.
        """
        try:
            version, embedding, plain = state["version"], state["embedding"], state["topics"]
            if version != VERSION or embedding != self._fingerprint:
                raise CheckpointError(
                    f"kept topics must be of version {VERSION} and of this draft's embedding; got version {version!r} "
                    f"of embedding {embedding!r}; topics are learned anew"
                )
            of = state.get("examples", {})
            changed = [name for name in plain if name in examples and of.get(name, examples[name]) != examples[name]]
            kept = {name: self._from_plain(plain[name]) for name in plain if name in examples and name not in changed}
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(f"kept topics cannot be read ({error!r}); topics are learned anew") from error
        if changed:
            _log.info("topics of drafts that have other examples now are learned anew: %s", ", ".join(changed))
        with self._lock:
            self._topics = [kept.get(name, topic) for name, topic in zip(examples, self._topics, strict=True)]

    def _from_plain(self, plain: dict[str, Any]) -> Topic:
        shares = {str(name): float(part) for name, part in plain.get("shares", {}).items()}
        mean, near, near_square = np.array(plain["mean"], np.float32), float(plain["near"]), float(plain["near_square"])
        if mean.shape != self._middle.shape or not np.isfinite([*mean, near, near_square]).all():
            raise ValueError(f"a topic has a mean of {len(self._middle)} finite numbers, near and near_square")
        if type(plain["count"]) is not int or plain["count"] < 0:
            raise ValueError(f"a count is an integer of at least 0, got {plain['count']!r}")
        if not all(0 < part <= 1 for part in shares.values()):
            raise ValueError(f"shares are above 0 and at most 1, got {shares}")
        return Topic(mean, near, near_square, plain["count"], shares)


def _hash_of(prompts: Sequence[Sequence[int]]) -> str:
    return blake2b(repr([list(map(int, token_ids)) for token_ids in prompts]).encode(), digest_size=16).hexdigest()


def fingerprint_of(embedding: np.ndarray) -> str:
    """Return a hash of an embedding's shape and of about FINGERPRINT_ROWS rows."""
    rows = embedding[:: max(1, len(embedding) // FINGERPRINT_ROWS)].astype(np.float32)
    return blake2b(rows.tobytes(), digest_size=16, person=f"{embedding.shape}".encode()[:16]).hexdigest()


def read_examples(folder: Path) -> list[str]:
    """Return the prompts of a draft's topic_examples.txt, one a line; empty without the file. Raises ConfigError if it
    cannot be read."""
    path = folder / EXAMPLES_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected prompts in UTF-8, one a line; cannot read it ({error})") from error
    return [line for line in lines if line.strip()]


def _cosines(rows: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Return the cosine of each row with the vector; 0 where one of them has no length."""
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(vector)
    return np.divide(rows @ vector, lengths, out=np.zeros(len(rows), np.float32), where=lengths > 0)


class DraftRouter:
    """Finds a request's draft. Safe in any thread."""

    def __init__(
        self,
        names: Sequence[str],
        how: str = "tag",
        *,
        embedding: np.ndarray | None = None,
        examples: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ):
        """Set up routing. Raises ConfigError if `how` is unknown or cannot work with these drafts.

        names: of the drafts, the default first. embedding: [V, d] of the default draft, for topics only. examples:
        tokenised prompts of topics, by draft name.
        """
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
        given = examples or {}
        self._examples = {name: _hash_of(given.get(name, ())) for name in names}
        for name, prompts in given.items():
            for token_ids in prompts:
                self.learn(name, token_ids)

    @property
    def needs_text(self) -> bool:
        """True if `route` reads the text, and not only token ids."""
        return self._language is not None

    def index(self, name: str) -> int:
        """Return the index of a draft by name. Raises RequestError(param="draft_tag") if there is none."""
        if name not in self.names:
            raise RequestError(
                f"draft_tag must name one of the drafts: {', '.join(self.names)}; got {name!r}", param="draft_tag"
            )
        return self.names.index(name)

    def learn(self, name: str, token_ids: Sequence[int], tenant: str | None = None) -> None:
        """Add a prompt to the topic of a draft by name, if topics are learned. tenant: None for an example."""
        if self._topic is not None:
            self._topic.learn(self.index(name), token_ids, tenant)

    def route(self, token_ids: Sequence[int], text: str = "") -> int:
        """Return the index of the draft for a prompt without a tag. text: of the prompt, if `needs_text`."""
        if self._language is not None:
            return self._language.route(text)
        return 0 if self._topic is None else self._topic.route(token_ids)

    def to_state(self) -> dict[str, Any]:
        """Return the learned topics as plain values for JSON; empty without any."""
        return {} if self._topic is None else self._topic.to_state(self._examples)

    def from_state(self, state: dict[str, Any]) -> None:
        """Restore what `to_state` returned. Raises CheckpointError, having changed nothing, if it does not fit."""
        if self._topic is not None and state:
            self._topic.from_state(self._examples, state)


def make_router(
    how: str,
    folders: Mapping[str, Path],
    *,
    embedding: Callable[[], np.ndarray],
    encode: Callable[[str], Sequence[int]],
) -> DraftRouter:
    """Build the router between the drafts in `folders`, by draft name, the default first. Raises ConfigError.

    embedding: returns [V, d] of the default draft as loaded, not as trained; called for topics only. encode: tokenises
    the prompts of topic_examples.txt; called for topics only.
    """
    names = list(folders)
    if how != "topic" or len(names) == 1:
        return DraftRouter(names, how)
    examples = {name: [encode(prompt) for prompt in read_examples(folder)] for name, folder in folders.items()}
    return DraftRouter(names, how, embedding=embedding(), examples=examples)
