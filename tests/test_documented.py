"""Every field of a body, column of a result file and name of the Python API is in its document, and no other is."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib

import pytest

import adaserve_jax
from adaserve_jax import errors, sampling
from adaserve_jax.models import chat_prompt
from adaserve_jax.request_metrics import RequestMetrics
from adaserve_jax.results.records import RequestRecord
from adaserve_jax.results.samples import Sample
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.server import schema
from adaserve_jax.server.request_model import IGNORED, not_served
from adaserve_jax.sim.acceptance import AcceptanceRecord
from adaserve_jax.types import SLO, SamplingParams
from scripts import reference_docs
from tests.conftest import ROOT
from tests.documents import Row, names, rows, section


def fields_of(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def properties_of(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if isinstance(value, property)}


def test_the_page_of_http_fields_is_what_the_models_say():
    message = "run: python -m scripts.reference_docs"
    assert (ROOT / "docs" / "http-fields.md").read_text() == reference_docs.http_page(), message


def test_every_field_of_a_body_says_what_it_means():
    fields = {model.__name__: reference_docs.fields_of(model) for model in reference_docs.bodies()}
    assert len(fields) > 50 and all(fields.values())
    listed = [(model, name, each) for model, found in fields.items() for name, each in found.items()]
    assert [(model, name) for model, name, each in listed if not each.get("description")] == []


def test_types_are_said_in_words():
    either = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Message"}}, {"type": "null"}]}
    assert reference_docs.type_words(either) == "list of [Message](#message) or null"
    assert reference_docs.type_words({"enum": ["stop", "length"]}) == "`stop` or `length`"
    assert reference_docs.type_words({"const": "model"}) == "`model`"
    limits = {"type": "object", "additionalProperties": {"type": "number"}}
    assert reference_docs.type_words(limits) == "object of number"
    assert reference_docs.type_words({}) == "any"
    assert reference_docs.type_words({"enum": [None, "", False, ["text"]]}) == '`null` or `""` or `false` or `["text"]`'


def test_the_guide_has_a_row_for_every_field_of_a_request():
    shown = names(section("http.md", "## Request body"))
    bodies = (schema.CompletionBody, schema.ChatBody)
    served = {
        name
        for body in bodies
        for name in set(body.model_fields) - {*not_served(body, "enum"), *not_served(body, IGNORED)}
    }
    assert sorted(shown) == sorted(served)


def test_the_guide_says_of_every_field_whether_it_is_served():
    message = "run: python -m scripts.reference_docs"
    guide = (ROOT / "docs" / "http.md").read_text()
    assert guide == reference_docs.with_fields(guide), message
    shown = rows(section("http.md", "## Fields of other servers"))
    verdicts = {row.names[0]: row.cells[1:3] for row in shown}
    assert verdicts["regex"] == ("served", "served") and verdicts["request_id"] == ("ignored", "ignored")
    assert verdicts["use_beam_search"] == ("refused", "refused") and verdicts["chat_template"] == ("unknown", "served")
    assert [row.names for row in shown if {"refused", "ignored"} & {*row.cells[1:3]} and not row.cells[3]] == []


@pytest.mark.parametrize(
    ("document", "bounds"),
    [
        ("http.md", f"at most {sampling.MAX_CHOICES}; prompts times n"),
        ("http.md", f"up to {sampling.MAX_STOPS} texts of up to {sampling.MAX_STOP_CHARS} characters"),
        ("http.md", f"up to {sampling.MAX_STOP_IDS} token ids that end the output"),
        ("http.md", f"up to {sampling.MAX_LOGIT_BIASES} token ids, as texts, with a value"),
        ("http.md", f"up to {sampling.MAX_BAD_WORDS} texts of up to {sampling.MAX_BAD_WORD_CHARS} characters"),
        ("http.md", f"a JSON Schema, at most {sampling.MAX_SCHEMA_CHARS} characters"),
        ("http.md", f"this regular expression, of at most {sampling.MAX_GRAMMAR_CHARS} characters"),
        ("http.md", f"in Lark or EBNF, of at most {sampling.MAX_GRAMMAR_CHARS} characters"),
        ("http.md", f"at most {sampling.MAX_CHOICE_TEXTS}, {sampling.MAX_CHOICE_CHARS} characters together"),
        ("http.md", f"no other token is drawn, up to {sampling.MAX_ALLOWED_IDS} ids"),
        ("http.md", f"The template may have {chat_prompt.MAX_TEMPLATE_CHARS} characters"),
        ("http.md", f"Rendering may take {chat_prompt.CPU_LIMIT_S} seconds of processor time"),
        (
            "http.md",
            f"processor time, {chat_prompt.MEMORY_LIMIT_BYTES >> 20} MiB",
        ),
        ("http.md", f"{chat_prompt.AT_ONCE} templates are rendered at a time"),
        ("http.md", f"no answer after {chat_prompt.WALL_LIMIT_S:g} seconds gets 429 `queue_full`"),
        ("tools.md", f"up to {sampling.MAX_TOOLS} functions"),
    ],
)
def test_the_guides_say_the_bounds_in_force(document: str, bounds: str):
    assert bounds in " ".join((ROOT / "docs" / document).read_text().split())


def test_the_example_of_metrics_in_the_guide_has_their_fields():
    example = json.loads(re.search(r"```json\n(.*?)```", section("http.md", "## Response"), re.DOTALL)[1])
    assert set(example) == set(schema.ResponseMetrics.model_fields)
    always = {name for name, field in schema.SloMetrics.model_fields.items() if field.is_required()}
    assert set(example["slo"]) == always
    assert set(example["speculative"]) == set(schema.SpeculativeMetrics.model_fields)


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("## results.jsonl", ResultRow),
        ("## requests.jsonl", RequestRecord),
        ("## samples.jsonl", Sample),
        ("## acceptance.jsonl", AcceptanceRecord),
    ],
)
def test_every_column_of_a_file_has_a_row_and_no_row_is_left_over(heading: str, kind: type):
    """Columns that files share are explained once, in the first of them."""
    own = names(section("metrics.md", heading))
    before = [name for each in ("## results.jsonl", "## requests.jsonl") for name in names(section("metrics.md", each))]
    assert len(own) == len(set(own))
    assert sorted(set(fields_of(kind)) - {*own, *before}) == []
    assert sorted(set(own) - set(fields_of(kind))) == []


def default_of(row: Row) -> str:
    return row.cells[1]


def test_the_python_guide_has_sampling_parameters_with_their_defaults():
    shown = {name: default_of(row) for row in rows(section("python-api.md", "## SamplingParams")) for name in row.names}
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert list(shown) == list(defaults)
    for row in rows(section("python-api.md", "## SamplingParams")):
        said = [each.strip() for each in default_of(row).split(", ")]
        said = said * len(row.names) if len(said) == 1 else said
        assert said == [repr(defaults[name]) for name in row.names], row.names


def test_the_python_guide_has_every_target_and_metric_of_a_request():
    assert names(section("python-api.md", "## SLO")) == fields_of(SLO)
    shown = names(section("python-api.md", "## Metrics of a request"))
    assert sorted(shown) == sorted({*fields_of(RequestMetrics), *properties_of(RequestMetrics)})


def test_the_python_guide_has_every_error():
    tree = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert sorted(names(section("python-api.md", "## Errors"))) == sorted(tree)
    assert all(issubclass(getattr(errors, name), errors.AdaServeError) for name in tree)


def test_the_package_gives_what_the_python_guide_says_and_no_more():
    shown = names(section("python-api.md", "## What the package gives"))
    assert shown == sorted(adaserve_jax.__all__)
    assert set(shown) <= set(dir(adaserve_jax))
    assert all(hasattr(adaserve_jax, name) for name in adaserve_jax.__all__ if name != "LLM"), "LLM loads jax"


def test_modules_that_users_import_have_complete_types_and_are_listed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
    shown = names(section("python-api.md", "## Modules with complete types"))
    as_module = [path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") for path in listed]
    assert shown == as_module
    assert all((ROOT / path).exists() for path in listed)
