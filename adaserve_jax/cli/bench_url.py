"""The options of `adaserve bench --url`: a server that is measured from outside."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from adaserve_jax.bench.engine import BenchEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.http_client.settings import FIELD_HELP, UrlSettings


def _help(name: str) -> str:
    return f"with --url: {FIELD_HELP[name]}"


@dataclass(frozen=True)
class UrlOptions:
    """As they were given."""

    url: Annotated[str | None, typer.Option(help=f"instead of an engine of this process: {FIELD_HELP['url']}")] = None
    system: Annotated[str | None, typer.Option(help=_help("system"))] = None
    model: Annotated[str | None, typer.Option(help=_help("model"))] = None
    api_key_env: Annotated[
        str | None,
        typer.Option(help=f"with --url: environment variable that holds the API key; {FIELD_HELP['api_key']}"),
    ] = None
    header: Annotated[
        list[str] | None, typer.Option(help="with --url: a header of every request, 'Name: value'; may be repeated")
    ] = None
    endpoint: Annotated[str, typer.Option(help=_help("endpoint"))] = "auto"
    send_slo: Annotated[bool | None, typer.Option("--send-slo/--no-send-slo", help=_help("send_slo"))] = None
    baseline_ms: Annotated[
        float | None,
        typer.Option(
            help="with --url: ms of one token alone, which relative targets multiply; without, the server's own where "
            "it says it, else measured at the start"
        ),
    ] = None
    extra_body: Annotated[str | None, typer.Option(help=f"{_help('extra_body')}: a JSON object")] = None
    spare_connections: Annotated[int, typer.Option(help=_help("spare_connections"))] = UrlSettings.spare_connections
    silence_timeout: Annotated[float, typer.Option(help=_help("silence_timeout_s"))] = UrlSettings.silence_timeout_s

    def about(self) -> dict[str, Any]:
        """What a resumed run must share; no key."""
        return {"url": self.url, "model": self.model, "endpoint": self.endpoint, "send_slo": self.send_slo,
                "baseline_ms": self.baseline_ms, "extra_body": self.extra_body}  # fmt: skip

    def check_unused(self) -> None:
        """Raise ConfigError for options that mean nothing without --url."""
        for name, value in vars(self).items():
            if value != type(self).__dataclass_fields__[name].default:
                raise ConfigError(f"--{name.replace('_', '-')} says how a server is measured; give its --url too")

    def open(self, policy: str | None) -> BenchEngine:
        """The server behind the URL. Raises ConfigError: it cannot be measured, or a package is missing."""
        from adaserve_jax.bench.http_load import UrlEngine

        baseline_s = None if self.baseline_ms is None else self.baseline_ms / 1e3
        settings = UrlSettings(
            url=self.url or "",
            system=self.system or "",
            model=self.model,
            api_key=self._key(),
            headers=tuple(_header(text) for text in self.header or ()),
            endpoint=self.endpoint,
            send_slo=self.send_slo,
            baseline_s=baseline_s,
            extra_body=self._body(),
            spare_connections=self.spare_connections,
            silence_timeout_s=self.silence_timeout,
        )
        return UrlEngine(settings) if policy is None else UrlEngine(settings, policy=policy)

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(f"--api-key-env names {self.api_key_env}, which is not set; set it to the server's key")
        return key

    def _body(self) -> dict[str, Any]:
        if self.extra_body is None:
            return {}
        try:
            values = json.loads(self.extra_body)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ConfigError(f"--extra-body must be a JSON object, got {self.extra_body!r}")
        return values


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not (colon and name.strip()):
        raise ConfigError("--header must be 'Name: value', got one without a name or without a colon")
    return name.strip(), value.strip()
