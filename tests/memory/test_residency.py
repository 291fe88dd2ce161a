"""When the draft's memory becomes pages, and when it comes back: by sequences of steps made by hand."""

from dataclasses import replace

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.residency import LONGEST_WAIT, ElasticRule, PagePressure, Residency

RULE = ElasticRule(tau_low=0.1, persist_steps=4, min_stay_steps=6)
PLENTY = PagePressure(free_pages=1000, blocked_on_pages=False, waiting=0, running=3)
ENOUGH = PagePressure(free_pages=10, blocked_on_pages=False, waiting=0, running=3)
SHORT = PagePressure(free_pages=9, blocked_on_pages=False, waiting=0, running=3)
TURNED_AWAY = PagePressure(free_pages=50, blocked_on_pages=True, waiting=2, running=3)


def residency(rule: ElasticRule = RULE, **pages) -> Residency:
    """100 base pages, so that fewer than 10 are short; 20 more while expanded."""
    return Residency(rule, **{"base_pages": 100, "extension_pages": 20, **pages})


def expanded() -> Residency:
    each = residency()
    each.succeeded("expand")
    return each


def swaps(each: Residency, steps: list[tuple[PagePressure, bool | None]]) -> list[str | None]:
    return [each.due(pressure, speculates) for pressure, speculates in steps]


class TestExpand:
    def test_after_pages_were_short_and_speculation_off_for_so_many_steps_on_end(self) -> None:
        assert swaps(residency(), [(SHORT, False)] * 5) == [None, None, None, "expand", "expand"]

    @pytest.mark.parametrize("between", [(SHORT, True), (ENOUGH, False), (PLENTY, True)])
    def test_one_other_step_begins_the_count_anew(self, between) -> None:
        steps = [(SHORT, False)] * 3 + [between] + [(SHORT, False)] * 4
        assert swaps(residency(), steps) == [None] * 7 + ["expand"]

    def test_a_step_of_prompts_alone_decides_nothing_and_does_not_count(self) -> None:
        steps = [(SHORT, False)] * 3 + [(SHORT, None)] * 2 + [(SHORT, False)]
        assert swaps(residency(), steps) == [None] * 5 + ["expand"]
        assert swaps(residency(), [(SHORT, None)] * 9) == [None] * 9

    def test_whoever_was_turned_away_for_pages_makes_them_short_however_many_are_free(self) -> None:
        assert swaps(residency(), [(TURNED_AWAY, False)] * 4)[-1] == "expand"
        assert swaps(residency(), [(ENOUGH, False)] * 9) == [None] * 9

    def test_tau_low_is_rounded_up(self) -> None:
        assert [residency(base_pages=pages).tau_low_pages for pages in (1, 10, 11, 100)] == [1, 1, 2, 10]

    def test_where_worth_is_asked_speculation_may_be_on_and_a_no_holds_for_as_many_steps(self) -> None:
        each, answers = residency(), iter([False, True])
        due = [each.due(SHORT, True, lambda: next(answers)) for _ in range(8)]
        assert due == [None] * 7 + ["expand"]
        each = residency()
        steps = [(SHORT, True)] * 3 + [(ENOUGH, True)] + [(SHORT, False)] * 4
        assert [each.due(*step, lambda: True) for step in steps] == [None] * 7 + ["expand"]
        each, answers = residency(), iter([False, True])
        steps = [(SHORT, True)] * 4 + [(SHORT, None)] * 3 + [(SHORT, True)] * 4  # steps of prompts ask nothing
        assert [each.due(*step, lambda: next(answers)) for step in steps] == [None] * 10 + ["expand"]


