"""Measures this package's own server by its URL, beside its peers: the same client, processes apart.

python -m benchmarks.peers.adaserve --out run-adaserve -- --rates 1,2
"""

from __future__ import annotations

import argparse
import shlex
import sys

from adaserve_jax import __version__
from benchmarks.peers import common


def command(options: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "adaserve_jax.cli", "serve", "--host", common.HOST, "--target", options.target]
    words += ["--policy", options.policy if common.drafted(options) else "ar"]
    words += ["--draft", options.draft if common.drafted(options) else "none"]
    words += ["--max-requests", str(options.max_requests), "--max-context", str(options.max_context)]
    words.append("--prefix-cache" if options.prefix_cache else "--no-prefix-cache")
    return [*words, *shlex.split(options.server_args)]


def main(argv: list[str]) -> int:
    made = common.parser(__doc__, target="demo", draft="demo")
    made.add_argument("--policy", default="adaserve", help="scheduling policy (adaserve); spec:4 drafts as peers do")
    options, bench = common.parse(made, argv)
    policy = options.policy if common.drafted(options) else "ar"
    peer = common.Peer("adaserve_jax", tuple(command(options)), "/ready", policy, __version__)
    return common.measure(peer, options.out, bench)


if __name__ == "__main__":
    common.run(main)
