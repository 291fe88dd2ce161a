"""Sizing: "auto" becomes numbers that fit each other, and the ledger is exact to the byte."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from adaserve_jax.config import EngineConfig
from adaserve_jax.engine.llm import LLM
from adaserve_jax.engine.thread_engine import LocalEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.memory.ledger import MIB
from adaserve_jax.models import loading
from adaserve_jax.models.checkpoint_formats.encoding import Rule, WeightFormat
from adaserve_jax.models.checkpoint_formats.packed import InputsFirst
from adaserve_jax.models.config import ExpertConfig, ModelConfig
from adaserve_jax.models.families import MIXTRAL_NAMES
from adaserve_jax.models.placement import Placement
from adaserve_jax.models.rope import LongRopeScaling
from adaserve_jax.runtime import executor as executor_module
from adaserve_jax.runtime import sizing as footprint
from adaserve_jax.runtime.compile import compile_all
from adaserve_jax.runtime.executor import load_executor
from adaserve_jax.runtime.loading import plan_memory
from adaserve_jax.runtime.resample import Resampler
from adaserve_jax.runtime.sizing import (
    CPU_KV_BYTES,
    OWN_KERNEL,
    RESERVE_SHARE,
    Resolved,
    choose_attention,
    draft_attention,
    dtype_of,
    expert_bytes,
    resolve,
    weight_bytes,
    workspace_of,
)
from adaserve_jax.runtime.step_layout import step_layout
from adaserve_jax.types import SamplingParams
from tests.engines import DEMO, PLAIN

TARGET = ModelConfig(2048, 256, 704, 5, 4, 2, 64, 1e4, 1e-5, True, 2048)
DRAFT = ModelConfig(2048, 128, 352, 2, 2, 1, 64, 1e4, 1e-5, True, 1024)


def test_auto_on_a_cpu() -> None:
    resolved = resolve(EngineConfig(), TARGET, DRAFT)
    limits = resolved.limits
    assert resolved.config.max_context == limits.max_context == 1024  # the draft's, which is less
    assert resolved.dtype == dtype_of(EngineConfig()) == "float32"
    assert dtype_of(EngineConfig(dtype="bf16")) == "bfloat16" and dtype_of(EngineConfig(dtype="f32")) == "float32"
    assert limits.token_edges[-1] == resolved.config.max_batch_tokens
    assert resolved.verify_buckets.row_edges[-1] == limits.max_requests
    assert resolved.catchup_buckets.token_edges[-1] == limits.max_tokens
    assert limits.num_pages >= limits.max_pages_per_request
    assert resolved.config.attention == resolved.attention  # chosen once for all processes
    assert resolve(resolved.config, TARGET, DRAFT).limits == limits  # resolving again changes nothing


def test_without_a_draft_nothing_is_kept_for_one() -> None:
    limits = resolve(EngineConfig(draft=None), TARGET, None).limits
    assert (limits.max_depth, limits.max_width, limits.max_context) == (0, 0, 2048)


def test_by_itself_the_context_stays_within_that_of_the_short_rotary_factors() -> None:
    phi = replace(TARGET, rope_scaling=LongRopeScaling((1.0,) * 32, (2.0,) * 32, 512, 1.0))
    assert resolve(EngineConfig(draft=None), phi, None).limits.max_context == 512
    asked = EngineConfig(draft=None, max_context=600)
    assert resolve(asked, phi.for_context(600), None).limits.max_context == 600


def test_deterministic_mode_has_one_bucket() -> None:
    resolved = resolve(EngineConfig(deterministic=True, max_requests=8), TARGET, DRAFT)
    (bucket,) = resolved.verify_buckets.all()
    assert (bucket.rows, bucket.tokens, bucket.sampled) == (8, 64, 64)


def test_row_edges_say_how_many_requests_run() -> None:
    assert resolve(EngineConfig(row_edges=(1, 4)), TARGET, DRAFT).limits.max_requests == 4


def test_a_quantised_checkpoint_is_held_in_int8_where_full_precision_does_not_fit() -> None:
    """A checkpoint in full precision never is, and what was asked for is what is held. One in 4 bits is held in int4,
    if that holds all of its layers as they are."""
    stored = replace(TARGET, weight_format=WeightFormat("fp8 of a test", ()))
    options = {
        "draft": None, "draft_sources": "model", "max_requests": 1, "max_context": 64, "token_edges": (16,),
        "row_edges": (1,),
    }  # fmt: skip
    scarce, ample = (EngineConfig(memory_limit_mib=mib, **options) for mib in (16, 256))
    assert resolve(scarce, TARGET, None).config.quantize == "none"
    held = resolve(scarce, stored, None)
    assert held.config.quantize == "int8"
    assert held.sizes.target_weights == weight_bytes(TARGET, held.dtype, "int8")
    assert held.weight_format == "fp8 of a test, held as int8 with a scale per row; activations and KV are f32"
    held.check_memory()
    assert resolve(ample, stored, None).config.quantize == "none"
    less_and_less = (EngineConfig(memory_limit_mib=mib, **options) for mib in range(64, 4, -1))
    kinds = [resolve(each, stored, None).config.quantize for each in less_and_less]
    assert list(dict.fromkeys(kinds)) == ["none", "int8", "int4"]
    packed = InputsFirst(4, 128, along_inputs=True, order=tuple(range(8)))
    in_4_bits = replace(
        TARGET, weight_format=WeightFormat("4 bits", (Rule(packed),), kept=("lm_head", "re:.*mlp.gate$"))
    )
    others: list[dict[str, Any]] = [{"any_order": True}, {"bits": 8}, {"group_size": 48}]
    rounded = [
        *(WeightFormat("4 bits", (Rule(replace(packed, **each)),)) for each in others),
        WeightFormat("4 bits", (Rule(packed, ("re:.*mlp.*",)),)),
        WeightFormat("4 bits", (Rule(packed),), ("self_attn",)),
    ]  # fmt: skip
    held = resolve(scarce, in_4_bits, None)
    assert held.weight_format == "4 bits, held as int4 with a scale per group of inputs; activations and KV are f32"
    assert held.sizes.target_weights == weight_bytes(TARGET, held.dtype, "int4")
    assert {resolve(scarce, replace(TARGET, weight_format=each), None).config.quantize for each in rounded} == {"int8"}
    assert resolve(replace(scarce, quantize="none"), stored, None).config.quantize == "none"
    assert resolve(replace(ample, quantize="int8"), stored, None).config.quantize == "int8"


def test_texts_to_draft_from_are_left_room_for() -> None:
    """On a CPU they lie in the memory that pages take too."""
    options = {"draft": None, "max_requests": 1, "max_context": 2048, "memory_limit_mib": 1024}
    kept, without = (
        resolve(EngineConfig(suffix_kept_tokens=1 << 24, draft_sources=sources, **options), TARGET, None)
        for sources in ("suffix+model", "model")
    )
    kept.check_memory()
    assert kept.ledger().sizes.texts > 512 * MIB and not without.ledger().sizes.texts


SHORT = EngineConfig(max_requests=4, max_context=1024, num_pages=60)
"""4 requests of 16 pages each do not fit."""
NEEDS = 4 * 16


def test_the_extension_is_what_the_draft_takes() -> None:
    """The draft: an embedding of 2048 x 128, 2 layers, and a norm of 128."""
    layer = 128 + (2 + 1 + 1) * 64 * 128 + 128 * 128 + 128 + 2 * 352 * 128 + 128 * 352
    weights = (2048 * 128 + 2 * layer + 128) * 4
    draft_page, target_page = 2 * 2 * 1 * 64 * 64 * 4, 2 * 5 * 2 * 64 * 64 * 4
    found = resolve(replace(SHORT, elastic="on"), TARGET, DRAFT).limits
    assert found.extension_pages == (weights + 60 * draft_page) // target_page
    assert found.num_pages == 60


@pytest.mark.parametrize(
    ("elastic", "num_pages", "swaps", "extended"),
    [
        ("auto", NEEDS - 1, True, True),
        ("auto", NEEDS, True, False),  # every request fits at its longest: pages never run short
        ("auto", NEEDS - 1, False, False),  # the policy never swaps
        ("off", NEEDS - 1, True, False),
        ("on", NEEDS, False, True),
    ],
)
def test_when_pools_can_be_extended(elastic: str, num_pages: int, swaps: bool, extended: bool) -> None:
    config = replace(SHORT, elastic=elastic, num_pages=num_pages)
    assert (resolve(config, TARGET, DRAFT, elastic=swaps).limits.extension_pages > 0) == extended


@pytest.mark.parametrize(
    ("options", "draft", "reason"),
    [
        ({}, None, "there is no draft"),
        ({"tp": 2}, DRAFT, r"the target is divided over 2 devices \(tp\)"),
        ({"num_processes": 2, "tp": 1, "coordinator": "host:1"}, DRAFT, "the target lies in 2 processes"),
    ],
)
def test_where_pools_cannot_be_extended_is_said(
    options: dict, draft: ModelConfig | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * options.get("tp", 1))
    monkeypatch.setattr("adaserve_jax.runtime.sizing.Placement.over", lambda *_: Placement.on_one())
    config = replace(SHORT, **options)
    assert resolve(config, TARGET, draft, elastic=True).limits.extension_pages == 0
    with pytest.raises(ConfigError, match=f"elastic must be off or auto here, got 'on': {reason}"):
        resolve(replace(config, elastic="on"), TARGET, draft)


def test_pools_of_a_kernel_that_reads_one_cannot_be_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OWN_KERNEL, "cpu", "mosaic_tpu")
    assert resolve(SHORT, TARGET, DRAFT, elastic=True).limits.extension_pages == 0
    with pytest.raises(ConfigError, match="attention by 'mosaic_tpu' reads one pool of pages; use attention xla"):
        resolve(replace(SHORT, elastic="on"), TARGET, DRAFT)


def test_several_processes_give_all_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices() * 4)
    with pytest.raises(ConfigError, match="tp must be 4, all devices of the 2 processes, got 2"):
        resolve(EngineConfig(num_processes=2, tp=2, coordinator="host:1"), TARGET, DRAFT)


def test_a_draft_of_less_than_a_page_makes_no_page() -> None:
    huge = replace(TARGET, head_dim=TARGET.head_dim * 20_000)
    config = replace(SHORT, elastic="on", num_pages=16, max_requests=1)
    with pytest.raises(ConfigError, match="the draft's memory is less than one page of the target"):
        resolve(config, huge, DRAFT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 4096}, "max_context must be at most 1024, which the models support, got 4096"),
        ({"max_requests": 200}, r"max_tree_tokens \(128\) must be at least max_requests \(200\)"),
        (
            {"token_edges": (4, 16), "max_batch_tokens": 32},
            r"max_batch_tokens \(32\) must equal the last of token_edges",
        ),
        ({"deterministic": True, "token_edges": (16, 64)}, "one bucket: leave out token_edges and row_edges"),
        ({"attention": "cpu", "deterministic": True}, "attention must be auto or xla in deterministic mode"),
        ({"row_edges": (1, 4), "max_requests": 8}, r"the last of row_edges \(1, 4\) must equal max_requests \(8\)"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**options), TARGET, DRAFT)


@pytest.mark.parametrize(
    ("attention", "platform", "head_dim", "found"),
    [
        ("auto", "gpu", 64, "mosaic_gpu"),
        ("auto", "gpu", 80, "xla"),
        ("auto", "tpu", 128, "mosaic_tpu"),
        ("auto", "tpu", 64, "mosaic_tpu"),
        ("cpu", "gpu", 64, "attention 'cpu' runs on CPUs, and jax sees 'gpu'"),
        ("mosaic", "gpu", 64, "mosaic_gpu"),
        ("mosaic", "tpu", 128, "mosaic_tpu"),
        ("mosaic", "tpu", 80, "mosaic_tpu"),
        (
            "mosaic",
            "gpu",
            96,
            "cannot run on this device: the kernel supports head dimensions 64 and 128, not 96",
        ),
        ("mosaic", "cpu", 128, "needs a GPU or a TPU, and jax sees 'cpu'"),
    ],
)
def test_attention_is_what_its_platform_can_run(attention: str, platform: str, head_dim: int, found: str) -> None:
    model = replace(TARGET, head_dim=head_dim)
    arguments = (EngineConfig(attention=attention), model, jnp.dtype(jnp.bfloat16), platform)
    if found in ("xla", "mosaic_gpu", "mosaic_tpu"):
        assert choose_attention(*arguments) == found
    else:
        with pytest.raises(ConfigError, match=found):
            choose_attention(*arguments)


def test_the_gpu_kernel_is_for_hopper_gpus() -> None:
    arguments = (EngineConfig(attention="mosaic"), replace(TARGET, head_dim=128), jnp.dtype(jnp.bfloat16), "gpu")
    assert choose_attention(*arguments, "9.0") == "mosaic_gpu"
    for capability in ("8.0", "8.9", "10.0"):
        assert choose_attention(replace(arguments[0], attention="auto"), *arguments[1:], capability) == "xla"
        with pytest.raises(
            ConfigError, match=f"for Hopper GPUs, of compute capability 9, and this one has {capability}"
        ):
            choose_attention(*arguments, capability)


def test_a_draft_that_the_kernel_cannot_run_has_xla() -> None:
    bf16 = jnp.dtype(jnp.bfloat16)
    assert draft_attention("mosaic_gpu", replace(DRAFT, head_dim=96), 64, bf16) == "xla"
    assert draft_attention("mosaic_gpu", replace(DRAFT, head_dim=64), 64, bf16) == "mosaic_gpu"
    assert draft_attention("mosaic_tpu", replace(DRAFT, head_dim=96), 64, bf16) == "mosaic_tpu"


def test_pages_in_place_of_the_draft_need_xla_on_an_accelerator() -> None:
    model, bf16 = replace(TARGET, head_dim=128), jnp.dtype(jnp.bfloat16)
    assert choose_attention(EngineConfig(elastic="on"), model, bf16, "gpu") == "xla"


SMALL = replace(EngineConfig(**DEMO), elastic=EngineConfig().elastic, draft_sources="model")


def held(arrays: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "bf16"}, {"quantize": "int8"}, {"quantize": "int4"}, {"dtype": "bf16", "quantize": "int8"}],
)
def test_weights_and_pages_are_the_bytes_of_the_arrays(options: dict[str, Any]) -> None:
    executor = load_executor(replace(SMALL, **options))
    try:
        drafter = executor.local_drafter
        assert drafter is not None
        parts = {part.name: part.device_bytes for part in executor.ledger.parts()}
        assert parts == {
            "target weights": held(executor.target.params),
            "target KV pages": held(executor.target.pools),
            "draft weights": held(drafter.model.params),
            "draft KV pages": held(drafter.model.pools),
        }
    finally:
        executor.close()


def test_untied_heads_and_biases_count() -> None:
    """Qwen-like: an own head of 2048 x 256, and in each of 5 layers biases of (4 + 2 x 2) x 64."""
    more = replace(TARGET, tie_embeddings=False, qkv_bias=True)
    f32 = jax.numpy.dtype("float32")
    assert weight_bytes(more, f32) - weight_bytes(TARGET, f32) == 4 * (2048 * 256 + 5 * 8 * 64)
    # In int8 the head has a byte for each value and a scale for each row.
    assert weight_bytes(more, f32, "int8") - weight_bytes(TARGET, f32, "int8") == 2048 * (256 + 4) + 4 * 5 * 8 * 64
    # In int4 a matrix of a layer has half a byte for each value, and 3 bytes for each group, here of 32 inputs.
    wide = replace(TARGET, intermediate_size=768)
    rows, inputs = 8 * 64 + 256 + 2 * 768, 256
    values = rows * inputs + 256 * 768
    saved = 5 * (values + 4 * (rows + 256) - values // 2 - 3 * values // 32)
    assert weight_bytes(wide, f32, "int8") - weight_bytes(wide, f32, "int4") == saved


def test_int4_needs_whole_groups_of_inputs() -> None:
    """What several devices cannot divide: tests/runtime/test_mesh.py."""
    odd = replace(TARGET, intermediate_size=33)
    with pytest.raises(
        ConfigError, match=r"quantize must be none or int8 here, got 'int4': layers\.0\.down has 33 inputs"
    ):
        resolve(EngineConfig(quantize="int4"), odd, None)
    assert "int4" not in resolve(EngineConfig(), odd, None).sizes.quantized
    assert list(resolve(EngineConfig(), TARGET, None).sizes.quantized) == ["int8", "int4"]


def test_experts_count_whole_and_their_router_too() -> None:
    """In each of 5 layers 6 experts of 3 x 100 x 256 in place of the MLP, and a router of 6 x 256; int8 leaves the
    router as it is and has a scale for each row."""
    experts = ExpertConfig(6, 2, 100, normalised=True, names=MIXTRAL_NAMES)
    mixture, f32 = replace(TARGET, experts=experts), jax.numpy.dtype("float32")
    d, mlp = TARGET.hidden_size, 3 * TARGET.intermediate_size * TARGET.hidden_size
    values, router, layers = 6 * 3 * 100 * d, 6 * d, TARGET.num_layers
    assert weight_bytes(mixture, f32) - weight_bytes(TARGET, f32) == 4 * layers * (values + router - mlp)
    assert expert_bytes(mixture, f32) == 4 * layers * values
    assert expert_bytes(mixture, f32, "int8") == layers * (values + 4 * 6 * (200 + d))
    assert expert_bytes(TARGET, f32) == 0


def test_the_workspace_is_what_the_compiler_says(demo_engine: LocalEngine) -> None:
    """Programs of the `demo_engine` fixture; those of 16 tokens are a part of all."""
    executor = demo_engine.executor
    analyses = {key: program.memory_analysis() for key, program in executor.target.compiled.items()}
    temporary = max(each.temp_size_in_bytes for each in analyses.values())
    result = max(each.output_size_in_bytes - each.alias_size_in_bytes for each in analyses.values())
    workspace = executor.ledger.workspace
    # tables of 16 rows with 512 + 1024 tokens, and masks of a bit for each of 2048 tokens at 16 and at 64 positions
    kept = 12 * 16 * (512 + 1024) + 4 * (16 + 64) * 2048 // 32
    assert workspace is not None and workspace.bytes == temporary + result + kept
    assert executor.resampler is not None and held(executor.resampler.neutral) == kept
    assert sorted(workspace.by_tokens) == [16, 64]
    assert workspace.by_tokens[16] < workspace.by_tokens[64] == workspace.bytes
    assert executor.ledger.fits and executor.ledger.taken() > sum(
        held((model.params, model.pools)) for model in (executor.target, executor.local_drafter.model)
    )
    reserve = executor.ledger.sizes.reserve - int(RESERVE_SHARE * executor.ledger.limit.bytes)
    assert workspace.bytes <= reserve <= 4 * workspace.bytes


@pytest.mark.slow
def test_the_reserve_holds_drawing_again() -> None:
    """Where scores are nearly all that counts, those of the forward included, which are there meanwhile: many positions
    of few rows, and tables as long as the vocabulary for as many rows as positions."""
    for vocab_size, rows, tokens in ((8192, 4, 64), (2048, 16, 16)):
        config = EngineConfig(draft=None, max_requests=rows, max_context=1024, token_edges=(tokens,), row_edges=(rows,))
        resolved = resolve(config, replace(TARGET, vocab_size=vocab_size), None)
        stub: Any = SimpleNamespace(
            role="target", config=SimpleNamespace(vocab_size=vocab_size),
            programs=SimpleNamespace(max_pages=16, synthetic=None, layout=partial(step_layout, max_pages=16)),
            buckets=resolved.verify_buckets, placement=resolved.placement,
        )  # fmt: skip
        resampler = Resampler(stub, resolved.limits)
        taken = workspace_of(compile_all(resampler.declare()), resampler.shapes.bytes).bytes + 4 * tokens * vocab_size
        reserve = resolved.sizes.reserve - int(RESERVE_SHARE * resolved.memory.bytes)
        assert taken <= reserve <= 2 * taken


@pytest.mark.slow
def test_what_is_planned_is_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read: programs are compiled for shapes, and are the same."""
    config = EngineConfig(**PLAIN)
    executor = load_executor(config)
    try:
        executor.compile()
        monkeypatch.setattr(loading, "_readers", lambda *_: pytest.fail("weights were read"))
        resolved, workspace = plan_memory(config)
        assert resolved.ledger(workspace) == executor.ledger
    finally:
        executor.close()


