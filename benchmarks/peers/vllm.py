"""Measures vLLM, with or without a draft model, as `adaserve bench` measures this package.

    python -m benchmarks.peers.vllm --target CHECKPOINT --draft CHECKPOINT --out run-vllm -- --rates 1,2

A draft model needs a vLLM that has the method `draft_model`: versions of 2025 refuse it.
Options: `vllm serve --help=all`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from pathlib import Path

from benchmarks.peers import common

PROGRAM, HOW = "vllm", "pip install vllm (into an environment of its own, named by PATH)"


def command(server: str, options: argparse.Namespace) -> list[str]:
    """Sampling is that of the requests alone, not of the model's generation_config.json."""
    target = common.checkpoint(options.target, "target")
    words = [server, "serve", target, "--served-model-name", Path(options.target).name, "--host", common.HOST]
    words += ["--max-model-len", str(options.max_context), "--max-num-seqs", str(options.max_requests)]
    words += ["--generation-config", "vllm"]
    words.append("--enable-prefix-caching" if options.prefix_cache else "--no-enable-prefix-caching")
    if common.drafted(options):
        draft = common.checkpoint(options.draft, "draft")
        settings = {"method": "draft_model", "model": draft, "num_speculative_tokens": options.draft_tokens}
        words += ["--speculative-config", json.dumps(settings)]
    return [*words, *shlex.split(options.server_args)]


def environment(server: str) -> dict[str, str]:
    """Return what vLLM needs to be told: by itself it leaves a core to others, and takes much memory for KV pages."""
    return {
        "PATH": f"{Path(server).parent}{os.pathsep}{os.environ['PATH']}",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }


def main(argv: list[str]) -> int:
    options, bench = common.parse(common.parser(__doc__, target="demo", draft="demo"), argv)
    server = common.program(PROGRAM, HOW)
    version = " ".join(common.output(server, "--version").split()[-1:])
    peer = common.Peer("vLLM", tuple(command(server, options)), "/health", common.policy_name(options), version,
                       environment=environment(server))  # fmt: skip
    return common.measure(peer, options.out, bench)


if __name__ == "__main__":
    common.run(main)
