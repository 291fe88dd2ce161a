"""Engines for devices that are not here: compiled by the vendors' compilers, where these are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adaserve_jax.cli.profile import profile_absent
from adaserve_jax.config import EngineConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.runtime.absent_device import DEVICES, AbsentDevice, device_named, missing_compiler
from adaserve_jax.runtime.absent_engine import (
    CompiledProgram,
    DevicePlan,
    collectives_of,
    compile_absent,
    copies_of,
    kernels_of_slices,
    plan_absent,
    read_mosaic_tpu,
    read_ptxas,
    read_thunks,
)
from adaserve_jax.runtime.loading import plan_shapes
from adaserve_jax.sim.machines import load_machine
from tests.engines import DEMO
from tests.program import run_program

SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1024, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 128, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip


def folder_of(root: Path, name: str, **changes: int) -> Path:
    folder = root / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL | changes))
    return folder


def profile(tmp_path: Path, device: str, *options: str, head_dim: int = 128) -> subprocess.CompletedProcess[str]:
    """Run `adaserve profile --device` on a small pair without weights, in a process of its own."""
    target = folder_of(tmp_path, "target", head_dim=head_dim)
    draft = folder_of(tmp_path, "draft", head_dim=head_dim, num_hidden_layers=2)
    command = [
        sys.executable, "-m", "adaserve_jax.cli", "profile", "--device", device, "--target", str(target), "--draft",
        str(draft), "--max-requests", "8", "--max-batch-tokens", "64", "--max-context", "1024", "--num-pages", "64",
        "--acceptance", "0.7", *options,
    ]  # fmt: skip
    variables = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def need_compiler(device: AbsentDevice) -> None:
    extra = missing_compiler(device.platform)
    if extra is not None:
        pytest.skip(f"NOT COMPILED FOR {device.name.upper()}: its compiler, extra {extra}, is not installed")


@pytest.mark.aot
@pytest.mark.parametrize("name", ["h100", "v6e"])
def test_a_small_engine_compiles_for_a_device_that_is_not_here(tmp_path: Path, name: str) -> None:
    need_compiler(DEVICES[name])
    out = tmp_path / "machine.json"
    done = profile(tmp_path, name, "--elastic", "on", "--out", str(out), head_dim=64)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    expected = {"verify", "commit", "catch-up", "search, width 1", "resample", "verify, two slabs", "commit, two slabs",
                "move", "empty extension"}  # fmt: skip
    assert expected <= rows.keys()
    for kind in expected - {"empty extension"}:
        assert rows[kind][6] == "0", rows[kind]  # copies of a pool
        assert name != "h100" or rows[kind][12] == "0", rows[kind]  # spilled bytes
    if name == "h100":
        launches, kernels = (int(cell) for cell in rows["verify"][8:10])
        assert 0 < launches < kernels / 3  # command buffers hold most kernels
    for kind in ("verify", "catch-up"):
        assert 0.99 <= float(rows[kind][3].rstrip("%")) / 100 <= 1.0, rows[kind]
    machine = load_machine(str(out))
    assert "computed, not measured" in machine.about and machine.baseline_s > 0


def rows_of(printed: str) -> dict[str, list[str]]:
    """Rows of the table of programs by kind: 14 cells for a GPU, 11 for a TPU."""
    return {cells[0]: cells for line in printed.splitlines() if len(cells := split(line)) in (11, 14)}


def split(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("│┃ ").split("│")]


@pytest.mark.aot
@pytest.mark.parametrize("name", ["h100", "v5e"])
def test_a_target_over_four_devices_exchanges_sums(tmp_path: Path, name: str) -> None:
    need_compiler(DEVICES[name])
    done = profile(tmp_path, name, "--tp", "4")
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout)
    assert float(rows["verify"][7]) > 0 and rows["catch-up"][7] == ""
    assert all(cells[6] == "0" for cells in rows.values()), rows  # copies of a pool
    if name == "v5e":  # of the attention kernel, whose page table alone has 8 x 16 entries
        vmem_bytes, smem_bytes = (int(cell.replace(",", "")) for cell in rows["verify"][8:10])
        assert 0 < vmem_bytes <= 16 << 20 and smem_bytes >= 4 * 8 * 16


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
@pytest.mark.parametrize("name", ["h100", "a100", "v5e"])
def test_shapes_that_the_kernels_do_not_run_compile_too(tmp_path: Path, name: str, head_dim: int, dtype: str) -> None:
    need_compiler(DEVICES[name])
    done = profile(tmp_path, name, "--dtype", dtype, head_dim=head_dim)
    assert done.returncode == 0, done.stderr
    rows = rows_of(done.stdout).values()
    assert len(rows) >= 7 and all(cells[6] == "0" and (len(cells) == 11 or cells[12] == "0") for cells in rows), rows


@pytest.mark.parametrize("options", [{"draft": "demo", "max_loras": 4}, {"draft": "demo-head"}])
def test_what_a_forward_takes_is_counted(options: dict[str, Any]) -> None:
    """Compiled for this CPU, which has a compiler everywhere."""
    pair, resolved = plan_shapes(EngineConfig(**DEMO | {"token_edges": (16,)} | options))
    compiled = compile_absent(
        DevicePlan(SimpleNamespace(platform="cpu"), pair, resolved, 0), kinds={"verify", "catch-up"}
    )
    assert {each.kind for each in compiled} == {"verify", "catch-up"}
    for each in compiled:
        assert each.ledger_bytes and 0.98 <= each.ledger_bytes / each.argument_bytes <= 1.0, each


def test_unknown_devices_and_missing_compilers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no device 'b300' is known to compile for: give one of h100"):
        device_named("b300")
    target = folder_of(tmp_path, "target")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    config = EngineConfig(target=str(target), draft=None)
    for name, extra in (("a100", "cuda-aot"), ("v5p", "tpu-aot")):
        with pytest.raises(ConfigError, match=rf"is not installed; install it with pip install .*\[{extra}\]"):
            plan_absent(config, device_named(name))
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="--device plans one process, got num_processes 2"):
        several = EngineConfig(
            target=str(target), draft=None, tp=2, num_processes=2, process_id=0, coordinator="host:1"
        )
        plan_absent(several, device_named("h100"))


def test_what_a_program_exchanges_and_copies_is_read_from_its_text() -> None:
    text = """
      %sum = f32[64,128]{1,0} all-reduce(%x), channel_id=1
      %all = (bf16[2,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%y)
      %copy.1 = bf16[2,8,4,64,128]{4,3,2,1,0} copy(%pool)
      %fetched = bf16[2,8,4,64,128]{4,3,2,1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
      %add = bf16[2,8,4,64,128]{4,3,2,1,0} add(%a, %b)
      %turned = bf16[8,64,2,4,128]{4,3,2,1,0:T(8,128)(2,1)} transpose(%pool), dimensions={1,3,0,2,4}
      %copy_bitcast_fusion = (bf16[2,8,4,64,128]{4,3,2,1,0:T(8,128)(2,1)}, bf16[8]{0}) fusion(%a), kind=kLoop
      %copy_dynamic-update-slice_fusion.1 = bf16[2,8,4,64,128]{4,3,2,1,0} fusion(%pool, %slice), kind=kLoop
      %copy.2 = bf16[8,64,2,4,128]{4,1,3,0,2} bitcast(%pool)
      %copy.3 = bf16[2,8,4,128]{3,2,1,0} copy(%slice)
    """
    assert collectives_of(text) == {"all-reduce": 4 * 64 * 128, "all-gather": 2 * (8 + 32)}
    assert copies_of(text, (2, 8, 4, 64, 128)) == ["%copy.1", "%turned", "%copy_bitcast_fusion"]


def test_a_mosaic_kernel_that_is_given_a_slice_in_place_is_found() -> None:
    text = """
%dynamic-slice-fusion (p0: s32[4384], p1: bf16[248,48,64]) -> f32[496,64] {
  %p1 = bf16[248,48,64]{2,1,0} parameter(1)
  %p0 = s32[4384]{0} parameter(0)
  %slice.1 = s32[1024]{0} slice(%p0), slice={[33:1057]}
  ROOT %call.1 = f32[496,64]{1,0} custom-call(%p1, %slice.1), custom_call_target="mosaic_gpu_v2"
}

%dynamic-slice-fusion.1 (p0.1: s32[4384]) -> s32[64] {
  %p0.1 = s32[4384]{0} parameter(0)
  ROOT %slice.2 = s32[64]{0} slice(%p0.1), slice={[0:64]}
}

ENTRY %main (packed: s32[4384], q: bf16[248,48,64]) -> f32[496,64] {
  ROOT %call.2 = f32[496,64]{1,0} custom-call(%q, %packed), custom_call_target="mosaic_gpu_v2"
}
"""
    assert kernels_of_slices(text) == 1


def test_options_that_measure_do_not_go_with_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_program("profile", "--device", "h100", "--memory") == 2
    assert "--device measures nothing; leave out --memory" in capsys.readouterr().err.replace("\n", " ")


def test_what_ptxas_says_of_kernels_is_added_up() -> None:
    text = """
        0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
    ptxas info    : Used 193 registers, used 2 barriers, 1 bytes smem
        16 bytes stack frame, 24 bytes spill stores, 8 bytes spill loads
    ptxas info    : Used 40 registers, used 1 barriers, 8192 bytes smem
    """
    assert read_ptxas(text) == {"registers": 193, "shared_bytes": 8192, "spilled_bytes": 24}


def test_launches_count_a_command_buffer_once_and_the_body_of_a_loop_once() -> None:
    text = """
000: kCommandBuffer [source       | next=003 (1)]
    001: kCustomKernel [source       | next=002 (1)] loop_gather_fusion_2
    002: kCopy         [prev=001 (1) | sink        ] kCopy
003: kWhile         [prev=000 (1) | next=006 (1)]
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion
  body:
    000: kCommandBuffer [source | sink]
        005: kCustomKernel [source       | next=022 (1)] loop_or_fusion
006: kCustomCall    [prev=000 (1) | next=000 (1)] kCustomCall
""".lstrip("\n")
    assert read_thunks(text) == {"launches": 4, "kernels": 5}


def test_memory_of_mosaic_kernels_is_read_from_a_tpu_program() -> None:
    def kernel(vmem: int, pages: int) -> str:
        return (
            '  %a.1 = f32[3,4]{1,0} custom-call(%b), custom_call_target="tpu_custom_call", operand_layout_constraints='
            f"{{s32[1]{{0}}, s32[{pages}]{{0}}, bf16[15,4,16,128]{{3,2,1,0}}, s32[15,16,2]{{2,1,0}}}}, metadata={{}}, "
            'backend_config={"scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"9"}],'
            '"used_scoped_memory_configs":[{"memory_space":"0","offset":"0","size":"7"},'
            f'{{"memory_space":"1","offset":"0","size":"{vmem}"}}],"retry_config":{{}}}}'
        )

    text = "\n".join([kernel(2048, 128), kernel(1024, 256), '  %c = custom-call(), custom_call_target="Other"'])
    assert read_mosaic_tpu(text) == {"vmem_bytes": 2048, "smem_bytes": 4 * 257}
    assert read_mosaic_tpu("%add = f32[2]{0} add(%a, %b)") == {}


@pytest.mark.aot
def test_a_program_that_does_not_compile_ends_with_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_compiler(DEVICES["a100"])
    refused = [CompiledProgram("verify", "8 rows", 1.0, "XlaRuntimeError: no such instruction")]
    monkeypatch.setattr("adaserve_jax.runtime.absent_engine.compile_absent", lambda *_, **__: refused)
    config = EngineConfig(target=str(folder_of(tmp_path, "target")), draft=None)
    with pytest.raises(
        ConfigError, match="verify does not compile for NVIDIA A100 SXM 80 GB: XlaRuntimeError: no such"
    ):
        profile_absent(config, "a100", None, "", None, "largest", 2)
