"""lm-eval over HTTP: multiple choice and generated texts, with the values that the target's own logits give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.special import log_softmax

from adaserve_jax.server.serve import load_tokenizer
from tests.clients.conftest import TOKENIZER
from tests.oracles.llama import oracle_logits

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
PACKAGE = "lm_eval"
CHOICES = ["a + b", "None", "self.values", "banana"]
DOCUMENTS = [
    {"question": f"def {name}_{i}(a, b):\n    return", "choices": CHOICES[i % 3 :] + CHOICES[: i % 3], "answer": i % 4}
    for i, name in enumerate(("add", "get", "find", "close", "is_open", "sum", "none", "read"))
]
ENDS = ["\n", ")"]
MAX_TOKENS = 12
TASKS: list[dict[str, Any]] = [
    {"task": "chosen", "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
     "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
    {"task": "written", "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}",
     "generation_kwargs": {"until": ENDS, "max_gen_toks": MAX_TOKENS, "do_sample": False},
     "metric_list": [{"metric": "exact_match"}]},
]  # fmt: skip


def run(clients: Any) -> tuple[dict[str, dict[str, float]], Callable[[str], list[dict[str, Any]]]]:
    """Run both tasks; return the metrics of each, and its samples in the order of the documents."""
    folder: Path = clients.folder
    (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    for task in TASKS:
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "documents.jsonl")}},
                "test_split": "test", "doc_to_text": "{{question}}"}  # fmt: skip
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task | data))
    model = f"model=demo,base_url={clients.url}/v1/completions,tokenizer={TOKENIZER},num_concurrent=4,max_length=512"
    clients.run(
        "lm_eval", "run", "--model", "local-completions", "--tasks", "chosen", "written", "--include_path", folder,
        "--model_args", model, "--output_path", "found", "--log_samples",
    )  # fmt: skip
    (results,) = (folder / "found").glob("*/results*.json")

    def samples(task: str) -> list[dict[str, Any]]:
        (file,) = (folder / "found").glob(f"*/samples_{task}_*.jsonl")
        return sorted(map(json.loads, file.read_text().splitlines()), key=lambda one: one["doc_id"])

    return json.loads(results.read_text())["results"], samples


def log_likelihood(context: str, continuation: str) -> float:
    """Sum the log probabilities of what follows the context's tokens in the tokens of both together."""
    tokenizer = load_tokenizer("demo")
    ids, known = tokenizer.encode(context + continuation), len(tokenizer.encode(context))
    logprobs = log_softmax(oracle_logits(TOKENIZER, ids), axis=1)
    return float(sum(logprobs[place - 1, ids[place]] for place in range(known, len(ids))))


def greedy(prompt: str) -> str:
    """Write by the oracle's likeliest tokens, up to the first of ENDS."""
    tokenizer = load_tokenizer("demo")
    ids = list(tokenizer.encode(prompt))
    known = len(ids)
    while len(ids) < known + MAX_TOKENS and ids[-1] != 0:
        ids.append(int(np.argmax(oracle_logits(TOKENIZER, ids)[-1])))
    text = tokenizer.decode([each for each in ids[known:] if each])
    return min((text.partition(end)[0] for end in ENDS), key=len)


def test_both_kinds_of_tasks_have_the_values_of_the_models_own_logits(clients):
    metrics, samples = run(clients)
    right, right_by_length = [], []
    for document, sample in zip(DOCUMENTS, samples("chosen"), strict=True):
        sent = [sample["arguments"][f"gen_args_{i}"] for i in range(len(CHOICES))]
        wanted = [log_likelihood(one["arg_0"], one["arg_1"]) for one in sent]
        told = [float(response[0][0]) for response in sample["resps"]]
        assert told == pytest.approx(wanted, abs=0.05)
        lengths = [len(choice) for choice in document["choices"]]
        right.append(np.argmax(wanted) == document["answer"])
        right_by_length.append(np.argmax(np.divide(wanted, lengths)) == document["answer"])
    assert 0 < np.mean(right) < 1, "documents of which all or none are right show nothing"
    assert metrics["chosen"]["acc,none"] == pytest.approx(np.mean(right))
    assert metrics["chosen"]["acc_norm,none"] == pytest.approx(np.mean(right_by_length))
    texts = [sample["resps"][0][0] for sample in samples("written")]
    assert texts == [greedy(document["question"]) for document in DOCUMENTS]
    assert metrics["written"]["sample_len"] == len(DOCUMENTS)
