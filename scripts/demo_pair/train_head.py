"""Train the EAGLE-3 head of the demo target by `adaserve distill`, from prompts alone, and export it beside the pair.

Prompts are the beginnings of training documents; the target writes the rest. The head's layer has the draft's width, so
that a forward of it costs no more than the draft's, and its embedding and logits begin as the draft's. A run that was
stopped goes on from `--work`.
"""

import argparse
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from card import render_head
from corpus import ASSISTANT, MIX, Document, documents
from safetensors.numpy import load_file

from adaserve_jax import LLM, SamplingParams
from adaserve_jax.distill.heads import eagle3_settings
from adaserve_jax.models.config import ModelConfig
from adaserve_jax.models.config_values import read_json
from adaserve_jax.models.decoder import init_params
from adaserve_jax.models.export import export_head, new_head_folder
from adaserve_jax.models.loading import load_params

DEMO = Path(__file__).parents[2] / "adaserve_jax/models/demo"
INTERMEDIATE = 512
PROMPT_CHARS = (60, 320)
"""Bounds of a prompt that is cut from a document."""
CALIBRATED = 96
"""Prompts whose texts the chances of acceptance are learned from."""


def prompts(gsm8k: Path, count: int, seed: int) -> list[str]:
    """Return prompts of training documents, the kinds with the shares of MIX."""
    rng = random.Random(seed)
    by_kind: dict[str, list[Document]] = {}
    for document in documents(gsm8k):
        if not document.held_out:
            by_kind.setdefault(document.kind, []).append(document)
    kinds = rng.choices(list(MIX), weights=list(MIX.values()), k=count)
    return [beginning(rng.choice(by_kind[kind]), rng) for kind in kinds]


def beginning(document: Document, rng: random.Random) -> str:
    """Return a chat's question, a question of GSM8K with the word that asks for its answer, or lines of a file."""
    if document.kind in ("maths_chat", "code_chat"):
        return document.text[: document.text.rindex(ASSISTANT) + len(ASSISTANT)]
    if document.kind == "maths":
        return document.text[: document.text.rindex("\nAnswer:") + len("\nAnswer:")]
    starts = [match.end() for match in re.finditer("^|\n", document.text)]
    start = rng.choice(starts)
    return document.text[start : start + rng.randint(*PROMPT_CHARS)].rstrip() or document.text[: PROMPT_CHARS[0]]


def write_new_eagle3(out: Path, seed: int) -> None:
    """Write a head of the draft's width, with its embedding and, as logits, the same rows.

    `fc` begins random and the layer adds nothing at first.
    """
    target = ModelConfig.from_folder(DEMO / "target")
    draft = ModelConfig.from_folder(DEMO / "draft")
    settings = eagle3_settings(target, read_json(DEMO / "target/config.json")) | {
        "hidden_size": draft.hidden_size, "target_hidden_size": target.hidden_size, "intermediate_size": INTERMEDIATE,
        "num_attention_heads": draft.num_heads, "num_key_value_heads": draft.num_kv_heads,
    }  # fmt: skip
    known = load_params(DEMO / "draft", draft)
    head = init_params(new_head_folder(out, settings), seed)
    head |= {name: np.zeros_like(head[name]) for name in ("layers.0.out", "layers.0.down")}
    head |= {"embed": known["embed"], "head": known["embed"], "norm": known["norm"]}
    export_head(head, out, own_embedding=True)


def distill(work: Path, options: list[str]) -> None:
    """Train the head in `work`, or go on with training it."""
    command = [sys.executable, "-m", "adaserve_jax.cli", "distill", "--target", "demo", "--draft", str(work / "new")]
    command += ["--prompts", str(work / "prompts.jsonl"), "--out", str(work / "head"), "--json", str(work / "run.json")]
    command += ["--prompt-rows", "--save-dtype", "f16", "--schedule", "cosine", "--warmup", "0.03", *options]
    if (work / "head.training").exists():
        command.append("--resume")
    print(*command[1:], flush=True)
    subprocess.run(command, check=True)


def publish(work: Path, gsm8k: Path) -> None:
    """Copy the head into the package, with the chances that it is accepted, its metrics and its card."""
    folder = DEMO / "head"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(work / "head", folder)
    (weights_file,) = folder.glob("*.safetensors")
    weights_file.rename(folder / "model.safetensors")  # one file needs no index
    (folder / "model.safetensors.index.json").unlink()
    fit_chances(folder, gsm8k)
    run = json.loads((work / "run.json").read_text(encoding="utf-8"))
    weights = dict(load_file(folder / "model.safetensors"))
    draft = dict(load_file(DEMO / "draft/model.safetensors"))
    in_forward = (size for name, size in sizes(weights).items() if name not in ("embed_tokens.weight", "fc.weight"))
    parameters = {"stored": sum(sizes(weights).values()), "forward": sum(in_forward)}
    parameters["draft_forward"] = sum(sizes(draft).values())  # its embedding is its head too
    prompts = len(set((work / "prompts.jsonl").read_text(encoding="utf-8").splitlines()))
    kept = {name: run[name] for name in ("machine", "settings", "seconds", "evaluations")}
    metrics = {"parameters": parameters, "prompts": prompts, **kept}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    (folder / "MODEL_CARD.md").write_text(render_head(metrics), encoding="utf-8")


def sizes(weights: dict[str, np.ndarray]) -> dict[str, int]:
    """Return the number of elements of each tensor."""
    return {name: weight.size for name, weight in weights.items()}


def fit_chances(folder: Path, gsm8k: Path) -> None:
    """Write the head's calibration.json, learned by serving prompts of held-out documents."""
    held_out = [document for document in documents(gsm8k) if document.held_out]
    rng = random.Random(1)
    texts = [beginning(document, rng) for document in rng.sample(held_out, CALIBRATED)]
    chances = folder / "calibration.json"
    with LLM("demo", str(folder), policy="adaserve", draft_sources="model", calibration=str(chances)) as llm:
        for temperature in (0.0, 0.8):
            llm.generate(texts, SamplingParams(max_tokens=128, temperature=temperature, ignore_eos=True))
    chances.chmod(0o644)  # the engine writes it for its owner alone


def main() -> None:
    """Parse the command line, train and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl.gz")
    parser.add_argument("--work", type=Path, required=True, help="folder for prompts and the state of the run")
    parser.add_argument("--prompts", type=int, default=2600)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--train-only", action="store_true", help="do not replace the head in the package")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if not (args.work / "new").exists():
        lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts(args.gsm8k, args.prompts, seed=0)]
        (args.work / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        write_new_eagle3(args.work / "new", seed=0)
    if not (args.work / "head").exists():
        texts = ["--max-tokens", "160", "--temperature", "0.8", "--held-out", "0.03", "--round-prompts", "128"]
        distill(args.work, [*texts, "--step-tokens", "1024", "--epochs", str(args.epochs), "--rate", str(args.rate)])
    if not args.train_only:
        publish(args.work, args.gsm8k)


if __name__ == "__main__":
    main()
