"""Targets by class: whom a table gives which, and what it cannot be applied to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import WorkloadItem
from adaserve_jax.workloads.workload import parse_slos

ITEM = WorkloadItem("p", (), 8, "chat", SLO(), 1.0, None, None)


def item(slo_class: str, slo: SLO) -> WorkloadItem:
    return replace(ITEM, slo_class=slo_class, slo=slo)


OWN = SLO(tpot_ms=30.0)
ITEMS = [item("code", OWN), item("chat", OWN), item("math", OWN), item("math", SLO()), item("math", SLO(ttft_ms=9.0))]


def test_named_classes_get_theirs_and_the_rest_only_where_it_has_none():
    table = parse_slos(" code : relative=1.2 , ttft=4000 ; chat:none;*:tpot=100")
    assert [each.slo for each in table.apply(ITEMS, "w")] == [
        SLO(relative=1.2, ttft_ms=4000.0), SLO(), OWN, SLO(tpot_ms=100.0), SLO(ttft_ms=9.0),
    ]  # fmt: skip
    assert [each.slo for each in parse_slos("code:tpot=5").apply(ITEMS, "w")] == [
        SLO(tpot_ms=5.0), *(each.slo for each in ITEMS[1:]),
    ]  # fmt: skip
    assert [replace(each, slo=SLO()) for each in table.apply(ITEMS, "w")] == [
        replace(each, slo=SLO()) for each in ITEMS
    ]


def test_a_class_that_the_workload_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="slos: workload w has no class 'poems'; it has chat, code, math"):
        parse_slos("code:tpot=5;poems:tpot=5").apply(ITEMS, "w")
    assert parse_slos("*:tpot=5").apply([], "w") == []
