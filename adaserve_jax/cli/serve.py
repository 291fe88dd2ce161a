"""`adaserve serve`: the OpenAI-compatible server. The server's packages are imported only when it starts."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

import typer

from adaserve_jax.cli.options import ENV_PREFIX, option_value, takes
from adaserve_jax.cli.terminal import SERVER_PACKAGES, needs, with_options
from adaserve_jax.config import EngineConfig
from adaserve_jax.drafter_config import DrafterOptions
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnOptions
from adaserve_jax.scheduler.policies import policy_of
from adaserve_jax.server.config_file import ConfigFile, read_config
from adaserve_jax.server.settings import ServerSettings


def _use_file(context: typer.Context, path: str | None) -> Any:
    """Read the file and make its values the defaults of the other options."""
    if path is None:
        return None
    file = read_config(path)
    context.default_map = {name: option_value(value) for name, value in file.values.items()}
    return file


def _with_keys(settings: ServerSettings, file: ConfigFile) -> ServerSettings:
    """Return `settings` with the keys of the file read again, and its `api_key` unless that was given beside it.

    Raises ConfigError.
    """
    now = read_config(file.path).server
    api_key = now.api_key if settings.api_key == file.server.api_key else settings.api_key
    return replace(settings, api_key=api_key, keys=now.keys)


def _check_key(settings: ServerSettings) -> None:
    """Raise ConfigError when the environment should have a key and has none: the server would be open."""
    name = f"{ENV_PREFIX}API_KEY"
    if settings.api_key is None and os.environ.get(name) == "":
        raise ConfigError(f"{name} must be a key, got an empty text; unset it for a server that asks for no key")


@takes("settings", ServerSettings)
@takes("drafter_options", DrafterOptions)
@takes("learn_options", LearnOptions)
@takes("config", EngineConfig)
def serve(
    config: EngineConfig,
    learn_options: LearnOptions,
    drafter_options: DrafterOptions,
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
    _check_key(settings)
    config = with_options(config, learn_options, drafter_options)
    policy_of(config)  # an unknown policy is refused before seconds of imports
    file: Any = config_file  # what the callback made of the path
    if file is not None:
        settings = replace(settings, classes=file.server.classes, keys=file.server.keys)
    with needs("serving", SERVER_PACKAGES):
        from adaserve_jax.server.serve import run
    status = run(settings, config, in_process, None if file is None else partial(_with_keys, settings, file))
    if status:
        raise typer.Exit(status)
