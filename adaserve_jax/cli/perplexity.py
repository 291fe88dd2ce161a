"""`adaserve perplexity`: compares the perplexity of quantised weights with that of the weights as they are."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from adaserve_jax.cli.options import comma_list
from adaserve_jax.cli.terminal import notes, progress_bar, table_console
from adaserve_jax.config import QUANTIZE
from adaserve_jax.errors import ConfigError
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.writing import TYPES
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit

if TYPE_CHECKING:
    from adaserve_jax.models.perplexity import Score

MIB = 2**20
TABLE_COLUMNS = 120
DTYPES = ("f32", "bf16")


def perplexity(
    target: Annotated[str, typer.Option(help="checkpoint folder, or 'demo'")] = "demo",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 file to predict, may be given again; without one, Python's own held-out source files"),
    ] = None,
    quantize: Annotated[str, typer.Option(help="kinds of weights to compare with the first: none, int8")] = "none,int8",
    window: Annotated[int, typer.Option(help="tokens that are predicted from one start")] = 512,
    max_tokens: Annotated[int, typer.Option(help="most tokens to score, taken evenly from all the text")] = 16384,
    dtype: Annotated[str, typer.Option(help="f32 or bf16: activations, and weights that are not int8")] = "f32",
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the result to this file")] = None,
) -> None:
    """Measure perplexity of a checkpoint on held-out text for each kind of weights. Columns: docs/models.md."""
    kinds = comma_list("quantize", quantize, str)
    wrong = [kind for kind in kinds if kind not in QUANTIZE]
    if wrong or not kinds:
        given = wrong[0] if wrong else quantize
        raise ConfigError(f"--quantize must be {' or '.join(QUANTIZE)}, separated by commas, got {given!r}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    from adaserve_jax.models.perplexity import measure_perplexity  # imports jax

    folder = resolve_folder(target, "target")
    texts = [_read(path) for path in text] if text else held_out_code()
    if not texts:
        raise ConfigError("this Python has no source files of its library to score; give --text FILE")
    with progress_bar() as progress:
        progress("loading", 0, 1)
        scores = measure_perplexity(
            folder, texts, kinds, window=window, max_tokens=max_tokens, dtype=TYPES[dtype], progress=progress
        )
    _print(scores)
    if json_out is not None:
        result = {
            "commit": source_commit(), "machine": machine_name(), "target": target,
            "target_params": count_parameters(folder), "text": [str(path) for path in text or ()],
            "window": window, "dtype": dtype, "scores": [_row(score) for score in scores],
        }  # fmt: skip
        json_out.write_text(json.dumps(result, indent=1) + "\n")
        notes().print(f"result in {json_out}", style="dim", highlight=False, soft_wrap=True)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"text {path} must be UTF-8, but byte {error.start} is not") from None


def _row(score: Score) -> dict[str, Any]:
    return asdict(score) | {"perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte}


def _print(scores: list[Score]) -> None:
    """Print the table of scores to stdout."""
    headers = ("weights", "MiB", "tokens", "perplexity", "change", "bits/byte", "KL mean", "KL max", "same likeliest")
    table = Table()
    for header in headers:
        table.add_column(header, justify="left" if header == "weights" else "right")
    for score in scores:
        change = score.perplexity / scores[0].perplexity - 1
        table.add_row(
            score.quantize, f"{score.weight_bytes / MIB:.1f}", str(score.tokens), f"{score.perplexity:.4f}",
            f"{change:+.3%}", f"{score.bits_per_byte:.4f}", f"{score.kl_mean:.2e}", f"{score.kl_max:.2e}",
            f"{score.same_likeliest:.2%}",
        )  # fmt: skip
    table_console(TABLE_COLUMNS).print(table)
