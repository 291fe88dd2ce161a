"""`adaserve serve`: the OpenAI-compatible server. The server's packages are imported only when it starts."""

from __future__ import annotations

from typing import Annotated

import typer

from adaserve_jax.cli.options import takes
from adaserve_jax.config import FIELD_HELP, EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.server.settings import FIELD_HELP as SERVER_HELP
from adaserve_jax.server.settings import ServerSettings

SERVER_PACKAGES = ("fastapi", "starlette", "pydantic", "uvicorn", "msgspec", "zmq", "prometheus_client")


@takes("config", EngineConfig, FIELD_HELP)
@takes("settings", ServerSettings, SERVER_HELP)
def serve(
    config: EngineConfig,
    settings: ServerSettings,
    in_process: Annotated[bool, typer.Option(help="run the engine in a thread of the server, for debugging")] = False,
) -> None:
    """Serve a model over HTTP until SIGTERM or Ctrl-C."""
    try:
        from adaserve_jax.server.serve import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in SERVER_PACKAGES:
            raise
        raise ConfigError(
            f"serving needs the package {error.name!r}, which is not installed; run: pip install 'adaserve-jax[server]'"
        ) from error
    run(settings, config, in_process)
