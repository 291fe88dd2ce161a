"""docs/http.md, prometheus.md and the OpenAPI document lack no route, field, header, code, setting or metric."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import adaserve_jax
from adaserve_jax import cluster
from adaserve_jax.errors import ConfigError
from adaserve_jax.server import errors
from adaserve_jax.server.settings import KeySettings, ServerSettings, SloClass
from tests.documents import rows, section

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
TEXT = (DOCS / "http.md").read_text()
METHODS = ("get", "post", "put", "delete", "patch")


def labels_of(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Of every counter and gauge that has labels, also where nothing was counted yet."""
    found: dict[str, set[str]] = {}
    for metric in (*registry._collector_to_names, *registry.collect()):
        if getattr(metric, "_labelnames", ()):
            kind = getattr(metric, "type", None) or getattr(metric, "_type", "")
            name = metric.name if hasattr(metric, "name") else metric._name
            found[name + ("_total" if kind == "counter" else "")] = set(metric._labelnames) - {"le"}
    return found


def test_every_metric_is_documented_with_its_type_and_labels_and_no_other(server):
    server.post(prompt="x", slo_tpot_ms=5)
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    exposed = {family.name + ("_total" if family.type == "counter" else ""): family for family in families}
    exposed = {name: family for name, family in exposed.items() if not name.endswith("_created")}  # by the library
    documented = {row.names[0]: row for row in rows(section("prometheus.md", "## Server"))}
    assert sorted(exposed) == sorted(documented)
    for name, family in exposed.items():
        kind, *labels = documented[name].cells[1].replace("`", "").split(", ")
        assert kind == family.type, name
        shown = [set(sample.labels) - {"le"} for sample in family.samples]
        assert all(each == set(labels) for each in shown), name
        assert not labels or shown or set(labels) == labels_of(server.state.metrics.registry)[name], name


def test_every_code_is_documented_in_its_words():
    for code, meaning in errors.CODES.items():
        assert f"| `{code}` | {meaning} |" in TEXT


def test_every_code_in_the_source_is_one_of_the_table():
    files = Path(adaserve_jax.__file__).parent.rglob("*.py")
    others = ("bench", "star", "cluster")  # codes of a bench's rows, draft services and routers are not of its answers
    used = _codes_in(path for path in files if path.parent.name not in others)
    assert used and used <= set(errors.CODES)


def test_every_code_of_a_router_is_a_servers_or_in_its_own_table():
    own = set(re.findall(r"^\| `(\w+)` \| \d", (DOCS / "cluster.md").read_text(), re.MULTILINE))
    used = _codes_in(Path(cluster.__file__).parent.glob("*.py"))
    assert own and "not_routed" in used and used <= set(errors.CODES) | own


def _codes_in(files: Iterable[Path]) -> set[str]:
    source = "".join(path.read_text() for path in files)
    return set(re.findall(r'code(?:: str)? ?= ?"(\w+)"', source)) | set(
        re.findall(r'from_code\([^()]*"(\w+)"\)', source)
    )


def test_every_route_is_documented(server):
    for path, operations in server.http.get("/openapi.json").json()["paths"].items():
        for method in operations:
            assert f"`{method.upper()} {path}`" in TEXT


