"""Measures transformers as `adaserve bench` measures this package: assisted generation with a draft, or its own server.

    python -m benchmarks.peers.transformers_serve --out run-assisted -- --rates 1
    python -m benchmarks.peers.transformers_serve --no-draft --out run-transformers -- --rates 1

`transformers serve` takes no draft model, so that one is measured by `generate(..., assistant_model=...)` behind
assisted_server.py, which runs one request at a time as `generate` does with an assistant. Options: `transformers serve
--help`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import common

PROGRAM, HOW = "transformers", 'pip install "transformers[serving]" torch accelerate'
NEEDED, NEEDED_TO_SERVE = ("torch", "transformers"), ("accelerate", "fastapi", "uvicorn", "openai", "pydantic")
ASSISTED_SERVER = Path(__file__).with_name("assisted_server.py")


def command(options: argparse.Namespace) -> list[str]:
    target = common.checkpoint(options.target, "target")
    extra = shlex.split(options.server_args)
    if common.drafted(options):
        words = [sys.executable, str(ASSISTED_SERVER), target, common.checkpoint(options.draft, "draft")]
        words += ["--name", Path(options.target).name, "--dtype", options.dtype]
        return [*words, "--draft-tokens", str(options.draft_tokens), *extra]
    words = [common.program(PROGRAM, HOW), "serve", target, "--host", common.HOST, "--dtype", options.dtype]
    if options.continuous_batching:
        words.append("--continuous-batching")
    return [*words, *extra]


def check_installed(packages: Sequence[str]) -> None:
    """Raise SystemExit, with the command that installs them, unless all are there."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise common.stop(f"{name} is not installed; install it with: {HOW}")


def extra_body(target: str) -> dict[str, Any]:
    """`transformers serve` samples only where its generation config says so, whatever temperature a request has: the
    model's own, and sampling by temperature alone. With temperature 0 it is greedy still. Its continuous batching takes
    the first request's temperature for all, which is the client's greedy first try."""
    file = Path(target) / "generation_config.json"
    held = json.loads(file.read_text()) if file.exists() else {}
    return {"generation_config": json.dumps(held | {"do_sample": True, "top_k": 0, "top_p": 1.0})}


def main(argv: list[str]) -> int:
    made = common.parser(__doc__, target="demo", draft="demo")
    made.add_argument("--dtype", default="float32", help="of the weights (float32, which this package has on a CPU)")
    made.add_argument(
        "--continuous-batching",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="without a draft: requests run together (on), all sampled as the server's first one; else one by one",
    )
    options, bench = common.parse(made, argv)
    check_installed(NEEDED if common.drafted(options) else (*NEEDED, *NEEDED_TO_SERVE))
    words, policy = tuple(command(options)), common.policy_name(options)
    version = importlib.metadata.version("transformers")
    if common.drafted(options):
        peer = common.Peer("transformers generate", words, "/health", policy, version)
    else:
        target = common.checkpoint(options.target, "target")
        body = extra_body(target)
        peer = common.Peer("transformers serve", words, "/health", policy, version, model=target, extra_body=body)
    return common.measure(peer, options.out, bench)


if __name__ == "__main__":
    common.run(main)
