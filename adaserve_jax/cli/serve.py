"""`adaserve serve`: the OpenAI-compatible server. The server's packages are imported only when it starts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from adaserve_jax.cli.options import ENV_PREFIX, option_value, takes
from adaserve_jax.config import FIELD_HELP, EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.server.config_file import read_config
from adaserve_jax.server.settings import FIELD_HELP as SERVER_HELP
from adaserve_jax.server.settings import ServerSettings

SERVER_PACKAGES = ("fastapi", "starlette", "pydantic", "uvicorn", "msgspec", "zmq", "prometheus_client")


def _use_file(context: typer.Context, path: str | None) -> Any:
    """Make the file's values the defaults of the options that come after; the file, read."""
    if path is None:
        return None
    file = read_config(path)
    context.default_map = {name: option_value(value) for name, value in file.values.items()}
    return file


def _with_keys(settings: ServerSettings, path: str) -> ServerSettings:
    """`settings` with the keys that the file has now. Raises ConfigError."""
    return replace(settings, keys=read_config(path).server.keys)


@takes("config", EngineConfig, FIELD_HELP)
@takes("settings", ServerSettings, SERVER_HELP)
def serve(
    config: EngineConfig,
    settings: ServerSettings,
    in_process: Annotated[bool, typer.Option(help="run the engine in a thread of the server, for debugging")] = False,
    config_file: Annotated[
        str | None,
        typer.Option(
            "--config",
            help="TOML file with options, classes and API keys (docs/configuration.md); the command line and the "
            "environment go before it",
            envvar=f"{ENV_PREFIX}CONFIG",
            show_envvar=False,
            is_eager=True,
            callback=_use_file,
        ),
    ] = None,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    file: Any = config_file  # what the callback made of the path
    if file is not None:
        settings = replace(settings, classes=file.server.classes, keys=file.server.keys)
    try:
        from adaserve_jax.server.serve import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVER_PACKAGES:
            raise
        raise ConfigError(
            f"serving needs the package {error.name!r}, which is not installed; run: pip install 'adaserve-jax[server]'"
        ) from error
    run(settings, config, in_process, None if file is None else partial(_with_keys, settings, file.path))
