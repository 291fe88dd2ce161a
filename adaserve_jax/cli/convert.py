"""`adaserve convert`: writes a checkpoint in the layout that the engine loads without fusing and casting."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.cli.terminal import progress_bar, say
from adaserve_jax.models.config import resolve_folder


def convert(
    source: Annotated[str, typer.Argument(help="Hugging Face checkpoint folder to convert, or 'demo'")],
    out: Annotated[Path, typer.Argument(help="folder to write, new or empty")],
    dtype: Annotated[str, typer.Option(help="f16, bf16, f32, or auto: that of the source")] = "auto",
) -> None:
    """Write a checkpoint in the engine's own layout; --target and --draft take the new folder like any other."""
    folder = resolve_folder(source, "target")
    with progress_bar() as progress:
        progress("loading", 0, 1)
        from adaserve_jax.models.export import convert as convert_checkpoint  # imports jax

        convert_checkpoint(folder, out, dtype=dtype, progress=progress)
    say(f"{out}: converted from {folder}", style="dim")
