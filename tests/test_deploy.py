"""The Grafana dashboard and the alert rules ask only for metrics and labels that a server has."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import yaml
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from adaserve_jax.cluster.forwarding import RouterMetrics
from adaserve_jax.cluster.targets import TargetSet
from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.client import EngineStats
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.server.metrics import ServerMetrics
from adaserve_jax.server.observers import EndedChoice, Origin
from adaserve_jax.stats import DrafterStats, LearningStats, ServiceState, StepStats
from scripts import grafana_dashboard
from tests.conftest import ROOT
from tests.server.scripted import ScriptedEngine

GRAFANA = json.loads((ROOT / "deploy" / "grafana" / "adaserve.json").read_text())
RULES = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
OF_THE_SCRAPE = {"job", "instance"}
PANELS = [panel for panel in GRAFANA["panels"] if panel["type"] != "row"]
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def exposed() -> dict[str, dict[str, set[str]]]:
    """Labels of every sample by name, and the values that each label has."""
    engine = ScriptedEngine(EngineConfig())
    stats = StepStats(
        accepted_per_position=[1], finished={"stop": 1, "error": 1}, elastic_moves={"expand": 1},
        elastic_s={"expand": 1.0},
        arms={"8": "off"},
        calibration_outcomes={"greedy": 1}, calibration_error={"greedy": {"raw": 0.1}},
    )  # fmt: skip
    by_draft = {"default": 1}
    learning = LearningStats(
        version=by_draft, drafted_tokens=by_draft, accepted_tokens=by_draft, held_out_acceptance={"default": 0.5},
        loss={"default": 0.5}, updates=by_draft, refused=by_draft, rolled_back=by_draft, records=by_draft,
        held_out=by_draft, left_out={"opt_out": 1},
    )  # fmt: skip
    drafter = DrafterStats(services={"host:1": ServiceState()})
    engine.stats = lambda: EngineStats(stats, learning=learning, drafter=drafter)
    metrics = ServerMetrics(engine)
    done = RequestMetrics(0.0, 0.0, 1.0, 2.0, output_tokens=2, tpot_slo_s=1.0, ttft_slo_s=1.0)
    choice = EndedChoice(Origin("r"), 0, "stop", None, "default", 1.0, 1.0, done)
    for each in (
        choice,
        replace(choice, metrics=replace(done, tpot_slo_s=0.1)),
        replace(choice, ending="rejected", metrics=None),
        replace(choice, ending="cancelled"),
    ):
        metrics.observe_end(each)
    found: dict[str, dict[str, set[str]]] = {}

    async def of_a_router() -> bytes:  # its pools live on an event loop
        return generate_latest(RouterMetrics(TargetSet(["http://host:1"])).registry)

    router = asyncio.run(of_a_router())
    for family in text_string_to_metric_families((metrics.text() + router).decode()):
        for sample in family.samples:
            labels = found.setdefault(sample.name, {})
            for label, value in sample.labels.items():
                labels.setdefault(label, set()).add(value)
    return found


def expressions() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in GRAFANA["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            yield variable["name"], f"sum by ({label}) ({metric})"
    for rule in ALERTS:
        yield rule.get("alert") or rule["record"], rule["expr"]


def test_expressions_name_metrics_and_labels_that_exist(exposed):
    found = list(expressions())
    assert len(found) > 70
    for where, expression in found:
        check_names(where, expression, exposed)


def check_names(where: str, expression: str, exposed: dict[str, dict[str, set[str]]]) -> None:
    selectors = re.findall(r"\b((?:adaserve_|up\b)\w*)(?:\{([^}]*)\})?", expression)
    assert selectors, where
    known: set[str] = set(OF_THE_SCRAPE)
    for metric, matchers in selectors:
        if metric == "up":  # Prometheus' own, of each scrape
            assert {label for label, _, _ in matched(matchers)} <= OF_THE_SCRAPE, where
            continue
        assert metric in exposed, where
        known |= set(exposed[metric])
        for label, how, value in matched(matchers):
            assert label in OF_THE_SCRAPE | set(exposed[metric]), where
            if how in ("=", "!="):
                assert value in exposed[metric][label], where
    grouped = {name.strip() for names in re.findall(r"\bby \(([^)]*)\)", expression) for name in names.split(",")}
    assert grouped <= known, where


def matched(matchers: str) -> list[tuple[str, str, str]]:
    found = re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', matchers)
    assert len(found) == (matchers.count(",") + 1 if matchers else 0)
    return found


def test_counters_are_read_through_rates():
    """But for one, of which any count is too many."""
    asked = [t["expr"] for panel in PANELS for t in panel["targets"]] + [rule["expr"] for rule in ALERTS]
    for expression in asked:
        for found in re.finditer(r"adaserve_\w+_(?:total|sum|count|bucket)\b", expression):
            if found.group() != "adaserve_compiles_after_ready_total":
                assert expression[: found.start()].endswith(("rate(", "increase(")), expression


def test_every_legend_names_a_label_that_its_expression_keeps():
    for panel in PANELS:
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = {n.strip() for names in re.findall(r"\bby \(([^)]*)\)", target["expr"]) for n in names.split(",")}
            assert named <= kept, panel["title"]


def test_panels_do_not_overlap_and_use_the_variable_for_their_source():
    taken: set[tuple[int, int]] = set()
    for panel in GRAFANA["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and all(x < 24 for x, _ in cells)
        taken |= cells
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
    assert [v["name"] for v in GRAFANA["templating"]["list"]] == ["datasource", "job", "instance", "class"]
    assert len({panel["id"] for panel in GRAFANA["panels"]}) == len(GRAFANA["panels"])


def test_the_dashboard_is_what_its_script_writes():
    assert grafana_dashboard.FILE.read_text() == grafana_dashboard.text(), "run: python scripts/grafana_dashboard.py"


def test_every_alert_says_what_happened_and_how_bad_it_is():
    alerts = [rule for rule in ALERTS if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) >= 5
    for rule in alerts:
        assert set(rule["annotations"]) == {"summary", "description"} and rule["labels"]["severity"] in (
            "warning",
            "critical",
        )
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        kept = {n.strip() for names in re.findall(r"\bby \(([^)]*)\)", rule["expr"]) for n in names.split(",")}
        assert named <= (kept or OF_THE_SCRAPE)
