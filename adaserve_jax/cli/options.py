"""Makes command line options from the fields of a frozen dataclass, so that each option has one source of truth."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import wraps
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from adaserve_jax.errors import ConfigError

NONE = "none"
ENV_PREFIX = "ADASERVE_"


def takes(
    parameter: str, kind: type, help_texts: Mapping[str, str], *, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of `kind`; the command gets the built `kind` as `parameter`.

    Tuples are written with commas; "none" stands for None. An option that is absent is read from the environment as
    ADASERVE_<FIELD>, so that a secret need not stand on the command line, then from the file of `config_option`.
    without: fields left at their defaults, as those are that only a file can give.
    """
    types_by_name = get_type_hints(kind)
    taken = [f for f in fields(kind) if f.name not in without and not f.metadata.get("file_only")]
    names = {f.name for f in taken}
    options = [_option(f.name, types_by_name[f.name], f.default, as_options(help_texts[f.name], names)) for f in taken]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            values = {name: given.pop(name) for name in names & given.keys()}
            built = kind(**{name: _parse(name, types_by_name[name], value) for name, value in values.items()})
            command(**given, **{parameter: built})

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p for p in own if p.name != parameter]
        run.__signature__ = inspect.Signature([*kept, *options])  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {}
        return run

    return decorate


def as_options(text: str, names: Collection[str]) -> str:
    """A help text in which fields that are meant are spelled as the options that they are here."""
    return re.sub(r"\b[a-z]\w*_\w+", lambda m: _spelled(m[0]) if m[0] in names else m[0], text)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def option_value(value: Any) -> Any:
    """A field's value as its option takes it: what `takes` reads back."""
    if value is None:
        return NONE
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else value


def _option(name: str, hint: Any, default: Any, help_text: str) -> inspect.Parameter:
    if default is MISSING:
        raise TypeError(f"field {name} has no default, so that it cannot become an option")
    annotation = str if _is_optional(hint) or get_origin(hint) is tuple else hint
    info = typer.Option(help=help_text, envvar=f"{ENV_PREFIX}{name.upper()}", show_envvar=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option_value(default), annotation=Annotated[annotation, info]
    )


def _is_optional(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)


def _parse(name: str, hint: Any, value: Any) -> Any:
    if _is_optional(hint):
        return None if value == NONE else value
    if get_origin(hint) is tuple:
        return comma_list(name, value, get_args(hint)[0])
    return value


