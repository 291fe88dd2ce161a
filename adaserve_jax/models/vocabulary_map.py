"""Maps the tokens of a target to those of a draft whose vocabulary differs, by what they stand for.

A draft that is mapped proposes only: the target verifies its own tokens, so a wrong or a missing counterpart costs
acceptance and never changes a text. Each token of the target is fed to the draft as exactly one of the draft's tokens,
so positions and KV of both models stay aligned. Axes: V rows of the target's vocabulary, U rows of the draft's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.tokenizer import Tokenizer

MappingKind = Literal["same", "padded", "intersection"]
LEAST_SHARE = 0.1
"""A draft that covers less of the target's tokens is refused: it could propose next to nothing."""
_LOST_BYTES = "\N{REPLACEMENT CHARACTER}".encode()

Meaning = bytes | str
"""Bytes of a token of text, or the name of a special token."""


@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Counterparts of a target's tokens in a draft's vocabulary.

    kind: "same" if every id means the same in both and both have as many rows; "padded" if no token has another id in
    the draft, which may have more or fewer rows or lack tokens; "intersection" otherwise. to_draft: i32[V], below U,
    the token that the draft is fed in place of each of the target's. covered: bool[V], True where that token means the
    same; the others are never proposed. num_tokens, num_covered: tokens of the target's tokenizer, and those covered.
    """

    kind: MappingKind
    to_draft: np.ndarray
    covered: np.ndarray
    num_tokens: int
    num_covered: int

    @property
    def share(self) -> float:
        """Share of the target's tokens that the draft can propose, each counted once."""
        return self.num_covered / max(1, self.num_tokens)

    @property
    def differs(self) -> bool:
        """True unless the draft has the target's vocabulary, row by row."""
        return self.kind != "same"

    def __str__(self) -> str:
        """Describe the map for logs: its kind, and what it covers."""
        if self.kind == "same":
            return "the target's vocabulary"
        how = {
            "padded": "padded vocabulary (equal token ids)",
            "intersection": "intersection of vocabularies (tokens of equal bytes)",
        }[self.kind]
        return (
            f"{how}: covers {self.share:.1%} of the target's tokens ({self.num_covered:,} of {self.num_tokens:,}); "
            "the others are never proposed"
        )


def map_vocabulary(target: Tokenizer, draft: Tokenizer, rows: int, draft_rows: int) -> VocabularyMap:
    """Map the target's tokens below `rows` to the draft's below `draft_rows`.

    Tokens of text are counterparts if they stand for the same bytes, special tokens if they have the same name or are
    both the one that begins or the one that ends a text. A token without a counterpart is fed as the draft's longest
    token that ends with the same bytes, so that what follows is predicted from what was last written; failing that, as
    the draft's token for unknown ones.
    Raises CheckpointError: the draft covers less than LEAST_SHARE of the target's tokens.
    """
    both = min(rows, draft_rows)
    ours, shared = target.token_of(rows), target.token_of(both)
    if shared == draft.token_of(both):  # rows that neither tokenizer names are equal too
        covered, to_draft = np.arange(rows) < both, _unknown(draft, draft_rows, rows)
        to_draft[:both] = np.arange(both)
        return VocabularyMap("same" if rows == draft_rows else "padded", to_draft, covered, len(ours), len(shared))
    theirs = draft.token_of(draft_rows)
    spelled, draft_spelled = target.spelled_all(rows), draft.spelled_all(draft_rows)
    by_meaning = _by_meaning(draft_spelled)
    pairs: dict[int, int] = {}
    for meaning, ids in _by_meaning(spelled).items():
        pairs |= _pair(ids, by_meaning.get(meaning, ()), ours, theirs)
    for mark, other in ((target.bos_token_id, draft.bos_token_id), (target.eos_token_id, draft.eos_token_id)):
        if mark is None or other is None or mark >= rows or other >= draft_rows:
            continue
        if mark not in pairs and other not in pairs.values():
            pairs[mark] = other
    covered, to_draft = np.zeros(rows, bool), _unknown(draft, draft_rows, rows)
    for token in ours.keys() - pairs.keys():
        meaning = spelled[token]
        if isinstance(meaning, bytes):
            ends = (by_meaning.get(meaning[start:]) for start in range(1, len(meaning)))
            to_draft[token] = next((ids[-1] for ids in ends if ids), to_draft[token])
    own, other = np.array(list(pairs), np.int64), np.array(list(pairs.values()), np.int64)
    covered[own], to_draft[own] = True, other
    unnamed = np.array([i for i in range(both) if i not in ours and i not in theirs], np.int64)
    aligned = bool((own == other).all())
    if aligned:
        covered[unnamed], to_draft[unnamed] = True, unnamed
    found = VocabularyMap("padded" if aligned else "intersection", to_draft, covered, len(ours), len(pairs))
    if found.share < LEAST_SHARE:
        raise CheckpointError(
            f"a draft must have at least {LEAST_SHARE:.0%} of the target's tokens, but {draft.name} has "
            f"{found.share:.1%} of those of {target.name} ({len(pairs):,} of {len(ours):,}, compared by their bytes); "
            "use a draft whose tokenizer is closer to the target's, or none"
        )
    return found


def _by_meaning(spelled: dict[int, Meaning]) -> dict[Meaning, list[int]]:
    """Return the ids of each meaning. Tokens without text, and those whose bytes decoding lost, have none."""
    found: dict[Meaning, list[int]] = defaultdict(list)
    for token, meaning in spelled.items():
        if meaning and not (isinstance(meaning, bytes) and _LOST_BYTES in meaning):
            found[meaning].append(token)
    return dict(found)


def _pair(ids: Sequence[int], others: Sequence[int], ours: dict[int, str], theirs: dict[int, str]) -> dict[int, int]:
    """Pair ids of one meaning one to one.

    Most meanings have one id in each vocabulary. SentencePiece has a token for a character and one for its byte. Each
    is paired with the one that is written alike, or else with the character, whose id is higher.
    """
    found: dict[int, int] = {}
    choices = product(ids, others) if len(ids) * len(others) > 1 else zip(ids, others, strict=False)
    for token, other in sorted(
        choices, key=lambda pair: (pair[0] != pair[1], ours[pair[0]] != theirs[pair[1]], -pair[0], -pair[1])
    ):
        if token not in found and other not in found.values():
            found[token] = other
    return found


def _unknown(draft: Tokenizer, draft_rows: int, rows: int) -> np.ndarray:
    """Return i32[rows] of the draft's token for unknown ones, or else of what begins or ends a text; 0 without any."""
    special = (draft.unk_token_id, draft.bos_token_id, draft.eos_token_id)
    token = next((each for each in special if each is not None and each < draft_rows), 0)
    return np.full(rows, token, np.int32)