@pytest.mark.slow
def test_a_draft_is_planned_as_it_is(demo_engine: LocalEngine) -> None:
    resolved, workspace = plan_memory(EngineConfig(**DEMO))
    assert resolved.ledger(workspace) == demo_engine.executor.ledger


def refused(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message, which comes before any weight is read."""
    with monkeypatch.context() as patch:
        patch.setattr(executor_module, "load_target", lambda *_, **__: pytest.fail("weights were read"))
        with pytest.raises(ConfigError) as error:
            load_executor(config)
    return str(error.value)


def advised(message: str) -> list[dict[str, Any]]:
    """The options of each change that a refusal names."""
    changes = []
    for change in message.partition("change one of: ")[2].split("; "):
        options: dict[str, Any] = {
            name: int(number) for name, number in re.findall(r"(\w+) at (?:most|least) (\d+)", change)
        }
        options |= {"draft": None} if "draft none" in change else {}
        if kind := re.search(r"quantize (\w+)", change):
            options["quantize"] = kind[1]
        changes.append(options)
    return changes


def test_advice_before_loading_works(demo_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """16.1 MiB of weights and 5 of pages in 18: each change passes, and leaves room for what programs really take."""
    message = refused(replace(SMALL, memory_limit_mib=18), monkeypatch)
    assert "the engine takes 24.5 MiB of memory, but the limit is 18.0 MiB (memory_limit_mib)" in message
    changes = advised(message)
    assert [sorted(change) for change in changes] == [
        ["draft", "quantize"], ["memory_limit_mib"],
    ]  # fmt: skip
    for change in changes:
        resolved = resolve_for(replace(SMALL, **{"memory_limit_mib": 18} | change))
        resolved.check_memory()
        resolved.check_memory(demo_engine.executor.ledger.workspace)


def resolve_for(config: EngineConfig) -> Resolved:
    pair = executor_module.find_pair(config)
    return resolve(config, pair.target, pair.draft)


def test_what_programs_take_is_checked_once_they_are_compiled(
    demo_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and pages take 24.5 MiB; with the programs, which are those of the fixture, they do not fit 28."""
    monkeypatch.setattr(executor_module, "compile_all", lambda *_: dict(demo_engine.executor.target.compiled))
    config = replace(SMALL, memory_limit_mib=28)
    executor = load_executor(config)
    try:
        with pytest.raises(
            ConfigError, match=r"workspace 4\.\d MiB; to make it fit, change one of: num_pages"
        ) as error:
            executor.compile()
    finally:
        executor.close()
    changes = advised(str(error.value))
    assert {name for change in changes for name in change} == {
        "num_pages", "max_batch_tokens", "draft", "quantize", "memory_limit_mib",
    }  # fmt: skip
    executor = load_executor(replace(config, **changes[0]))
    try:
        executor.compile()
        more = replace(executor.limits, num_pages=changes[0]["num_pages"] + 1)
        with pytest.raises(ConfigError, match="change one of: "):
            replace(executor.resolved, limits=more).check_memory(executor.ledger.workspace)
    finally:
        executor.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_an_engine_that_follows_advice_serves(demo_engine: LocalEngine, number: int) -> None:
    """Each change that a refusal names after compilation: with its own programs, which are others."""
    workspace = demo_engine.executor.ledger.workspace
    config = replace(SMALL, memory_limit_mib=28, elastic="off")
    with pytest.raises(ConfigError) as error:
        resolve_for(config).check_memory(workspace)
    change = advised(str(error.value))[number]
    if tokens := change.get("max_batch_tokens"):
        change |= {"token_edges": (tokens,), "max_tree_tokens": tokens}
    with LLM.over(started(replace(config, **change))) as llm:
        (output,) = llm.generate("def", SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert len(output.token_ids) == 8


def started(config: EngineConfig) -> LocalEngine:
    engine = LocalEngine(config)
    engine.start()
    return engine


def test_auto_sizing_with_plenty_of_memory_is_bounded_by_need_and_share() -> None:
    """A page of both: 5 layers of 2 heads and 2 of one, 64 slots of 64 f32, K and V."""
    page = 2 * (5 * 2 + 2 * 1) * 64 * 64 * 4
    assert resolve(EngineConfig(), TARGET, DRAFT).limits.num_pages == 32 * (1024 // 64)
    many = resolve(EngineConfig(max_requests=128, max_context=1024), TARGET, DRAFT)
    assert (many.sizes.page, many.limits.num_pages) == (page, min(128 * 16, CPU_KV_BYTES // page))


@pytest.mark.parametrize("elastic", [False, True])
def test_auto_sizing_takes_what_weights_and_reserve_leave(elastic: bool) -> None:
    """On a CPU the draft's copy, if pages may take its place, and the texts to draft from lie in the same memory."""
    config = EngineConfig(memory_limit_mib=192)
    resolved = resolve(config, TARGET, DRAFT, elastic=elastic)
    sizes, pages = resolved.sizes, resolved.limits.num_pages
    beside = sizes.target_weights + (1 + elastic) * sizes.draft_weights + sizes.texts + sizes.reserve
    assert beside + pages * sizes.page <= 192 * MIB < beside + (pages + 1) * sizes.page
    assert pages < resolve(EngineConfig(), TARGET, DRAFT).limits.num_pages
    resolved.check_memory()
    # Never less than one request needs: then it is refused.
    tight = resolve(replace(config, memory_limit_mib=24), TARGET, DRAFT)
    assert tight.limits.num_pages == tight.limits.max_pages_per_request == 16
    with pytest.raises(ConfigError, match=r"target KV pages 5\.0 MiB \(16\), .* memory_limit_mib at least \d+$"):
        tight.check_memory()


def test_a_device_that_says_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does; then no share is kept for other work, and copies on the host are not its concern."""

    class Device:
        platform = "gpu"

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_limit": 1 << 30}

    monkeypatch.setattr(footprint.jax, "local_devices", lambda: [Device()])
    limit = footprint.memory_limit(EngineConfig())
    assert (limit.bytes, limit.own_bytes, limit.covers_host) == (1 << 30, 1 << 30, False)
    assert footprint.memory_limit(EngineConfig(memory_limit_mib=1 << 20)).bytes == 1 << 30  # no more than there is
    assert footprint.memory_limit(EngineConfig(memory_limit_mib=100)).bytes == 100 * MIB
