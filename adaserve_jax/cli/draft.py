"""`adaserve draft`: serves one draft to many targets over gRPC. Optional packages are imported when it starts."""

from __future__ import annotations

from contextlib import ExitStack

import typer

from adaserve_jax.cli.options import takes
from adaserve_jax.cli.terminal import needs, progress_bar
from adaserve_jax.star.settings import DraftServiceSettings

STAR_PACKAGES: dict[str, str] = dict.fromkeys(("grpc", "google", "prometheus_client"), "star")


@takes("settings", DraftServiceSettings)
def draft(settings: DraftServiceSettings) -> None:
    """Draft for targets on this and other machines until SIGTERM or Ctrl-C. Guide: docs/star.md."""
    with ExitStack() as bar:
        progress = bar.enter_context(progress_bar())
        progress("loading", 0, 1)
        with needs("a draft service", STAR_PACKAGES):
            from adaserve_jax.star.service.main import run  # imports jax

        def ready(line: str) -> None:
            bar.close()
            print(line, flush=True)

        status = run(settings, progress, ready)
    if status:
        raise typer.Exit(status)
