"""Who runs: slots, pages, admission and preemption of requests. Knows no costs, trees or clocks but the one passed in.

No request starves: the running request of the lowest rank is never preempted while another runs, ranks never change,
every request fits the pool alone, and the queue bounds how many can pass a waiting one (queue.py).
"""

from __future__ import annotations

from collections.abc import Callable

from adaserve_jax.errors import IntegrityError
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.scheduler.queue import Ordering, WaitingQueue
from adaserve_jax.scheduler.slots import SlotTable
from adaserve_jax.scheduler.state import RequestState
from adaserve_jax.types import Limits


class Batch:
    """The running requests, in order of admission, and those that wait for a slot."""

    def __init__(self, limits: Limits, ordering: Ordering):
        self.limits = limits
        self.pool = PagePool(limits.num_pages, limits.page_size)
        self.table = SlotTable(limits)
        self.queue = WaitingQueue(ordering)
        self._preempts_for_priority = ordering == "priority"
        self.running: list[RequestState] = []
        self.preemptions = 0
        # every running row may need one sampled position and one token of the step
        self._capacity = min(limits.max_requests, limits.max_tree_tokens, limits.max_tokens)

    def make_room(self) -> bool:
        """Give every decode row the page of its pending token, preempting those of highest rank when pages run out.

        Returns whether anything was preempted.
        """
        page_size = self.limits.page_size
        short = [s for s in self.running if s.pending == 1 and s.num_tokens > s.num_pages * page_size]
        preempted = False
        for state in sorted(short, key=lambda state: state.rank):
            while state.is_running and not self.reserve(state, state.num_tokens):
                victim = max(self.running, key=lambda state: state.rank)
                self._preempt(victim)
                preempted = True
        return preempted

    def reserve(self, state: RequestState, num_tokens: int) -> bool:
        """Hold pages for `num_tokens` tokens of a running request; False, and nothing taken, when too few are free."""
        missing = self.pool.pages_for(num_tokens) - state.num_pages
        if missing > 0:
            if missing > self.pool.num_free:
                return False
            self.table.grow(state, self.pool.alloc(missing))
        return True

    def admit(self, now: float, may_start: Callable[[RequestState], bool]) -> None:
        """Move waiting requests into free slots, in order, while their whole prompt fits beside one more page of growth
        for every running request, and `may_start` agrees. It is not asked while nothing runs, nor about preempted
        requests, nor about those whose turn it is for having waited longest; where it does not agree, the first that
        waits without a TPOT target goes instead."""
        while (state := self.queue.peek(now)) is not None:
            if not self._room_for(state):
                return
            asked = self.running and not state.preemptions and not self.queue.promotes
            if asked and not may_start(state):
                state = self.queue.peek_untargeted()
                if state is None or not self._room_for(state):
                    return
            self.queue.take(state)
            self.table.bind(state, self.pool.alloc(self.pool.pages_for(state.num_tokens)))
            self.running.append(state)

    def _room_for(self, state: RequestState) -> bool:
        while not self._fits(state):
            if not self._make_way(state):
                return False
        return True

    def _fits(self, state: RequestState) -> bool:
        pages = self.pool.pages_for(state.num_tokens)
        crowded = pages + len(self.running) > self.pool.num_free and (self.running or pages > self.pool.num_free)
        return len(self.running) < self._capacity and not crowded

    def _make_way(self, state: RequestState) -> bool:
        """Under strict priorities, preempt the running request of highest rank if it is of lower priority."""
        if not self._preempts_for_priority or not self.running:
            return False
        worst = max(self.running, key=lambda running: running.rank)
        if worst.request.priority <= state.request.priority:
            return False
        self._preempt(worst)
        return True

    def release(self, state: RequestState) -> None:
        """Return the slot and the pages of a running request."""
        self.pool.free(self.table.pages(state))
        self.table.release(state)
        self.running.remove(state)

    def _preempt(self, state: RequestState) -> None:
        self.release(state)
        state.forget_kv()
        self.queue.put_back(state)
        self.preemptions += 1

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots, pages and progress of all running requests agree."""
        self.pool.check_integrity()
        held = sum(state.num_pages for state in self.running)
        if held != self.pool.num_used:
            raise IntegrityError(f"running requests hold {held} pages, the pool says {self.pool.num_used}")
        slots = {state.slot for state in self.running}
        if len(slots) != len(self.running) or len(slots) + self.table.num_free != self.limits.max_requests:
            raise IntegrityError("a slot is held twice or lost")
        for state in self.running:
            self._check_request(state)

    def _check_request(self, state: RequestState) -> None:
        name = state.request.request_id
        if (self.pool.references(self.table.pages(state)) < 1).any():
            raise IntegrityError(f"request {name!r} holds a free page")
        if self.table.page_table[state.slot, state.num_pages :].any():
            raise IntegrityError(f"request {name!r} has page ids beyond its pages")
        if state.pending < 1 or not 0 <= state.draft_computed <= state.num_tokens:
            raise IntegrityError(f"request {name!r} counts more computed tokens than it has")
        if state.num_computed > state.num_pages * self.limits.page_size:
            raise IntegrityError(f"request {name!r} has KV beyond its pages")
