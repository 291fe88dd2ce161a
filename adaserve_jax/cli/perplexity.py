"""`adaserve perplexity`: compares the perplexity of quantised weights with that of the weights as they are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box

from adaserve_jax.cli.options import LIST_METAVAR, comma_list, read_text
from adaserve_jax.cli.terminal import check_writable, number_table, progress_bar, table_console, write_json
from adaserve_jax.config import WEIGHT_KINDS
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import MIB
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.held_out import held_out_code
from adaserve_jax.models.writing import TYPES
from adaserve_jax.results.provenance import count_parameters, machine_name, source_commit

if TYPE_CHECKING:
    from adaserve_jax.models.perplexity import Score

DTYPES = ("f32", "bf16")


def perplexity(
    target: Annotated[str, typer.Option(help="checkpoint folder, or 'demo'")] = "demo",
    text: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 file to predict, may be given again; without one, Python's own held-out source files"),
    ] = None,
    quantize: Annotated[
        str,
        typer.Option(
            help=f"kinds of weights to compare with the first: {', '.join(WEIGHT_KINDS)}", metavar=LIST_METAVAR
        ),
    ] = "none,int8,int4",
    window: Annotated[int, typer.Option(help="tokens that are predicted from one start")] = 512,
    max_tokens: Annotated[int, typer.Option(help="most tokens to score, taken evenly from all the text")] = 16384,
    dtype: Annotated[str, typer.Option(help="f32 or bf16: activations, and weights that are not quantised")] = "f32",
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the result to this file")] = None,
) -> None:
    """Measure perplexity of a checkpoint on held-out text for each kind of weights. Columns: docs/models.md."""
    kinds = comma_list("quantize", quantize, str)
    wrong = [kind for kind in kinds if kind not in WEIGHT_KINDS]
    if wrong or not kinds:
        given = wrong[0] if wrong else quantize
        raise ConfigError(f"--quantize must be {', '.join(WEIGHT_KINDS)}, separated by commas, got {given!r}")
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype must be {' or '.join(DTYPES)}, got {dtype!r}")
    check_writable(json_out, "--json")
    from adaserve_jax.models.perplexity import measure_perplexity  # imports jax

    folder = resolve_folder(target, "target")
    texts = [read_text(path, "text") for path in text] if text else held_out_code()
    if not texts:
        raise ConfigError("this Python has no source files of its library to score; give --text FILE")
    with progress_bar() as progress:
        progress("loading", 0, 1)
        scores = measure_perplexity(
            folder, texts, kinds, window=window, max_tokens=max_tokens, dtype=TYPES[dtype], progress=progress
        )
    _print(scores)
    if json_out is not None:
        rows = [asdict(each) | {"perplexity": each.perplexity, "bits_per_byte": each.bits_per_byte} for each in scores]
        write_json(json_out, {
            "commit": source_commit(), "machine": machine_name(), "target": target,
            "target_params": count_parameters(folder), "text": [str(path) for path in text or ()],
            "window": window, "dtype": dtype, "scores": rows,
        })  # fmt: skip


def _print(scores: list[Score]) -> None:
    """Print the table of scores to stdout."""
    headers = ("weights", "MiB", "tokens", "perplexity", "change", "bits/\nbyte", "KL\nmean", "KL\nmax", "same\ntop")
    table = number_table(headers)
    table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)  # for a terminal of 80 columns
    for score in scores:
        change = score.perplexity / scores[0].perplexity - 1
        table.add_row(
            score.quantize, f"{score.weight_bytes / MIB:.1f}", str(score.tokens), f"{score.perplexity:.4f}",
            f"{change:+.2%}", f"{score.bits_per_byte:.3f}", f"{score.kl_mean:.1e}", f"{score.kl_max:.1e}",
            f"{score.same_likeliest:.1%}",
        )  # fmt: skip
    table_console(table).print(table)
