"""`adaserve grow`: writes a checkpoint of any size that computes the same function as a small one."""

from __future__ import annotations

from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from adaserve_jax.cli.terminal import progress_bar, say
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.grow import SHAPES, GrownShape, check_head, grow_head
from adaserve_jax.models.grow import grow as grow_checkpoint
from adaserve_jax.results.provenance import count_parameters


def grow(
    out: Annotated[Path, typer.Argument(help="folder to write, new or empty")],
    params: Annotated[str, typer.Option(help=f"named size: {', '.join(SHAPES)}")] = "",
    source: Annotated[str, typer.Option(help="checkpoint folder to grow, or 'demo'")] = "demo",
    layers: Annotated[int, typer.Option(help="layers; 0: as the named size")] = 0,
    hidden: Annotated[int, typer.Option(help="features of the residual stream; 0: as the named size")] = 0,
    heads: Annotated[int, typer.Option(help="query heads; 0: as the named size")] = 0,
    kv_heads: Annotated[int, typer.Option(help="key-value heads; 0: as the named size")] = 0,
    mlp: Annotated[int, typer.Option(help="inner features of the MLP or of each expert; 0: as the named size")] = 0,
    experts: Annotated[int, typer.Option(help="experts of each layer, of which each has the MLP; 0: none")] = 0,
    experts_per_token: Annotated[int, typer.Option(help="of --experts, those that each token takes; 0: 2")] = 0,
    dtype: Annotated[str, typer.Option(help="f16, bf16 or f32")] = "f32",
    seed: Annotated[int, typer.Option(min=0, help="seeds the added weights that nothing depends on")] = 0,
    head: Annotated[
        str,
        typer.Option(
            help="EAGLE-3 head of the source, 'demo-head', or Medusa heads; OUT/head becomes the head of what has grown"
        ),
    ] = "",
) -> None:
    """Grow a checkpoint to a size; its text stays the same, its cost does not."""
    given = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "mlp": mlp}
    if experts:
        given |= {"experts": experts, "experts_per_token": experts_per_token or 2}
    elif experts_per_token:
        raise ConfigError("--experts-per-token is about --experts; give both, or leave it out")
    shape = _shape(params, {name: value for name, value in given.items() if value})
    folder = resolve_folder(source, "target")
    head_folder = resolve_folder(head, "draft") if head else None
    if head_folder is not None:
        check_head(head_folder, folder)  # before gigabytes are written
    with progress_bar() as progress:
        grow_checkpoint(folder, out, shape, dtype=dtype, seed=seed, progress=progress)
        if head_folder is not None:
            grow_head(head_folder, folder, out / "head", shape.hidden)
    say(f"{out}: {count_parameters(out):,} parameters, {dtype}", style="dim")


def _shape(params: str, given: dict[str, int]) -> GrownShape:
    if params and params not in SHAPES:
        raise ConfigError(f"--params must be one of {', '.join(SHAPES)}, got {params!r}")
    values = (asdict(SHAPES[params]) if params else {}) | given
    missing = [each.name for each in fields(GrownShape) if each.default is MISSING and each.name not in values]
    if missing:
        raise ConfigError(f"give --params, or all of the sizes; --{missing[0].replace('_', '-')} is missing")
    return GrownShape(**values)
