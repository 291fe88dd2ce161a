"""Measures llama.cpp's server, with or without a draft model, as `adaserve bench` measures this package.

    python -m benchmarks.peers.llama_cpp --target target.gguf --draft draft.gguf --out run-llama -- --rates 1,2

llama.cpp reads GGUF files. In a checkout of it, each Hugging Face checkpoint is converted by:

    python convert_hf_to_gguf.py CHECKPOINT --outfile target.gguf --outtype f16

Options: its tools/server/README.md. Those of drafting were renamed in 2026; both spellings are known here, and the
program's own help says which it takes.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from benchmarks.peers import common

PROGRAM, HOW = (
    "llama-server",
    "brew install llama.cpp (or build it: cmake -B build && cmake --build build -t llama-server)",
)
COUNTS = {"timings_per_token": True}
"""Asks for the count so far in every event."""
CONVERT = "python convert_hf_to_gguf.py {folder} --outfile {name}.gguf --outtype f16"


def command(server: str, options: argparse.Namespace, known: str) -> list[str]:
    """known: the program's help. Its context is shared out among the requests that run together. Sampling is that of
    the requests alone: what they leave out is switched off."""
    words = [server, "--model", options.target, "--alias", Path(options.target).stem, "--host", common.HOST]
    words += ["--ctx-size", str(options.max_context * options.max_requests), "--parallel", str(options.max_requests)]
    words += ["--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0"]
    if not options.prefix_cache:
        words.append("--no-cache-prompt")
    if common.drafted(options):
        words += ["--model-draft", options.draft]
        if "--spec-draft-n-max" in known:
            words += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(options.draft_tokens)]
        else:
            words += ["--draft-max", str(options.draft_tokens), "--draft-min", "0"]
    return [*words, *shlex.split(options.server_args)]


def check_gguf(path: str) -> None:
    """Raise SystemExit, with the conversion, when it is no GGUF file."""
    file = Path(path).expanduser()
    if file.is_dir():
        how = CONVERT.format(folder=shlex.quote(path), name=file.name)
        raise common.stop(f"llama.cpp needs a GGUF file, got the folder {path}; in a checkout of llama.cpp: {how}")
    try:
        with file.open("rb") as opened:
            magic = opened.read(4)
    except OSError as error:
        raise common.stop(f"cannot read {path}: {error.strerror}; give the path of a GGUF file") from None
    if magic != b"GGUF":
        raise common.stop(f"{path} must be a GGUF file, which begins with GGUF, got {magic!r}")


def main(argv: list[str]) -> int:
    options, bench = common.parse(common.parser(__doc__), argv)
    server = common.program(PROGRAM, HOW)
    for path in [options.target, *([options.draft] if common.drafted(options) else [])]:
        check_gguf(path)
    version = " ".join(common.output(server, "--version").split())
    words = command(server, options, common.output(server, "--help"))
    peer = common.Peer("llama.cpp", tuple(words), "/health", common.policy_name(options), version, extra_body=COUNTS)
    return common.measure(peer, options.out, bench)


if __name__ == "__main__":
    common.run(main)