def references(node) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_the_openapi_document_is_complete(server):
    document = server.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known
    operations = [op for path in document["paths"].values() for method, op in path.items() if method in METHODS]
    assert len({op["operationId"] for op in operations}) == len(operations) == 14
    for operation in operations:
        assert operation["summary"] and operation["tags"]
        assert "422" not in operation["responses"]
        assert "200" in operation["responses"]
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    found = [
        (path, status, answer.get("content"))
        for path, operations in document["paths"].items()
        for method, operation in operations.items() if method in METHODS
        for status, answer in operation["responses"].items() if not status.startswith("2")
    ]  # fmt: skip
    health = {"application/json": {"schema": {"$ref": "#/components/schemas/Health"}}}
    others = [("/health", "503", health), ("/ready", "503", health), ("/ping", "503", None)]
    assert [each for each in found if each[2] != error] == others
    assert "ErrorBody" in document["components"]["schemas"]
    assert not known & {f"#/components/schemas/{name}" for name in ("HTTPValidationError", "ValidationError")}
    stream = document["paths"]["/v1/completions"]["post"]["responses"]["200"]["content"]
    assert set(stream) == {"application/json", "text/event-stream"}
    assert "ChatChunk" in document["components"]["schemas"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"port": 70000}, "port must be an integer from 0 to 65535, got 70000"),
        ({"max_inflight": 0}, "max_inflight must be an integer >= 1, got 0"),
        ({"min_slo_tpot_ms": 0.0}, "min_slo_tpot_ms must be a finite number above 0"),
        ({"max_slo_ttft_ms": 0.5}, "max_slo_ttft_ms must be a finite number >= min_slo_ttft_ms"),
        ({"shutdown_timeout": -1.0}, "shutdown_timeout must be"),
        ({"log_level": "loud"}, "log_level must be one of critical"),
        ({"api_key": ""}, "api_key must be not empty, got an empty one"),
        ({"slo_classes": ("fast",)}, "slo_classes must be like name=tpot_ms"),
        ({"slo_classes": ("fast=x",)}, "slo_classes must be like name=tpot_ms"),
        ({"slo_classes": ("fast=-4",)}, "slo_classes: 'fast=-4': tpot_ms must be a finite number above 0, got -4"),
        ({"slo_classes": ("a b=4",)}, "slo_classes: 'a b=4': name must be letters, digits and _"),
        ({"keep_alive_timeout": 0}, "keep_alive_timeout must be a number of seconds above 0"),
        ({"receive_timeout": float("nan")}, "receive_timeout must be a number of seconds above 0"),
        ({"max_header_bytes": 100}, "max_header_bytes must be an integer from 1024"),
        ({"cors_origins": ("https://a.org/app",)}, "cors_origins must be origins like https://example.org"),
        ({"tls_cert": "c.pem"}, "tls_cert and tls_key must be given together"),
        ({"tls_client_ca": "c.pem"}, "tls_client_ca needs tls_cert and tls_key"),
        ({"api_key": " , "}, "api_key must be not empty, got an empty one"),
        ({"keys": (KeySettings("a", "x"), KeySettings("a", "y"))}, "keys must have different names"),
        (
            {"keys": (KeySettings("a", "x", slo_classes=("vip",)),)},
            "slo_classes of the key 'a' must be of batch, chat, default, interactive, got 'vip'",
        ),
        ({"classes": (SloClass("a"), SloClass("a"))}, "classes must have different names"),
        (
            {"classes": (SloClass("a", service_tiers=("t",)), SloClass("b", service_tiers=("t",)))},
            "service_tiers: 't' must belong to one class, got a and b",
        ),
        ({"records_days": 0.0}, "records_days must be a finite number of days above 0, got 0.0"),
        ({"records_max_mib": 0}, "records_max_mib must be an integer >= 1, got 0"),
        ({"records": ""}, "records must be a path, or none, got ''"),
        ({"record_text": True}, "record_text must be off where records is none, got True"),
        ({"otlp_endpoint": "collector:4318"}, "otlp_endpoint must be a URL that begins with http:// or https://, got"),
        ({"colour": 3}, "unknown option 'colour'; known options are api_key"),
    ],
)
def test_wrong_settings_are_refused(values, text):
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**values)
    assert text in str(caught.value)


def test_settings_keep_the_key_out_of_their_text():
    settings = ServerSettings(api_key="secret", slo_classes=["fast=5:100", "slow="])
    assert "secret" not in repr(settings)
    classes = settings.class_table()
    assert (classes["fast"].tpot_ms, classes["fast"].ttft_ms, classes["slow"].tpot_ms) == (5.0, 100.0, None)
