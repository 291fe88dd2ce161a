"""What a step brought its requests: columns for those who count, updates one by one for those who stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from adaserve_jax.scheduler.state import RequestState
from adaserve_jax.types import RequestUpdate


@dataclass(frozen=True, eq=False)
class StepUpdates(Sequence[RequestUpdate]):
    """A sequence of the updates of one step, made when they are asked for. U: requests that got tokens or ended.

    requests: [U]. sequence: i64[U], each request's number in the order in which they were added. token_ids:
    i32[U, D], the first counts[u] new; counts: i64[U]. ended: the updates that end their request, in order, by index.
    """

    requests: list[RequestState]
    sequence: np.ndarray
    token_ids: np.ndarray
    counts: np.ndarray
    ended: dict[int, RequestUpdate]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestUpdate]:
        tokens, counts = self.token_ids.tolist(), self.counts.tolist()
        for index, state in enumerate(self.requests):
            update = self.ended.get(index)
            if update is None:
                update = RequestUpdate(state.request.request_id, tuple(tokens[index][: counts[index]]))
            yield update

    @overload
    def __getitem__(self, index: int) -> RequestUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> list[RequestUpdate]: ...
    def __getitem__(self, index: int | slice) -> RequestUpdate | list[RequestUpdate]:
        return list(self)[index]
