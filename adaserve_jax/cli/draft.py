"""`adaserve draft`: serves one draft to many targets over gRPC. Optional packages are imported when it starts."""

from __future__ import annotations

from contextlib import ExitStack

import typer

from adaserve_jax.cli.options import takes
from adaserve_jax.cli.terminal import progress_bar
from adaserve_jax.errors import ConfigError
from adaserve_jax.star.settings import DraftServiceSettings

STAR_PACKAGES = ("grpc", "google", "prometheus_client")


@takes("settings", DraftServiceSettings)
def draft(settings: DraftServiceSettings) -> None:
    """Draft for targets on this and other machines until SIGTERM or Ctrl-C. Guide: docs/star.md."""
    with ExitStack() as bar:
        progress = bar.enter_context(progress_bar())
        progress("loading", 0, 1)
        try:
            from adaserve_jax.star.service.main import run  # imports jax
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in STAR_PACKAGES:
                raise
            raise ConfigError(
                f"a draft service needs the package {error.name!r}, which is not installed; run: "
                "pip install 'adaserve-jax[star]'"
            ) from error

        def ready(line: str) -> None:
            bar.close()
            print(line, flush=True)

        status = run(settings, progress, ready)
    if status:
        raise typer.Exit(status)
