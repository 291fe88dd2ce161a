"""A model with LoRA adapters gives PEFT's logits, and those of the merged checkpoint, through the packed programs, in
chunks of a prompt and in trees, and the model's own bits where a row has none."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import RequestError
from adaserve_jax.models.families import ARCHITECTURE_OF_TYPE
from adaserve_jax.models.families import FAMILIES as SERVED
from adaserve_jax.runtime.adapters import KEY
from adaserve_jax.runtime.executor import load_executor
from adaserve_jax.runtime.model import DeviceModel, free
from tests.documents import rows, section
from tests.models.adapters import write_adapter, write_merged
from tests.models.checkpoints import write_checkpoint
from tests.models.torch_checkpoints import FAMILIES, VOCABULARY, torch_logits, torch_model, write_family
from tests.runtime.against_transformers import tree_logits
from tests.runtime.head_steps import SMALL
from tests.runtime.packed_model import TREE_PARENTS, TREE_TOKENS, build, plan_of, run, trees

TOLERANCE = 1e-4
PROMPT, CHUNK = 150, 90
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
OF_GLM = [*ATTENTION, "gate_up_proj", "down_proj"]
CASES = {
    "llama_biases-blocks": DENSE, "qwen2-blocks": DENSE, "qwen3_window-canonical": ["q_proj", "down_proj"],
    "mistral-blocks": DENSE, "gemma2-blocks": DENSE, "gemma3-canonical": DENSE, "phi4_mini-blocks": FUSED,
    "phi3-canonical": FUSED, "mixtral-blocks": ATTENTION, "qwen3_moe-blocks": ATTENTION,
    "gpt_oss-canonical": ATTENTION, "granite-blocks": DENSE, "smollm3-blocks": DENSE, "seed_oss-blocks": DENSE,
    "glm-canonical": OF_GLM, "glm4-blocks": OF_GLM, "ernie4_5-blocks": DENSE, "ministral3-blocks": DENSE,
    "qwen2_moe-blocks": ATTENTION, "glm4_moe-canonical": ATTENTION, "olmo2-blocks": DENSE, "olmo3-canonical": DENSE,
    "exaone4-blocks": DENSE, "olmoe-blocks": ATTENTION,
    "minimax_m2-blocks": ATTENTION, "hunyuan_dense-blocks": DENSE,
}  # fmt: skip
"""Family and order of attention's sums, and modules that the adapter changes: all that can be."""


def with_adapter(folder: Path, base: Path, modules: list[str], *, seed: int, rank: int = 4) -> Any:
    """The model with a random adapter, as PEFT makes it of the checkpoint; the adapter is saved to the folder."""
    import torch
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=modules, init_lora_weights=False)
        model = get_peft_model(torch_model(base), settings).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return model


