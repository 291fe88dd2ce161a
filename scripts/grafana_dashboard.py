"""Writes deploy/grafana/adaserve.json, a dashboard of the metrics in docs/prometheus.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "adaserve.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 24, 8
ON = 'job=~"$job", instance=~"$instance"'
CLASS = f'{ON}, class=~"$class"'
SPAN = "[$__rate_interval]"


def rate(metric: str, labels: str = ON, by: str = "") -> str:
    """Return a rate per second, summed over servers, or over all but the label `by`."""
    return f"sum{f' by ({by})' if by else ''} (rate(adaserve_{metric}{{{labels}}}{SPAN}))"


def by_server(metric: str) -> str:
    """Return a rate per second of each server."""
    return f"avg by (instance) (rate(adaserve_{metric}{{{ON}}}{SPAN}))"


def gauge(metric: str, how: str = "sum", by: str = "") -> str:
    return f"{how}{f' by ({by})' if by else ''} (adaserve_{metric}{{{ON}}})"


def quantiles(metric: str) -> list[tuple[str, str]]:
    buckets = rate(f"{metric}_bucket", by="le")
    return [(f"histogram_quantile({q}, {buckets})", f"p{q * 100:g}") for q in (0.5, 0.9, 0.99)]


def mean(metric: str) -> str:
    return f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}"


ALL_TARGETS = f'{CLASS}, metric="all"'


def attainment(of: str, by: str = "") -> str:
    """Return the share of choices that met their targets, of those with one that their client did not cancel."""
    metric = "slo_requests_total"
    met, judged = (f"{of}, {outcome}" for outcome in ('outcome="met"', 'outcome!="cancelled"'))
    return f"{rate(metric, met, by)} / {rate(metric, judged, by)}"


Panel = tuple[str, str, str, int, list[tuple[str, str]], dict[str, Any]]
"""Title, kind, unit, width of 24, (expression, legend), field settings."""
SHARE = {"min": 0, "max": 1}
STACKED = {"custom": {"stacking": {"mode": "normal"}, "fillOpacity": 40, "lineWidth": 1}}
ALARM = {
    "thresholds": {"mode": "absolute", "steps": [{"color": "blue", "value": None}, {"color": "orange", "value": 1}]}
}
BELOW = {
    "thresholds": {
        "mode": "absolute",
        "steps": [
            {"color": "orange", "value": None},
            {"color": "yellow", "value": 0.9},
            {"color": "blue", "value": 0.97},
        ],
    }
}
MET = attainment(ALL_TARGETS)
ROWS: dict[str, list[Panel]] = {
    "Targets": [
        ("Attainment", "stat", "percentunit", 4, [(MET, "")], SHARE | BELOW),
        (
            "Attainment by class and target", "timeseries", "percentunit", 10,
            [(attainment(CLASS, "class, metric"), "{{class}} {{metric}}")], SHARE,
        ),
        (
            "Choices with a target, by outcome", "timeseries", "reqps", 10,
            [(rate("slo_requests_total", ALL_TARGETS, "outcome"), "{{outcome}}")], STACKED,
        ),
        (
            "TPOT over target", "heatmap", "short", 12,
            [(f"sum by (le) (increase(adaserve_tpot_over_target_bucket{{{ON}}}{SPAN}))", "{{le}}")], {},
        ),
        ("Time to first token", "timeseries", "s", 12, quantiles("time_to_first_token_seconds"), {}),
    ],
    "Load": [
        (
            "Tokens per second", "timeseries", "short", 8,
            [(rate("generation_tokens_total"), "generated"), (rate("prompt_tokens_total"), "prompt")], {},
        ),
        (
            "Requests", "timeseries", "short", 8,
            [(gauge("requests_running"), "running"), (gauge("requests_waiting"), "waiting")], {},
        ),
        (
            "Choices that ended, by reason", "timeseries", "reqps", 8,
            [(rate("requests_finished_total", by="reason"), "{{reason}}")], STACKED,
        ),
        ("Gap between tokens", "timeseries", "s", 8, quantiles("inter_token_latency_seconds"), {}),
        ("Arrival to last token", "timeseries", "s", 8, quantiles("e2e_seconds"), {}),
        (
            "Mean time of a request", "timeseries", "s", 8,
            [(mean(f"{part}_seconds"), part) for part in ("queue", "prefill", "decode")],
            STACKED,
        ),
    ],
    "Speculation": [
        (
            "Draft tokens accepted", "timeseries", "percentunit", 8,
            [(f"{rate('spec_accepted_tokens_total')} / {rate('spec_draft_tokens_total')}", "accepted")], SHARE,
        ),
        (
            "Accepted by depth in the tree", "timeseries", "short", 8,
            [(rate("spec_accepted_tokens_per_position_total", by="position"), "{{position}}")], STACKED,
        ),
        (
            "Steps", "timeseries", "short", 8,
            [(rate("steps_total"), "all"), (rate("spec_drafts_total"), "that speculated")], {},
        ),
        (
            "Depth, width and budget of the last step", "timeseries", "short", 8,
            [(gauge(f"step_{name}", "avg"), name) for name in ("depth", "width", "budget")], {},
        ),
        (
            "Seconds per second, by phase", "timeseries", "percentunit", 8,
            [(rate("step_seconds_total", f'{ON}, phase!="wait"', "phase"), "{{phase}}")], STACKED,
        ),
        (
            "Calibration error of acceptance", "timeseries", "percentunit", 8,
            [(gauge("calibration_error", "avg", "rows, prediction"), "{{rows}} {{prediction}}")], {"min": 0},
        ),
    ],
    "Learning": [
        (
            "Draft tokens accepted, by draft", "timeseries", "percentunit", 8,
            [(f"{rate('draft_accepted_tokens_total', by='draft')} / {rate('draft_drafted_tokens_total', by='draft')}",
              "{{draft}}")], SHARE,
        ),
        (
            "Acceptance on held-out requests", "timeseries", "percentunit", 8,
            [(gauge("learning_held_out_acceptance", "avg", "draft"), "{{draft}}")], SHARE,
        ),
        (
            "Updates", "timeseries", "short", 8,
            [(rate(f"learning_{name}_total", by="draft"), f"{{{{draft}}}} {text}")
             for name, text in (("updates", "serve"), ("refused", "refused"), ("rolled_back", "rolled back"))], {},
        ),
        (
            "Loss of the latest update", "timeseries", "short", 8,
            [(gauge("learning_loss", "avg", "draft"), "{{draft}}")], {},
        ),
        (
            "Choices kept to learn from", "timeseries", "short", 8,
            [(gauge("learning_records", by="draft"), "{{draft}}"),
             (gauge("learning_held_out_records", by="draft"), "{{draft}} held out")], {},
        ),
        (
            "Share of the time that training takes", "timeseries", "percentunit", 8,
            [(by_server("learning_train_seconds_total"), "{{instance}}"),
             (by_server("learning_delay_seconds_total"), "{{instance}} while requests waited")], SHARE,
        ),
    ],
    "Draft services": [
        (
            "Trees", "timeseries", "short", 8,
            [(rate(f"drafter_{name}_total"), text)
             for name, text in (("trees", "in time"), ("late", "late"), ("refused", "refused"))], {},
        ),
        (
            "Mean round, and wait of a round", "timeseries", "s", 8,
            [(f"{rate(f'drafter_{name}_seconds_total')} / {rate('drafter_rounds_total')}", name)
             for name in ("round", "wait")], {"min": 0},
        ),
        (
            "Services left alone or tried", "timeseries", "short", 8,
            [(f'sum by (service, state) (adaserve_drafter_breaker{{{ON}, state!="closed"}})',
              "{{service}} {{state}}")], {"min": 0},
        ),
        (
            "Share of the time that services work", "timeseries", "percentunit", 8,
            [(gauge("drafter_busy", "max", "service"), "{{service}}")], SHARE,
        ),
        ("Sessions", "timeseries", "short", 8, [(gauge("drafter_sessions", by="service"), "{{service}}")], STACKED),
        (
            "Streams lost, sessions sent anew and moved", "timeseries", "short", 8,
            [(rate(f"drafter_{name}_total"), text)
             for name, text in (("lost", "lost"), ("resyncs", "anew"), ("moved", "moved"))], {},
        ),
    ],
    "Memory": [
        (
            "KV pages", "timeseries", "short", 8,
            [(gauge("kv_pages", by="slab, state"), "{{slab}} {{state}}")], STACKED,
        ),
        (
            "KV pages in use", "timeseries", "percentunit", 8,
            [(gauge("kv_cache_usage_ratio", "max"), "fullest")], SHARE,
        ),
        (
            "Prompt tokens found in the prefix cache", "timeseries", "percentunit", 8,
            [(f"{rate('prefix_cache_hits_total')} / {rate('prefix_cache_queries_total')}", "found")], SHARE,
        ),
        (
            "Servers with the draft on the device", "timeseries", "short", 8,
            [(gauge("draft_resident"), "resident")], {"min": 0},
        ),
        (
            "Swaps of draft and pages", "timeseries", "short", 8,
            [(rate("swaps_total", by="kind"), "{{kind}}"), (rate("swap_seconds_total"), "share of time")], {},
        ),
        ("Preemptions", "timeseries", "short", 8, [(rate("preemptions_total"), "per second")], {}),
    ],
    "Health": [
        (
            "Seconds since the last step", "timeseries", "s", 8,
            [(gauge("step_age_seconds", "max", "instance"), "{{instance}}")], {},
        ),
        ("Compilations after ready", "stat", "short", 4, [(gauge("compiles_after_ready_total"), "")], ALARM),
        (
            "Seconds lost to arms that were not best", "timeseries", "s", 12,
            [(gauge("arm_regret_seconds", "sum", "instance"), "{{instance}}")], {},
        ),
    ],
}  # fmt: skip


def panels() -> list[dict[str, Any]]:
    """Return the panels: rows from the top, panels from the left, in Grafana's grid of 24 columns."""
    made: list[dict[str, Any]] = []
    y = 0
    for name, row in ROWS.items():
        made.append({"id": len(made) + 1, "type": "row", "title": name, "gridPos": _place(0, y, WIDTH, 1)})
        x, y = 0, y + 1
        for title, kind, unit, width, queries, settings in row:
            if x + width > WIDTH:
                x, y = 0, y + HEIGHT
            made.append({
                "id": len(made) + 1, "type": kind, "title": title, "datasource": SOURCE,
                "gridPos": _place(x, y, width, HEIGHT),
                "fieldConfig": {"defaults": {"unit": unit} | settings, "overrides": []},
                "options": _options(kind),
                "targets": [
                    {
                        "refId": chr(ord("A") + i), "datasource": SOURCE, "expr": expression, "legendFormat": legend,
                        "format": "heatmap" if kind == "heatmap" else "time_series",
                    }
                    for i, (expression, legend) in enumerate(queries)
                ],
            })  # fmt: skip
            x += width
        y += HEIGHT
    return made


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "graphMode": "area"}
    if kind == "heatmap":
        return {"calculate": False, "color": {"scheme": "Oranges"}, "yAxis": {"reverse": False}}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}


def _variable(name: str, label: str, of: str) -> dict[str, Any]:
    return {
        "name": name, "label": label, "type": "query", "datasource": SOURCE, "query": f"label_values({of}, {name})",
        "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        _variable("job", "Job", "adaserve_steps_total"),
        _variable("instance", "Server", "adaserve_steps_total"),
        _variable("class", "Class", "adaserve_slo_requests_total"),
    ]
    return {
        "uid": "adaserve", "title": "adaserve", "tags": ["llm", "adaserve"], "schemaVersion": 39, "editable": True,
        "time": {"from": "now-1h", "to": "now"}, "refresh": "10s", "templating": {"list": variables},
        "panels": panels(),
    }  # fmt: skip


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


def main() -> None:
    FILE.write_text(text())


if __name__ == "__main__":
    main()