def comma_list(name: str, text: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    """Parts of a comma-separated text, each read by `kind`. Raises ConfigError naming the option and the part."""
    parsed = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            parsed.append(kind(part))
        except ValueError as error:
            raise ConfigError(
                f"{_spelled(name)} must be a comma-separated list of {kind.__name__} values, got {part!r}"
            ) from error
    return tuple(parsed)


def grouped(parameter: str, kind: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of a frozen dataclass whose fields are annotated with them; the command gets the built
    `kind` as `parameter`."""
    hints = get_type_hints(kind, include_extras=True)
    options = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(**given: Any) -> None:
            built = kind(**{option.name: given.pop(option.name) for option in options if option.name in given})
            command(**given, **{parameter: built})

        kept = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != parameter]
        run.__signature__ = inspect.Signature([*kept, *options])  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {}
        return run

    return decorate


# Under which heading each option stands, in `--help` and in docs/cli.md. An option that is not named here is
# the command's own.

OWN = "Options"
PANELS: dict[str, tuple[str, ...]] = {
    "A server that runs already": (
        "url", "system", "model", "api_key_env", "header", "endpoint", "send_slo", "baseline_ms", "extra_body",
        "spare_connections", "silence_timeout",
    ),
    "Models": ("target", "draft", "drafts", "route", "dtype", "quantize"),
    "Policy and speculation": (
        "policy", "deterministic", "infeasible_slo", "max_depth", "max_width", "max_tree_tokens", "max_slo_nodes",
        "elastic", "calibrate", "calibration", "eq8_eq9", "eq8_c1", "eq9_c2",
    ),
    "Address, keys and TLS": (
        "host", "port", "api_key", "served_model_name", "tls_cert", "tls_key", "tls_client_ca", "cors_origins",
        "trust_gateway",
    ),
    "Speed targets of requests": (
        "slo_classes", "min_slo_tpot_ms", "max_slo_tpot_ms", "min_slo_ttft_ms", "max_slo_ttft_ms",
    ),
    "Size": (
        "max_requests", "max_context", "max_waiting", "page_size", "num_pages", "max_batch_tokens",
        "max_prefill_tokens", "prefix_cache", "memory_limit_mib",
    ),
    "Limits of the server": (
        "max_inflight", "max_choices", "max_queue_wait", "max_body_bytes", "max_header_bytes", "receive_timeout",
        "keep_alive_timeout", "use_generation_config",
    ),
    "Watching": (
        "dashboard", "records", "records_days", "records_max_mib", "record_text", "otlp_endpoint", "log_level",
    ),
    "Failures and the end": (
        "shutdown_timeout", "watchdog", "max_restarts", "restart_window", "exit_when_dead",
    ),
    "Devices and compilation": (
        "attention", "token_edges", "row_edges", "profile", "compile_cache", "seed", "tp", "coordinator",
        "num_processes", "process_id",
    ),
    "Draft services": (
        "drafter", "drafter_deadline_ms", "drafter_version", "drafter_token_file", "drafter_ca", "drafter_cert",
        "drafter_key",
    ),
    "Learning": (
        "learn", "learn_loss", "learn_beta", "learn_temperature", "learn_positions", "learn_top_k", "learn_every",
        "learn_steps", "learn_rate", "learn_lora_rank", "learn_buffer", "learn_held_out", "learn_tolerance",
        "learn_tenant_share", "learn_delay_ms", "learn_share", "learn_folder", "learn_keep_records",
    ),
}  # fmt: skip
"""In the order in which they are shown, behind the command's own."""
OWN_OF = {"bench": ("seed",), "simulate": ("seed", "max_requests", "max_prefill_tokens"), "draft": ("model",),
          "report": ("records",), "generate": ("seed",)}  # fmt: skip
"""By command: options of its own that are called like one of a heading."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "Serve": ("serve", "generate", "config"),
    "Measure": ("bench", "report", "simulate", "profile", "perplexity"),
    "Make models": ("distill", "convert", "grow"),
    "Several processes": ("cluster", "draft", "follow"),
    "Other": ("version",),
}
"""Headings of `adaserve --help`, and the commands under them."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def by_panel(command: str, options: Iterable[Any]) -> dict[str, list[Any]]:
    """The options of a command under their headings, in the order in which both are shown. Empty headings are left
    out."""
    found: dict[str, list[Any]] = {panel: [] for panel in (OWN, *PANELS)}
    own = OWN_OF.get(command, ())
    for option in options:
        found[OWN if option.name in own else _PANEL_OF.get(option.name, OWN)].append(option)
    for panel, names in PANELS.items():
        found[panel].sort(key=lambda option, names=names: names.index(option.name))
    return {panel: listed for panel, listed in found.items() if listed}


# What `--help` prints: two columns under headings, narrow enough for 80 characters, and the same for any typer.
#
# Typer's own page gives names, negations and types a column each, which leaves 20 of 80 characters to the
# meaning.

NAMES_WIDTH = 32
MOST_WIDTH = 120
WORDS = {"text": "TEXT", "integer": "N", "float": "X", "path": "PATH", "str": "TEXT", "int": "N"}
FROM_ENVIRONMENT = (
    f"Options are also read from the environment, as {ENV_PREFIX} and the name in capitals: {ENV_PREFIX}POLICY for "
    "--policy. Lists are written with commas; none stands for no value."
)


class Command(TyperCommand):
    """A command whose help is such a page."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page; the formatter stays empty."""
        shown: list[Any] = self.params
        arguments = [p for p in shown if p.param_type_name == "argument"]
        options = [p for p in self.get_params(ctx) if p.param_type_name == "option"]
        console = _console()
        _head(console, usage_of(ctx.command_path, shown), self.help)
        _rows(console, "Arguments", ((argument_name(p), help_of(p)) for p in arguments))
        for panel, listed in by_panel(self.name or "", options).items():
            _rows(console, panel, ((option_name(p), help_of(p)) for p in listed))
        if any(getattr(p, "envvar", None) for p in options):
            console.print(FROM_ENVIRONMENT, style="dim")


class Group(TyperGroup):
    """A group whose help is such a page, with the first sentence of each command's."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the page; the formatter stays empty."""
        console = _console()
        _head(console, f"{ctx.command_path} COMMAND [OPTIONS]", self.help)
        left = dict(self.commands)
        for panel, names in COMMANDS.items():
            _rows(console, panel, ((name, _first_sentence(left.pop(name))) for name in names if name in left))
        _rows(console, "Commands", ((name, _first_sentence(command)) for name, command in left.items()))
        console.print(f"Options of a command: {ctx.command_path} COMMAND --help", style="dim")


def usage_of(path: str, params: Iterable[Any]) -> str:
    """How a command is written: `adaserve generate PROMPT [OPTIONS]`."""
    listed = list(params)
    names = [argument_name(p) for p in listed if p.param_type_name == "argument"]
    needed = [f"{p.opts[0]} {_kind(p)}" for p in listed if p.param_type_name == "option" and p.required]
    return " ".join([path, *names, *needed, "[OPTIONS]"])


def argument_name(argument: Any) -> str:
    """PROMPT, or [TRACES]... where it may be left out and come several times."""
    name = argument.name.upper()
    return (name if argument.required else f"[{name}]") + ("..." if argument.nargs == -1 else "")


def option_name(option: Any) -> str:
    """--port N, --[no-]calibrate, -o, --out PATH."""
    names = sorted(option.opts, key=len)
    if option.is_flag:
        negated = f"--no-{names[-1].removeprefix('--')}"
        return ", ".join([*names[:-1], f"--[no-]{names[-1][2:]}" if negated in option.secondary_opts else names[-1]])
    return f"{', '.join(names)} {_kind(option)}{'...' if option.multiple else ''}"


def help_of(parameter: Any) -> str:
    """Its meaning, then its default, or that it must be given."""
    default = parameter.default
    if parameter.required:
        return f"{parameter.help} [required]"
    if isinstance(default, bool):
        return f"{parameter.help} [default: on]" if default else parameter.help
    return parameter.help if default in (None, "", "none", ()) else f"{parameter.help} [default: {default}]"


def _kind(option: Any) -> str:
    """What an option takes; typer describes types itself since it has no click, and by click's before."""
    described: Any = getattr(option, "type_descriptor", None)
    kind = option.type if described is None else described
    if getattr(kind, "choices", None):
        return "|".join(str(getattr(choice, "value", choice)) for choice in kind.choices)
    name = str(kind.name if described is None else option.bare_type()).removeprefix("list[").rstrip("]")
    return WORDS.get(name.lower(), name.upper())


def _first_sentence(command: Any) -> str:
    text = " ".join((command.help or "").partition("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".")


def _console() -> Console:
    console = Console(highlight=False)
    console.width = min(console.width, MOST_WIDTH)
    return console


def _head(console: Console, usage: str, text: str | None) -> None:
    console.print(Text.assemble(("Usage: ", "bold"), usage))
    paragraphs = [" ".join(each.split()) for each in (text or "").strip().split("\n\n")]
    for paragraph in paragraphs:
        console.print(Padding(Text(paragraph), (1, 2, 0, 2)))
    console.print()


def _rows(console: Console, title: str, rows: Iterable[tuple[str, str]]) -> None:
    listed = list(rows)
    if not listed:
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False, expand=True)
    table.add_column(width=min(NAMES_WIDTH, max(len(name) for name, _ in listed)), overflow="fold")
    table.add_column(ratio=1)
    for name, text in listed:
        table.add_row(Text(name, style="cyan"), Text(text))
    console.print(Text(title, style="bold"))
    console.print(Padding(table, (0, 0, 1, 2)))
