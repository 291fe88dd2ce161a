"""Writes what documents have from the code: docs/cli.md, configuration.md, http-fields.md, tables in other pages, and
the schema of submissions to the multi-SLO benchmark."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from adaserve_jax.cli.app import app
from adaserve_jax.cli.options import ENV_PREFIX, by_panel
from adaserve_jax.results.submission import json_schema
from adaserve_jax.server import responses_schema, schema
from adaserve_jax.server.config_file import SECTIONS, TABLES, toml_value
from adaserve_jax.server.constraint_fields import StructuredOutputs
from adaserve_jax.server.request_model import IGNORED, not_served
from adaserve_jax.server.settings import digest_of
from adaserve_jax.settings import Panel, options_of
from benchmarks.markdown import between, head, line

DOCS = Path(__file__).resolve().parent.parent / "docs"
SCHEMA = DOCS.parent / "benchmarks" / "multi_slo" / "schema.json"

CLI_HEAD = f"""# Command line

Made by `python -m scripts.reference_docs`; a test fails when it differs from the commands.

Lists are written with commas, and `none` stands for no value. Options of the engine and the server are also read from
the environment, as `{ENV_PREFIX}` and the option's name in capitals: `{ENV_PREFIX}API_KEY` for `--api-key`. A wrong
value, a missing file or a refused request prints one line on stderr and ends with status 2.
"""

CONFIGURATION_HEAD = f"""# Configuration

Made by `python -m scripts.reference_docs`; a test fails when it differs from the code.

