"""Logits, heads and texts of targets divided over CPU devices; test_mesh.py runs this in a process of its own.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.runtime.mesh_process FOLDER WHAT

What is written into FOLDER by WHAT:

* `quick`, `all`: logits.npz, by case and number of devices, and report.json: bytes of each device, the ledger's bytes,
  programs of READ, texts and refusals. `quick` runs QUICK alone, without texts.
* `heads KIND ...`: heads.npz and heads.json, of draft heads of these kinds beside a divided target.
* `taught`: taught.json, of heads that learn there.
* `N [DRAFT]`: texts.json, on N devices.

A family is added by a name in WRITTEN, which makes its checkpoint, and a line in CASES; docs/models.md has both in its
table.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax import LLM, SLO, SamplingParams
from adaserve_jax.config import EngineConfig
from adaserve_jax.distill.heads import HeadTarget
from adaserve_jax.distill.programs import TrainPrograms
from adaserve_jax.distill.records import pack
from adaserve_jax.distill.trainer import Trainer
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.models import loading as converted
from adaserve_jax.models.config import ModelConfig, resolve_folder
from adaserve_jax.models.export import convert
from adaserve_jax.models.grow import GrownShape, grow
from adaserve_jax.runtime.executor import load_executor
from adaserve_jax.runtime.model import DeviceModel
from adaserve_jax.runtime.pools import pool_parts
from adaserve_jax.runtime.sizing import adapter_bytes, page_bytes, weight_bytes
from tests.conftest import optimised
from tests.distill.made import made_record
from tests.engines import NARROW
from tests.models.adapters import write_adapter
from tests.models.checkpoints import MIXTRAL, write_checkpoint, write_eagle3, write_medusa, write_mimo
from tests.models.quantized_checkpoints import write_quantized
from tests.models.torch_checkpoints import VOCABULARY, write_family
from tests.runtime.head_steps import DEPTH, SMALL, searched
from tests.runtime.packed_model import RANK, TREE_PARENTS, TREE_TOKENS, build, plan_of, run, trees

CASES = {
    "plain": ("plain", False, "none", (1, 4)),
    "biases": ("biases", False, "none", (1, 4)), "biases_exact": ("biases", True, "none", (2,)),
    "norms": ("norms", False, "none", (1, 2, 4)), "norms_exact": ("norms", True, "none", (4,)),
    "norms_int8": ("norms", False, "int8", (1, 4)), "norms_int4": ("norms", False, "int4", (1, 4)),
    "converted": ("converted", False, "none", (4,)), "converted_int8": ("converted", False, "int8", (4,)),
    "odd": ("odd", False, "none", (1, 2)), "experts_int4": ("experts", False, "int4", (1, 4)),
    "gptq_int4": ("gptq_in_turn", False, "int4", (1, 2)),
    "demo_exact": ("demo", True, "none", (1, 4)), "experts": ("experts", False, "none", (1, 4)),
    "experts_exact": ("experts", True, "none", (4,)), "experts_int8": ("experts", False, "int8", (1, 4)),
    "narrow": ("narrow", False, "none", (1, 2)), "narrow_exact": ("narrow", True, "none", (2,)),
    "gemma": ("gemma", False, "none", (1, 2)), "gemma_exact": ("gemma", True, "none", (2,)),
    "gemma_int8": ("gemma", False, "int8", (1, 2)), "phi": ("phi", False, "none", (1, 2)),
    "oss": ("oss", False, "none", (1, 2, 4)), "oss_exact": ("oss", True, "none", (4,)),
    "oss_int8": ("oss", False, "int8", (1, 2)), "mxfp4": ("mxfp4", False, "none", (1, 2, 4)),
    "gptq": ("gptq", False, "none", (1, 2)), "gptq_int8": ("gptq", False, "int8", (1, 2)),
    "adapted": ("norms", False, "none", (1, 4)), "adapted_exact": ("norms", True, "none", (4,)),
    "adapted_int8": ("norms", False, "int8", (1, 4)), "adapted_int4": ("norms", False, "int4", (1, 4)),
    "adapted_phi": ("phi", False, "none", (1, 2)),
    "adapted_phi_exact": ("phi", True, "none", (2,)), "adapted_oss": ("oss", False, "none", (1, 4)),
    "shared": ("shared", False, "none", (1, 2, 4)), "shared_exact": ("shared", True, "none", (4,)),
    "joint": ("joint", False, "none", (1, 2, 4)), "joint_exact": ("joint", True, "none", (2, 4)),
    "shared_int8": ("shared", False, "int8", (1, 4)), "glm": ("glm", False, "none", (1, 2)),
    "three": ("three", False, "none", (1, 2)), "grown_exact": ("grown", True, "none", (1, 4)),
}  # fmt: skip
"""Checkpoint, whether in the order of the deterministic mode, type of the weights, and numbers of devices."""
WRITTEN = {
    "norms": "qwen3_window", "experts": "mixtral", "biases": "llama_biases", "narrow": "qwen3_moe_mixed",
    "oss": "gpt_oss", "gemma": "gemma3", "phi": "phi4_mini", "shared": "glm4_moe", "glm": "glm4",
    "joint": "minimax_m2",
}  # fmt: skip
"""Families of checkpoints that transformers writes."""
QUANTIZED = {
    "mxfp4": ("gpt_oss", "mxfp4"), "gptq": ("llama", "gptq"), "gptq_in_turn": ("llama", "gptq_in_turn"),
}  # fmt: skip
"""Family and recipe of checkpoints whose quantised twins are taken."""
ADAPTED = {
    "norms": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "phi": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), "oss": ("q_proj", "k_proj", "v_proj", "o_proj"),
}  # fmt: skip
"""Modules that the adapters of cases whose names begin so change, by checkpoint."""
QUICK = ("plain", "experts")
"""Cases of `make test`, which have chunks, trees, shares and copies on one device and on four."""
READ = ("plain", "norms")
"""Cases whose programs are read."""
OPTIMISED = (*READ, "converted", "demo_exact", "grown_exact")
"""Cases whose programs are read, or whose bits are compared."""
PROMPTS = ["def add(a, b):\n", "import os\n", "Question: Tom has 3 apples.", "x = ["]
ASKED = ({}, {"repetition_penalty": 1.5}, {"bad_words": ("self", "return"), "presence_penalty": 1.0}, {"logprobs": 3})
"""Changes of logits beside plain texts."""


def logits_of(model: DeviceModel) -> np.ndarray:
    """Two chunks of a prompt, then a tree; where there are adapters, through the second of two."""
    adapter = model.programs.max_adapters
    sequence = np.random.default_rng(1).integers(2, VOCABULARY, 130).tolist()
    parts = [run(model, plan_of(0, sequence[:90], adapter), trees([], []))[:90]]
    parts.append(run(model, plan_of(90, sequence[90:], adapter), trees([], []))[:40])
    parts.append(run(model, plan_of(130, [], adapter), trees(TREE_TOKENS, TREE_PARENTS))[: len(TREE_TOKENS)])
    return np.concatenate(parts)


def bytes_by_device(arrays: dict[str, jax.Array] | tuple[jax.Array, ...]) -> list[int]:
    held: dict[int, int] = {}
    for leaf in jax.tree.leaves(arrays):
        for shard in leaf.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return [held[device] for device in sorted(held)]


def ledger_bytes(model: DeviceModel, quantize: str) -> dict[str, int]:
    """What the ledger says of one device."""
    partition, dtype = model.programs.partition, model.pools.k.dtype
    page = page_bytes(model.programs.config, model.pools.page_size, dtype, "cpu")
    adapters = adapter_bytes(model.whole, model.programs.max_adapters, RANK, dtype, partition)
    return {
        "weights": weight_bytes(model.whole, dtype, quantize, partition) + adapters,
        "pools": model.pools.num_pages * page,
    }


def texts_of(llm: LLM) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True, **asked)
        for seed, (temperature, asked) in enumerate(zip((0.0, 0.8, 1.2, 0.8), ASKED, strict=True))
    ]
    outputs = llm.generate(PROMPTS, params, slo=SLO(tpot_ms=0.5))
    assert [len(output.choices[0].logprobs) for output in outputs] == [0, 0, 0, 24]
    return [output.token_ids for output in outputs]


def texts(ways: int, draft: str = "demo") -> list[list[int]]:
    with optimised():
        made = LLM(tp=ways, draft=draft, **NARROW)
    with made as llm:
        found = texts_of(llm)
        assert llm.stats().compiles_after_ready == 0
        assert llm.stats().scheduler.accepted_tokens > 0
    return found


def refusal(target: object = "demo", **options: object) -> str:
    try:
        LLM(target, **(NARROW | options)).close()  # type: ignore[arg-type]
    except ConfigError as error:
        return str(error)
    return ""


def write_heads(folder: Path, kinds: list[str]) -> None:
    """Trees of these kinds of heads on one device, and on two that share the target; and what the ledger says."""
    target, mimo = write_checkpoint(folder / "target", num_hidden_layers=4), write_mimo(folder / "mimo")
    read = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    drafts = {
        "eagle3": (target, write_eagle3(folder / "eagle3", eagle_config=read, own_embedding=False)),
        "medusa": (target, write_medusa(folder / "medusa", heads=DEPTH)), "mtp": (mimo, "mtp"),
    }  # fmt: skip
    trees, sizes = {}, {}
    for kind in kinds:
        of, draft = drafts[kind]
        for ways in (1, 2):
            executor = load_executor(EngineConfig(target=str(of), draft=str(draft), tp=ways, **SMALL))
            executor.compile()
            found = searched(executor, [[7, 1], [8, 8], [20, 9]], [[6, 8], [21, 10]])
            assert executor.local_drafter is not None and executor.compiles_after_ready == 0
            for row, candidates in found.items():
                for name in ("token", "parent", "log_f", "log_q"):
                    trees[f"{kind}-{ways}-{row}-{name}"] = getattr(candidates, name)[row]
            pools, own = executor.target.pools, executor.local_drafter.model.weights[0]
            ledger, limits = executor.resolved.sizes, executor.limits
            sizes[f"{kind}-{ways}"] = {
                "pages": (ledger.target_page * limits.num_pages, sum(bytes_by_device(tuple(pool_parts(pools))))),
                "weights": (ledger.draft_weights, sum(weight.nbytes for weight in own.values())),
            }
            executor.close()
    np.savez(folder / "heads.npz", **trees)
    (folder / "heads.json").write_text(json.dumps(sizes))


def teach_heads(folder: Path) -> None:
    """Loss and acceptance of heads before and after three optimiser steps, by kind and devices of the target."""
    target = write_checkpoint(folder / "target", num_hidden_layers=4)
    read = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    heads = {
        "eagle3": write_eagle3(folder / "eagle3", eagle_config=read, own_embedding=False),
        "medusa": write_medusa(folder / "medusa", heads=DEPTH),
    }
    record = made_record(np.random.default_rng(1), 30, 12, top=64, vocab=320)
    (batch,) = pack([record], 32, np.random.default_rng(0))
    learn, found = LearnConfig(learn_rate=0.01), {}
    for kind, head in heads.items():
        for ways in (1, 2):
            executor = load_executor(
                EngineConfig(target=str(target), draft=str(head), tp=ways, learning=learn, **SMALL)
            )  # fmt: skip
            assert executor.local_drafter is not None
            source = HeadTarget(executor.target.config, executor.target.params, executor.target.placement)
            programs = TrainPrograms(executor.local_drafter.model.config, learn, 32, jnp.float32, target=source)
            programs.compile()
            trainer = Trainer(programs, executor.draft_params(0))
            scores = [trainer.evaluate(batch)]
            for _ in range(3):
                trainer.accumulate(batch)
                assert trainer.apply().finite
                scores.append(trainer.evaluate(batch))
            found[f"{kind}-{ways}"] = [(each.loss_sum, each.overlap_sum) for each in scores]
            executor.close()
    (folder / "taught.json").write_text(json.dumps(found))


def main(folder: Path, *, quick: bool) -> None:
    checkpoints = {"plain": write_checkpoint(folder / "plain", vocab_size=VOCABULARY, shards=3)}
    if quick:  # without torch, whose import alone takes seconds
        eight = MIXTRAL | {"num_local_experts": 8}
        checkpoints["experts"] = write_checkpoint(
            folder / "experts", **eight, vocab_size=VOCABULARY, num_hidden_layers=1
        )
    else:
        checkpoints |= {
            name: write_family(folder / name, family, shards=name in ("norms", "experts"))
            for name, family in WRITTEN.items()
        }
        checkpoints |= {name: write_quantized(folder / name, *which)[0] for name, which in QUANTIZED.items()}
        checkpoints |= {
            "odd": write_checkpoint(folder / "odd", vocab_size=VOCABULARY + 1, dtype="bf16"),
            "demo": resolve_folder("demo", "target"), "converted": folder / "converted",
            # Neurons that two devices cannot share, so that each has whole experts.
            "three": write_checkpoint(folder / "three", **MIXTRAL, vocab_size=VOCABULARY, intermediate_size=51),
            "grown": folder / "grown",
        }  # fmt: skip
        demo = ModelConfig.from_folder(checkpoints["demo"])
        grow(checkpoints["demo"], checkpoints["grown"], GrownShape(
            demo.num_layers, demo.hidden_size, demo.num_heads, demo.num_kv_heads, demo.intermediate_size, 4, 2
        ))  # fmt: skip
        converted.CHUNK_BYTES = 2048  # shards begin and end inside chunks
        convert(checkpoints["norms"], folder / "converted")
    adapters = {
        name: tuple(
            write_adapter(folder / f"{name}_adapter{seed}", checkpoints[name], seed=seed, modules=modules)
            for seed in (1, 2)
        )
        for name, modules in ADAPTED.items()
        if name in checkpoints
    }
    logits, held, ledger, hlo = {}, {}, {}, {}
    for case in QUICK if quick else CASES:
        name, canonical, quantize, numbers = CASES[case]
        for ways in numbers:
            with optimised() if case in OPTIMISED and not quick else contextlib.nullcontext():
                model = build(
                    checkpoints[name], canonical, ways, quantize, adapters[name] if case.startswith("adapted") else ()
                )
            key = f"{case}-{ways}"
            logits[key] = logits_of(model)
            held[key] = {"weights": bytes_by_device(model.params), "pools": bytes_by_device(model.pools)}
            ledger[key] = ledger_bytes(model, quantize)
            if case in READ:
                hlo[key] = [program.as_text() for program in model.compiled.values()]
            model.close()
    odd = write_checkpoint(folder / "odd_groups", intermediate_size=6)
    np.savez(folder / "logits.npz", **logits)
    report = {
        "held": held, "ledger": ledger, "hlo": hlo, "texts": [] if quick else texts(4),
        "refusals": {
            "more": refusal(tp=8), "uneven": refusal(tp=3),
            "groups": refusal(str(odd), tp=2, draft=None, deterministic=False, quantize="int4"),
        },
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    folder, what, *more = Path(sys.argv[1]), *sys.argv[2:]
    if what.isdigit():
        (folder / "texts.json").write_text(json.dumps(texts(int(what), *more)))
    elif what == "taught":
        teach_heads(folder)
    elif what == "heads":
        write_heads(folder, more)
    else:
        main(folder, quick=what == "quick")
