"""Workloads made from workloads: what changes, what stays, and that name and hash say so."""

from __future__ import annotations

from collections import Counter

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import Lengths, Message, Workload, WorkloadItem
from adaserve_jax.workloads.mixing import (
    LengthLimits,
    as_chat,
    parse_lengths,
    with_lengths,
    with_slo_scale,
    with_urgent_share,
)
from adaserve_jax.workloads.workload import load_workload


def item(text: str | None = "p", name: str = "code", slo: SLO | None = None, **more) -> WorkloadItem:
    fields = {"temperature": 1.0, "seed": None, "arrival_s": None, **more}
    return WorkloadItem(text, (), 8, name, slo or SLO(), **fields)


def trace(*classes: str) -> Workload:
    slos = {"code": SLO(relative=1.2), "chat": SLO(tpot_ms=50)}
    items = (item(f"{name} {i}", name, slos[name], arrival_s=i / 2) for i, name in enumerate(classes))
    return Workload("t", "0", tuple(items))


def counts(workload: Workload) -> Counter[str]:
    return Counter(each.slo_class for each in workload.items)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.33, 0.515, 0.6, 0.9, 1.0])
def test_the_share_is_hit_and_the_others_keep_their_proportion(share: float):
    """The packaged workload: 36 code, 12 chat, 12 summary."""
    mixed = with_urgent_share(load_workload(), share)
    total = len(mixed.items)
    found = counts(mixed)
    assert found["code"] == round(share * total)
    assert abs(found["chat"] - found["summary"]) <= 1 and total == 60


def test_as_few_requests_as_can_be_are_replaced_and_times_stay():
    base = trace(*["code", "chat"] * 10)
    same, more, less = (with_urgent_share(base, share) for share in (0.5, 0.7, 0.2))
    assert same.items == base.items
    for mixed, changed in ((more, 4), (less, 6)):
        assert [each.arrival_s for each in mixed.items] == [each.arrival_s for each in base.items]
        assert sum(a != b for a, b in zip(mixed.items, base.items, strict=True)) == changed
        bodies = {each.prompt for each in base.items}
        assert all(each.prompt in bodies for each in mixed.items)
    urgent = [{i for i, each in enumerate(w.items) if each.slo_class == "code"} for w in (less, same, more)]
    assert urgent[0] < urgent[1] < urgent[2], "with a greater share, those that were urgent stay so"


def test_a_small_workload_is_repeated_until_the_share_fits_and_one_with_times_is_not():
    timed = trace("code", "chat", "chat")
    mixed = with_urgent_share(timed, 0.5)
    assert len(mixed.items) == 3
    untimed = Workload("u", "0", tuple(item(e.prompt, e.slo_class, e.slo) for e in timed.items))
    assert counts(with_urgent_share(untimed, 0.5)) == {"code": 3, "chat": 3}
    assert len(with_urgent_share(untimed, 1 / 3).items) == 3


def test_the_most_urgent_class_is_found_or_asked_for():
    slos = {"a": SLO(tpot_ms=30), "b": SLO(tpot_ms=80), "c": SLO()}
    by_ms = Workload("w", "0", tuple(item("p", name, slo) for name, slo in slos.items()))
    assert counts(with_urgent_share(by_ms, 1.0)) == {"a": 3}
    none = Workload("w", "0", (item(name="a"), item(name="b")))
    with pytest.raises(ConfigError, match=r"workload w must have one class that is the most urgent.* a, b; .*--slos"):
        with_urgent_share(none, 0.5)
    two = Workload("w", "0", (item(name="a", slo=SLO(relative=1.5)), item(name="b", slo=SLO(relative=1.2))))
    with pytest.raises(ConfigError, match="one class that is the most urgent"):
        with_urgent_share(two, 0.5)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (1.5, "urgent share: expected a number from 0 to 1, got 1.5"),
        (0.5, "0.5 of class 'code' needs requests of that class and of another; workload t has code"),
    ],
)
def test_shares_that_cannot_be_are_refused(share: float, message: str):
    with pytest.raises(ConfigError) as told:
        with_urgent_share(trace("code"), share)
    assert message in str(told.value)


