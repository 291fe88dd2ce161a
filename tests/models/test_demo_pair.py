"""The embedded pair: two well-formed checkpoints, small, as good as promised, with a card made from measurements."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors import safe_open

from adaserve_jax.models.config import ModelConfig, resolve_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "adaserve_jax/models/demo"
MODELS = ("target", "draft")
TEXTS = [
    "def f(x):\n        return {k: v for k, v in x}  # done\n\n\n\tif a:\r\n",
    "Ünïcödé 漢字 \N{FAMILY} \U0001f469\u200d\U0001f680 \u202e rtl \x00\x01\x7f \ufeff \ufffd",
    "   leading, trailing   ",
    "1234567890 3.14e-10 $5 <<5*3=15>> #### 15",
    "",
]


@pytest.fixture(scope="module", params=MODELS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # and with it torch

    return AutoTokenizer.from_pretrained(DEMO / request.param)


@pytest.fixture(scope="module")
def metrics() -> dict:
    return json.loads((DEMO / "metrics.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def calibration() -> dict:
    return json.loads((DEMO / "calibration.json").read_text(encoding="utf-8"))


def card_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_pair_card", ROOT / "scripts/demo_pair/card.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config_of(model: str) -> dict:
    return json.loads((DEMO / model / "config.json").read_text(encoding="utf-8"))


def expected_shapes(config: dict) -> dict[str, list[int]]:
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {
        "input_layernorm": [hidden],
        "post_attention_layernorm": [hidden],
        "self_attn.q_proj": [query, hidden],
        "self_attn.k_proj": [kv, hidden],
        "self_attn.v_proj": [kv, hidden],
        "self_attn.o_proj": [hidden, query],
        "mlp.gate_proj": [wide, hidden],
        "mlp.up_proj": [wide, hidden],
        "mlp.down_proj": [hidden, wide],
    }
    shapes = {"model.embed_tokens.weight": [config["vocab_size"], hidden], "model.norm.weight": [hidden]}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def test_the_vocabularies_are_identical() -> None:
    target, draft = ((DEMO / model / "tokenizer.json").read_bytes() for model in MODELS)
    assert target == draft
    assert all(config_of(model)["vocab_size"] == 2048 for model in MODELS)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < 2048 for token in ids)


def test_special_tokens_and_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 2048
    assert tokenizer.eos_token == "<|endoftext|>"
    assert config_of("target")["eos_token_id"] == tokenizer.eos_token_id
    turns = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>s<|user|>u<|assistant|>a<|endoftext|><|user|>u<|assistant|>"
    assert len(tokenizer("<|user|><|assistant|><|endoftext|>")["input_ids"]) == 3


@pytest.mark.parametrize("model", MODELS)
def test_the_tensors_match_the_configuration(model: str) -> None:
    config = config_of(model)
    assert config["head_dim"] == 64 and config["tie_word_embeddings"]
    with safe_open(DEMO / model / "model.safetensors", framework="numpy") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}  # noqa: SIM118
    assert shapes == expected_shapes(config)
    assert kinds == {"F16"}


def test_the_pair_is_small() -> None:
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 12_000_000


@pytest.mark.parametrize("domain", ["code", "prose"])
def test_draft_and_target_overlap(metrics: dict, domain: str) -> None:
    assert metrics["held_out"][domain]["sum_min_t1.0"] >= 0.6


def test_the_card_is_made_from_the_metrics(metrics: dict) -> None:
    assert (DEMO / "MODEL_CARD.md").read_text(encoding="utf-8") == card_module().render(metrics)


def test_the_head_is_of_the_target_and_its_card_is_made_from_its_metrics() -> None:
    folder = resolve_folder("demo-head", "draft")
    config = ModelConfig.from_folder(folder, may_be_head=True)
    config.check_target(ModelConfig.from_folder(resolve_folder("demo", "target")))
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", framework="numpy") as tensors:
        sizes = [tensors.get_tensor(name).size for name in tensors.keys()]  # noqa: SIM118
    assert sum(sizes) == metrics["parameters"]["stored"]
    assert metrics["parameters"]["forward"] <= metrics["parameters"]["draft_forward"]
    evaluations = [each["acceptance"] for each in metrics["evaluations"]]
    assert evaluations[-1] > evaluations[0]
    assert (folder / "MODEL_CARD.md").read_text(encoding="utf-8") == card_module().render_head(metrics)


@pytest.mark.parametrize("rule", ["coupled", "greedy"])
def test_the_calibration_is_a_monotone_table_of_chances(calibration: dict, rule: str) -> None:
    edges, table = np.array(calibration[rule]["edges"]), np.array(calibration[rule]["table"])
    assert np.all(np.diff(edges) > 0)
    assert table.shape == (8, 4, len(edges) + 1) and table.shape[-1] <= 24
    assert table.min() >= 0 and table.max() <= 1
    assert np.all(np.diff(table, axis=-1) >= 0)
    assert calibration["ece"][rule] < 0.05