`adaserve serve --config FILE` takes its options from a [TOML](https://toml.io) file. A value comes from the first of
these that has it: the command line (`--port 9000`), the environment (`{ENV_PREFIX}PORT=9000`), the file, the default.

```console
adaserve config --example > adaserve.toml    # every key, its meaning and its default, commented out
adaserve config --check adaserve.toml        # is it valid? nothing is loaded, no secret is looked up
adaserve serve --config adaserve.toml
```

```toml
[engine]
target = "models/my-8b"
draft = "models/my-draft"

[learn]
learn = true
learn_folder = "learned"

[server]
host = "0.0.0.0"
tls_cert = "server.pem"
tls_key = "server.key"

[[classes]]
name = "interactive"
tpot_ms = 40
ttft_ms = 500
service_tiers = ["priority"]

[[classes]]
name = "batch"
priority = 10
service_tiers = ["flex"]

[[keys]]
name = "team-a"
key_sha256 = "{digest_of("sesame").hex()}"   # printf %s sesame | sha256sum
requests_per_minute = 600
tokens_per_minute = 200000
max_inflight = 32
learn = false          # nothing is learned from what this team asks

[[keys]]
name = "batch-jobs"
key_env = "BATCH_KEY"
slo_classes = ["batch"]
min_priority = 10
```

A file must be valid by itself. An unknown key, a wrong type or a value out of range ends the program with one line
that names file, section and key. TOML has no null: `"none"` stands for no value. Paths are relative to the working
directory.
"""
SECTION_ABOUT = {
    "engine": "What the engine is built from; also options of `adaserve serve` ([cli.md](cli.md)).",
    "learn": "Whether and how drafts learn from what is served; also options of `adaserve serve` and `adaserve bench`. "
    "Without `learn = true` the others have no effect. What is kept of requests, and where, is in "
    "[security.md](security.md).",
    "drafter": "Which draft services draft, instead of a draft of this engine; also options of `adaserve serve`, "
    "`generate` and `bench`. Without `drafter` the others have no effect. [star.md](star.md) says more.",
    "server": "How the HTTP server behaves; also options of `adaserve serve`. [http.md](http.md) says more.",
    "classes": "A class of targets, one table for each. With any of them the built-in classes are gone; those "
    "of `slo_classes`, in the file, the environment or on the command line, are added to them, and one of the same "
    "name takes the place of the table.",
    "keys": "An API key, one table for each; its secret is given by one of `key`, `key_env` and `key_sha256`. With any "
    "of them, or with `api_key`, whose keys are operators' and have no limits, the server asks for a "
    "key. What is over a limit is answered 429 `rate_limited`, with the seconds until there is room in "
    "`Retry-After`. A request that needs more "
    "tokens than the bucket ever holds goes on when the bucket is full, and the next ones wait for its debt. On SIGHUP "
    "the server reads the keys and `api_key` again and leaves everything else as it is "
    "([security.md](security.md)).",
}

HTTP_HEAD = """# Bodies of requests and responses

Made by `python -m scripts.reference_docs`; a test fails when it differs from the code.

Every field of every body, as `/openapi.json` has it. What the routes do, and what fields mean together, is in
[http.md](http.md). A field with a default may be left out. Types are strict; `null` in a request means the default.
"""
HTTP_ABOUT = {
    "Requests": "Fields that no model here knows are ignored, and named in the header `x-adaserve-warning`; those that "
    "look like a target are refused.",
    "Responses and events of streams": "Completions are streamed as `Completion`, chats as `ChatChunk`, responses as "
    "`ResponseEvent`, each as one event `data: {...}`; the last event is `data: [DONE]`.",
}
NOT_SERVED = {"refused": "enum", "ignored": IGNORED}
"""Verdicts on a field that is known and not served, with the mark of its schema."""
HIDDEN = (
    "BaseModel", "RequestModel", "ResponseModel", "GenerationBody", "ConstraintFields", "ChatTemplateFields",
    "OtherFields", "OtherChatFields", "OtherResponseFields",
)  # fmt: skip
"""Base classes that no route takes or gives."""


def cli_page() -> str:
    """Return docs/cli.md: every command, argument and option."""
    group: Any = typer.main.get_command(app)
    return "\n".join([CLI_HEAD, *_commands(group)])


def configuration_page() -> str:
    """Return docs/configuration.md: every key of every section."""
    parts = [CONFIGURATION_HEAD]
    for name, kind in (SECTIONS | TABLES).items():
        title = f"[{name}]" if name in SECTIONS else f"[[{name}]]"
        parts += [f"## `{title}`", "", SECTION_ABOUT[name], "", head("key", "must be", "default", "meaning")]
        for key, each in options_of(kind).items():
            expected = f'{each.expected}, or "none"' if each.optional else each.expected
            default = "required" if each.default is ... else f"`{toml_value(each.default)}`"
            parts.append(_row(f"`{key}`", expected, default, each.help))
        parts.append("")
    return "\n".join(parts)


def http_page() -> str:
    """Return docs/http-fields.md: every field of every body."""
    parts = [HTTP_HEAD]
    for (title, about), base in zip(HTTP_ABOUT.items(), (schema.RequestModel, schema.ResponseModel), strict=True):
        parts += [f"## {title}", "", about, ""]
        for model in bodies():
            parts += _model(model) if issubclass(model, base) else []
    return "\n".join(parts)


def fields_table() -> str:
    """Return a table of every field of the requests, and whether it is served, ignored or refused."""
    models: list[type[BaseModel]] = [schema.CompletionBody, schema.ChatBody, responses_schema.ResponsesBody]
    parts = [head("field", "completions", "chat", "responses", "what happens")]
    for name in sorted({name for model in models for name in model.model_fields}):
        verdicts = {model: _verdict(model, name) for model in models}
        why = [model.model_fields[name].description or "" for model, each in verdicts.items() if each in NOT_SERVED]
        parts.append(_row(f"`{name}`", *verdicts.values(), why[0].removeprefix("Ignored: ") if why else ""))
    return "\n".join(parts)


def with_fields(guide: str) -> str:
    """Return docs/http.md with its table of fields made anew."""
    return between(guide, "fields", f"\n{fields_table()}\n", "http.md")


def _verdict(model: type[BaseModel], name: str) -> str:
    if name not in model.model_fields:
        return "unknown"
    return next((verdict for verdict, mark in NOT_SERVED.items() if name in not_served(model, mark)), "served")


def bodies() -> list[type[BaseModel]]:
    """Return the models of bodies and their parts in the order of their module."""
    found = {**vars(schema), **vars(responses_schema), StructuredOutputs.__name__: StructuredOutputs}
    models = [each for each in found.values() if isinstance(each, type) and issubclass(each, BaseModel)]
    return [each for each in dict.fromkeys(models) if each.__name__ not in HIDDEN]


def fields_of(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of each field by its name in JSON."""
    return model.model_json_schema().get("properties", {})


def type_words(schema: dict[str, Any]) -> str:
    """Return in words what JSON a field takes or has."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return _any_of(type_words(each) for each in schema[several])
    if "enum" in schema or "const" in schema:
        return _any_of(f"`{_shown(value)}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {type_words(schema.get('items', {}))}"
    values = schema.get("additionalProperties")
    return f"object of {type_words(values)}" if kind == "object" and isinstance(values, dict) else str(kind)


def _commands(group: Any, before: str = "") -> list[str]:
    texts: list[str] = []
    for name, command in group.commands.items():
        whole = f"{before}{name}"
        texts += _commands(command, f"{whole} ") if hasattr(command, "commands") else [_command(whole, command)]
    return texts


def _command(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and each.name != "help"]
    needed = [f"{each.opts[0]} ..." for each in options if each.required]
    usage = " ".join(["adaserve", name, *map(_argument, arguments), *needed, "[OPTIONS]"])
    lines = [f"## `{usage}`", "", command.help.strip(), ""]
    if arguments:
        lines += [
            head("argument", "default", "meaning"),
            *(_parameter(_argument(each), each) for each in arguments),
            "",
        ]
    for panel, listed in by_panel(options).items():
        if panel != Panel.OWN:
            lines += [f"**{panel}**", ""]
        spelled = [("`, `".join([*each.opts, *each.secondary_opts]), each) for each in listed]
        lines += [head("option", "default", "meaning"), *(_parameter(*each) for each in spelled), ""]
    return "\n".join(lines)


def _argument(argument: Any) -> str:
    """Return PROMPT, or [TRACES]... where it may be left out and come several times."""
    name = argument.name.upper()
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def _parameter(names: str, parameter: Any) -> str:
    default = f"`{parameter.default}`"
    if parameter.required:
        default = "required"
    elif isinstance(parameter.default, bool):
        default = "on" if parameter.default else "off"
    elif parameter.default in (None, ""):
        default = ""
    return _row(f"`{names}`", default, parameter.help)


def _model(model: type[BaseModel]) -> list[str]:
    required = set(model.model_json_schema().get("required", ()))
    about = [model.__doc__, ""] if "__doc__" in vars(model) and model.__doc__ else []
    rows = [
        _row(
            f"`{name}`", type_words(each), "required" if name in required else f"`{_shown(each.get('default'))}`",
            each.get("description", ""),
        )
        for name, each in fields_of(model).items()
    ]  # fmt: skip
    return [f"### {model.__name__}", "", *about, head("field", "type", "default", "meaning"), *rows, ""]


def _row(*cells: str) -> str:
    return line(*(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells))


def _any_of(words: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(words))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def main() -> None:
    """Write the pages and the schema."""
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n")
    for name, page in (("cli", cli_page), ("configuration", configuration_page), ("http-fields", http_page)):
        (DOCS / f"{name}.md").write_text(page())
    guide = DOCS / "http.md"
    guide.write_text(with_fields(guide.read_text()))


if __name__ == "__main__":
    main()