def test_relative_targets_are_scaled_and_others_stay():
    scaled = with_slo_scale(load_workload(), 0.8)
    for before, after in zip(load_workload().items, scaled.items, strict=True):
        expected = before.slo if before.slo.relative is None else SLO(relative=0.8, ttft_ms=before.slo.ttft_ms)
        assert after.slo == expected
    with pytest.raises(ConfigError, match="SLO scale: workload t has no request whose target is relative"):
        with_slo_scale(trace("chat"), 0.8)
    with pytest.raises(ConfigError, match="SLO scale: "):
        with_slo_scale(trace("code"), -1.0)


def by_length(prompt: int, output: int, blocks: tuple[int, ...] = ()) -> Workload:
    lengths = Lengths(prompt, output, blocks)
    return Workload("w", "0", (item(None, lengths=lengths), item("text")))


@pytest.mark.parametrize(
    ("before", "limits", "after"),
    [
        (Lengths(1000, 300), LengthLimits(0.1), Lengths(100, 300)),
        (Lengths(1000, 300), LengthLimits(most_output=64), Lengths(1000, 64)),
        (Lengths(1000, 300), LengthLimits(most_context=512), Lengths(212, 300)),
        (Lengths(1000, 300), LengthLimits(0.4, 64, 512), Lengths(400, 64)),
        (Lengths(3, 1), LengthLimits(0.01), Lengths(1, 1)),
        # blocks of 512 tokens become 51, and 1,100 tokens 1,100 * 51 / 512 = 109.6
        (Lengths(1100, 9, (4, 5, 6)), LengthLimits(0.1), Lengths(110, 9, (4, 5, 6), 51)),
        (Lengths(1100, 9, (4, 5, 6)), LengthLimits(0.1, 9, 100), Lengths(91, 9, (4, 5), 51)),
        (Lengths(1100, 9, (4, 5, 6)), LengthLimits(most_context=521), Lengths(512, 9, (4,), 512)),
    ],
)
def test_lengths_are_cut_and_blocks_with_them(before: Lengths, limits: LengthLimits, after: Lengths):
    short, text = with_lengths(by_length(before.prompt_tokens, before.output_tokens, before.blocks), limits).items
    assert short.lengths == after
    assert short.max_tokens == after.output_tokens
    assert text == item("text")


def test_lengths_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="an output of 300 tokens leaves no room for a prompt in 200 tokens"):
        with_lengths(by_length(1000, 300), LengthLimits(most_context=200))
    with pytest.raises(ConfigError, match="workload packaged has texts, and no request that is known by length only"):
        with_lengths(load_workload(), LengthLimits(0.5))


def test_limits_are_read():
    assert parse_lengths("scale=0.05, output=64,context=512") == LengthLimits(0.05, 64, 512)
    assert str(LengthLimits(0.05, 64, 512)) == "scale=0.05,output=64,context=512"
    for text in ("", "scale", "scale=0", "output=1.5", "output=1,output=2", "prompt=3", "context=inf", "scale=x"):
        with pytest.raises(ConfigError, match=r"lengths: expected scale .a number above 0., output and context"):
            parse_lengths(text)


def test_prompts_become_chats_and_chats_stay():
    chat = WorkloadItem(None, (Message("system", "s"),), 8, "chat", SLO(), 1.0, None, None)
    lengths = item(None, lengths=Lengths(3, 4))
    made = as_chat(Workload("w", "0", (item("hello"), chat, lengths)))
    assert (made.items[0].prompt, made.items[0].messages) == (None, (Message("user", "hello"),))
    assert made.items[1:] == (chat, lengths)


def test_every_derivation_has_a_hash_and_a_name_of_its_own():
    base = Workload("w", "0", (*trace("code", "chat").items, *by_length(9, 9).items))
    made = [
        base,
        with_urgent_share(base, 0.25),
        with_urgent_share(base, 0.5),
        with_slo_scale(base, 0.5),
        with_slo_scale(base, 0.6),
        with_slo_scale(with_slo_scale(base, 0.5), 0.6),
        with_lengths(base, LengthLimits(0.5)),
        with_lengths(base, LengthLimits(0.5, 4)),
        as_chat(base),
    ]
    assert len({each.sha256 for each in made}) == len({each.name for each in made}) == len(made)
    assert with_slo_scale(base, 0.5) == with_slo_scale(base, 0.5)