class TestContract:
    def test_when_nobody_waits_for_pages_and_the_draft_and_tau_low_fit_what_is_spare(self) -> None:
        """20 pages go and 10 must be left: more than 30. The minimum stay of 6 steps is over at the sixth. Who
        waits for a slot, or for a pace that the draft could keep, must not keep the draft away."""
        for spare, blocked_on_pages, due in [(31, False, "contract"), (30, False, None), (31, True, None)]:
            pressure = PagePressure(spare, blocked_on_pages, waiting=1, running=3)
            assert swaps(expanded(), [(pressure, False)] * 6) == [None] * 5 + [due]

    def test_at_once_when_nothing_runs_or_waits(self) -> None:
        idle = PagePressure(free_pages=120, blocked_on_pages=False, waiting=0, running=0)
        assert expanded().due(idle, False) == "contract"

    def test_who_was_turned_away_and_has_left_keeps_no_draft_away(self) -> None:
        left = PagePressure(free_pages=120, blocked_on_pages=True, waiting=0, running=0)
        assert expanded().due(left, None) == "contract"

    @pytest.mark.parametrize(("waiting", "running"), [(1, 0), (0, 1)])
    def test_who_waits_or_runs_has_the_minimum_stay_and_what_it_is_turned_away_for(
        self, waiting: int, running: int
    ) -> None:
        pressure = PagePressure(free_pages=120, blocked_on_pages=False, waiting=waiting, running=running)
        assert swaps(expanded(), [(pressure, False)] * 6) == [None] * 5 + ["contract"]
        assert swaps(expanded(), [(replace(pressure, blocked_on_pages=True), False)] * 9) == [None] * 9

    def test_what_is_left_then_is_not_short(self) -> None:
        """The least spare at which it contracts, and the same after that."""
        each = expanded()
        assert swaps(each, [(PagePressure(31, False, 0, 3), False)] * 6)[-1] == "contract"
        each.succeeded("contract")
        each.succeeded("reload")
        assert swaps(each, [(PagePressure(31 - 20, False, 0, 3), False)] * 40) == [None] * 40

    def test_is_not_asked_for_where_the_draft_is(self) -> None:
        assert swaps(residency(), [(PLENTY, False)] * 9) == [None] * 9


class TestReload:
    def test_is_asked_for_in_every_step_until_it_is_there(self) -> None:
        each = expanded()
        each.succeeded("contract")
        assert each.state == "loading" and not each.draft_is_here
        assert swaps(each, [(SHORT, False)] * 3) == ["reload"] * 3
        each.succeeded("reload")
        assert each.draft_is_here

    def test_then_the_draft_stays_a_while_however_short_pages_are(self) -> None:
        each = expanded()
        each.succeeded("contract")
        each.succeeded("reload")
        assert swaps(each, [(SHORT, False)] * 6) == [None] * 5 + ["expand"]


class TestFailures:
    def test_the_next_try_waits_twice_as_long_each_time(self) -> None:
        each, tries = residency(), []
        for step in range(1, 60):
            if each.due(SHORT, False):
                tries.append(step)
                each.failed()
        assert tries == [4, 10, 22, 46], "6, 12 and 24 steps apart"

    @pytest.mark.parametrize("state", ["expand", "contract"])
    def test_the_state_stays(self, state) -> None:
        each = residency()
        each.succeeded(state)
        before = each.state
        each.failed()
        assert each.state == before

    def test_a_load_that_fails_is_asked_for_again_after_the_wait(self) -> None:
        each = expanded()
        each.succeeded("contract")
        assert each.due(SHORT, False) == "reload"
        each.failed()
        assert swaps(each, [(SHORT, False)] * 7) == [None] * 5 + ["reload"] * 2

    def test_no_wait_is_longer_than_the_longest_and_success_forgets_them(self) -> None:
        each = residency()
        for _ in range(99):
            each.failed()
        tried = next(step for step in range(1, 2 * LONGEST_WAIT) if each.due(SHORT, False))
        assert tried == LONGEST_WAIT
        each.succeeded("expand")
        assert swaps(each, [(PLENTY, False)] * 6)[-1] == "contract"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tau_low": 0.0}, "tau_low must be a share of the base pages above 0 and below 1, got 0.0"),
        ({"tau_low": 1.0}, "got 1.0"),
        ({"persist_steps": 0}, "persist_steps and min_stay_steps must be at least 1, got 0 and 64"),
        ({"min_stay_steps": 0}, "got 16 and 0"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ElasticRule(**values)