def logits_of(model: DeviceModel, sequence: list[int], adapter: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a prompt in two chunks, and of the nodes of a tree behind it."""
    chunks = [
        run(model, plan_of(start, chunk, adapter), trees([], []))[: len(chunk)]
        for start, chunk in ((0, sequence[:CHUNK]), (CHUNK, sequence[CHUNK:]))
    ]
    tree = run(model, plan_of(len(sequence), [], adapter), trees(TREE_TOKENS, TREE_PARENTS))[: len(TREE_TOKENS)]
    return np.concatenate(chunks), tree


def _said() -> dict[str, str]:
    """Return what models.md says can be adapted, by family."""
    _, *families = rows(section("models.md", "## Families"))
    return {row.names[0]: row.cells[2] for row in families}


def test_every_family_has_a_row_in_the_documents_and_is_checked() -> None:
    checked = {f"{name}ForCausalLM" for name, _ in FAMILIES.values()} | {"MiMoForCausalLM"}
    assert set(SERVED) == set(_said()) == checked
    assert set(ARCHITECTURE_OF_TYPE.values()) == set(SERVED)


def test_the_table_of_families_says_what_can_be_adapted() -> None:
    modules: dict[str, list[list[str]]] = {}
    for case, adapted in CASES.items():
        modules.setdefault(f"{FAMILIES[case.split('-')[0]][0]}ForCausalLM", []).append(adapted)
    expected = {name: "attention" if ATTENTION in each else "all" for name, each in modules.items()}
    expected["MiMoForCausalLM"] = expected["Qwen2ForCausalLM"]
    assert _said() == expected, "models.md (left) says otherwise than CASES"


@pytest.mark.slow
def test_without_room_for_adapters_no_program_has_any(tmp_path: Path) -> None:
    """The forward takes adapters where there is room. Where there is none, programs do not depend on the rank."""
    config = EngineConfig(target=str(write_checkpoint(tmp_path / "target")), draft=None, **SMALL)
    texts = []
    for changes in ({}, {"max_lora_rank": 4}, {"max_loras": 3, "max_lora_rank": 4}):
        executor = load_executor(replace(config, **changes))
        outputs = partial(executor.target.programs.verify, max_depth=executor.limits.max_tree_depth)
        declared = executor.target.declare_forward(outputs)
        texts.append({each.key: each.function.lower(*each.arguments).as_text() for each in declared})
        executor.close()
    plain, other_rank, with_room = texts
    assert plain == other_rank and plain.keys() == with_room.keys() and plain
    room = "3x4x"  # A of three adapters of rank 4
    assert not any(room in text for text in plain.values())
    assert all(room in text for key, text in with_room.items() if text != plain[key])
    assert any(text != plain[key] for key, text in with_room.items())


def test_a_device_that_fails_loses_nothing_that_it_had_not_given_away(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "target", num_hidden_layers=1)
    executor = load_executor(EngineConfig(target=str(base), draft=None, max_loras=1, max_lora_rank=4, **SMALL))
    assert executor.adapters is not None
    matrices = executor.adapters.read(write_adapter(tmp_path / "adapter", base, seed=1))

    def fail(bank: dict[str, Any], *_: object) -> None:
        if given_away:
            free(bank)
        raise RuntimeError("the device fails")

    executor.target.compiled = {KEY: fail}
    given_away = False
    with pytest.raises(RequestError, match="the device has no room for the adapter: the device fails"):
        executor.put_adapter(1, matrices)
    given_away = True
    with pytest.raises(RuntimeError, match=r"^the device fails"):
        executor.put_adapter(1, matrices)
    executor.close()


def test_prompts_and_trees_equal_the_merged_checkpoint(tmp_path: Path) -> None:
    """Compare each of two slots; without an adapter, bits are those of a model that has no room for any."""
    base = write_checkpoint(tmp_path / "base", num_hidden_layers=1)
    adapters = tuple(write_adapter(tmp_path / str(seed), base, seed=seed) for seed in (1, 2))
    sequence = np.random.default_rng(1).integers(2, VOCABULARY, PROMPT).tolist()
    model, alone = build(base, False, adapters=adapters), build(base, False)
    plain = logits_of(alone, sequence, 0)
    for ours, without in zip(logits_of(model, sequence, 0), plain, strict=True):
        np.testing.assert_array_equal(ours, without)
    for slot, adapter in enumerate(adapters, 1):
        merged = build(write_merged(tmp_path / f"merged{slot}", base, adapter), False)
        found = zip(logits_of(model, sequence, slot), logits_of(merged, sequence, 0), plain, strict=True)
        for ours, expected, without in found:
            assert np.abs(expected - without).max() > 0.5, "the adapter changes what the model says"
            assert np.abs(ours - expected).max() < TOLERANCE
        merged.close()
    model.close()
    alone.close()


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("case", CASES)
def test_prompts_and_trees_equal_peft(case: str, tmp_path: Path) -> None:
    name, attention = case.split("-")
    base = write_family(tmp_path / "base", name)
    theirs = [with_adapter(tmp_path / str(seed), base, CASES[case], seed=seed, rank=2 + 2 * seed) for seed in (1, 2)]
    assert json.loads((tmp_path / "1" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    model = build(base, attention == "canonical", adapters=(tmp_path / "1", tmp_path / "2"))
    alone = build(base, attention == "canonical")
    sequence = np.random.default_rng(1).integers(2, VOCABULARY, PROMPT).tolist()
    plain = logits_of(alone, sequence, 0)
    for ours, without in zip(logits_of(model, sequence, 0), plain, strict=True):
        np.testing.assert_array_equal(ours, without)
    errors = []
    for slot, peft in enumerate(theirs, 1):
        for ours, expected, without in zip(
            logits_of(model, sequence, slot),
            (torch_logits(peft, sequence), tree_logits(peft, sequence)),
            plain,
            strict=True,
        ):
            assert np.abs(expected - without).max() > 0.5, "the adapter changes what the model says"
            errors.append(np.abs(ours - expected).max())
    print(f"max abs logit difference, {case}: {max(errors):.1e}")
    model.close()
    alone.close()
    assert max(errors) < TOLERANCE
