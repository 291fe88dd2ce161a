"""Texts for wrong input that a caller can give without an engine, a server or a cluster, each whole as it is read."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from adaserve_jax.bench import profile_plot
from adaserve_jax.cli.app import app
from adaserve_jax.cli.bench import UrlOptions, _header
from adaserve_jax.cli.cluster import restart
from adaserve_jax.cli.distill import _check_mode
from adaserve_jax.cli.grow import _shape
from adaserve_jax.cli.report import report
from adaserve_jax.cluster.local import LocalCluster
from adaserve_jax.cluster.orchestrator import replace_target
from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.router_client import NoAnswer, RouterClient
from adaserve_jax.cluster.run_folder import MAX_SOCKET_PATH, ClusterFolder
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.config import EngineConfig
from adaserve_jax.constraints.constraints import Constraints
from adaserve_jax.distill.routing import DraftRouter
from adaserve_jax.engine import process_main
from adaserve_jax.engine.client import MAX_SALT_CHARS, EngineInfo, GenerateRequest, check_request
from adaserve_jax.errors import (
    AdaServeError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    RequestError,
    UnsupportedModelError,
)
from adaserve_jax.memory.page_pool import PagePool
from adaserve_jax.models import tensors
from adaserve_jax.models.config_values import ConfigValues
from adaserve_jax.models.partition import Partition
from adaserve_jax.models.quantize import Int4Groups, Int8Rows
from adaserve_jax.models.rope import read_rope
from adaserve_jax.results.jsonl import read_rows
from adaserve_jax.results.schema import ResultRow
from adaserve_jax.runtime import multihost as hosts
from adaserve_jax.runtime.loading import plan_memory
from adaserve_jax.scheduler.policies import find_policy
from adaserve_jax.server.settings import SloClass
from adaserve_jax.sim.machines import load_machine
from adaserve_jax.types import SLO, SamplingParams
from adaserve_jax.workloads.items import Lengths, Workload, WorkloadItem
from adaserve_jax.workloads.traces import trace_of
from benchmarks.nightjar.segments import shortened, with_lengths
from tests.bench.fake_server import FakeServer, answer

ITEM = WorkloadItem(None, (), 1, "chat", SLO(), 1.0, None, 0.5, lengths=Lengths(1, 1))
TRACE = trace_of(Workload("t", "0" * 64, (ITEM,)))


def written(folder: Path, text: str) -> Path:
    (folder / "file").write_text(text)
    return folder / "file"


INFO = EngineInfo("t", None, "ar", "cpu", "0", 512, 4, 40, 0.01, kv_tokens=64)
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a request larger than all pages": (
        lambda _: check_request(GenerateRequest("", [3] * 40, SamplingParams(max_tokens=60)), INFO),
        "prompt and max_tokens must fit the KV cache of 64 tokens, got 40 + 60; shorten the prompt or lower max_tokens",
    ),
    "an unknown policy": (lambda _: find_policy("fast", 4), ", and those of files: FILE.py:NAME"),
    "no pages": (lambda _: PagePool(0, 8), "num_pages and page_size must be at least 1, got 0 and 8"),
    "a priority of more bits": (
        lambda _: SloClass("x", priority=2**31),
        "priority must be an integer of less than 32 bits, got 2147483648",
    ),
    "a long salt": (
        lambda _: check_request(GenerateRequest("", [3], cache_salt="s" * (MAX_SALT_CHARS + 1)), INFO),
        f"cache_salt must be a text of at most {MAX_SALT_CHARS} characters, got {MAX_SALT_CHARS + 1} characters",
    ),
    "a trace that stands still": (lambda _: shortened(TRACE, 0.0), "a trace is shortened by a factor above 0, got 0.0"),
    "lengths that leave no room": (
        lambda _: with_lengths(TRACE, prompt_parts=0.5, most_output=8, max_context=4),
        "expected prompt_parts of at least 1 and most_output below max_context, got 0.5, 8 and 4",
    ),
    "a machine of another version": (
        lambda folder: load_machine(str(written(folder, '{"version": 0}'))),
        "file: expected an object of version 1",
    ),
    "a header without a name": (
        lambda _: _header(": v"),
        "--header must be 'Name: value', got one without a name or without a colon",
    ),
    "a key that is not there": (
        lambda _: UrlOptions(api_key_env="NOT_THERE")._key(),
        "--api-key-env names NOT_THERE, which is not set; set it to the server's key",
    ),
    "a body that is none": (
        lambda _: UrlOptions(extra_body="[1]")._body(),
        "--extra-body must be a JSON object, got '[1]'",
    ),
    "neither folders nor records": (
        lambda _: report(),
        "expected one or more folders that `adaserve bench` or `adaserve simulate` wrote, or the file of",
    ),
    "a size that has no name": (lambda _: _shape("7G", {}), "--params must be one of "),
    "an option of the other mode": (
        lambda _: _check_mode({"draft_name": "--draft-name"}, writes=False),
        "--draft-name has no effect with --prompts; it goes with --from-checkpoint",
    ),
    "what no cluster has": (lambda _: restart("rooms"), "what is replaced must be one of targets, drafts, all, got"),
    "a folder too deep for a socket": (
        lambda folder: ClusterFolder(folder / ("x" * MAX_SOCKET_PATH)).socket,
        f"run_folder must have a path of less than {MAX_SOCKET_PATH - 8} characters, which a socket in it needs, got",
    ),
    "an endless wait": (
        lambda _: RouterSettings(most_wait=float("inf")),
        "most_wait must be a finite number of seconds >= 0, got inf",
    ),
    "no requests": (lambda _: RouterSettings(most_requests=0), "most_requests must be an integer >= 1, got 0"),
    "an empty token": (
        lambda folder: RouterSettings(token_file=str(written(folder, "\n"))).token(),
        "token_file must hold a token, got ",
    ),
    "a route of no kind": (lambda _: DraftRouter(("a", "b"), "luck"), "route must be one of "),
    "rows that are not there": (
        lambda folder: read_rows(folder / "none", ResultRow),
        "No such file or directory; give the path of a JSON lines",
    ),
    "memory of several processes": (
        lambda _: plan_memory(EngineConfig(num_processes=2, coordinator="h:7000")),
        "memory is planned for one process, got num_processes 2; leave it out, since each of several checks its own",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_told_what_was_expected_and_what_came(name: str, tmp_path: Path):
    act, text = CASES[name]
    with pytest.raises(AdaServeError, match=re.escape(text)):
        act(tmp_path)


NOWHERE = "http://127.0.0.1:1"


class StillRouter:
    """Never uses a target again."""

    async def drain(self, url: str) -> None: ...

    async def resume(self, url: str) -> None: ...

    async def target_status(self, url: str) -> dict:
        return {"in_flight": 0, "state": "down"}


def test_a_target_that_the_router_does_not_use_again_ends_the_replacement():
    async def replaced() -> None: ...

    async def all_of_them() -> list[str]:
        return [each async for each in replace_target(NOWHERE, replaced, cast(Any, StillRouter()), 0.0, 0.0)]

    expected = re.escape(f"the router does not use {NOWHERE} again after 0 s; see 'adaserve cluster status'")
    with pytest.raises(AdaServeError, match=expected):
        asyncio.run(all_of_them())


def test_a_router_that_refuses_is_quoted():
    refusal = answer("409 Conflict", b'{"error":"no such target"}')
    expected = "the router refused /cluster/drain with status 409: no such target"
    with FakeServer(lambda _: refusal) as router, pytest.raises(NoAnswer, match=expected):
        asyncio.run(RouterClient(router.url, "token", None).drain(NOWHERE))


def test_a_cluster_that_starts_takes_no_orders(tmp_path: Path):
    async def order() -> None:
        starting = LocalCluster(ClusterPlan(1, 0, RouterSettings(port=0)), ClusterFolder(tmp_path))
        try:
            await anext(starting.restart("all"))
        finally:
            await starting.stop()

    with pytest.raises(AdaServeError, match="the cluster is starting; order this once it is ready"):
        asyncio.run(order())


def test_clusters_on_ray_say_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Without Ray running: its placement groups and actors are stand-ins."""
    ray_cluster: Any = pytest.importorskip(
        "adaserve_jax.cluster.ray_cluster", reason="Ray is not installed; pip install 'adaserve-jax[cluster]'"
    )
    plan, folder = ClusterPlan(2, 1, RouterSettings()), ClusterFolder(tmp_path)
    with pytest.raises(ConfigError, match="placement must be one of SPREAD, PACK, STRICT_SPREAD, STRICT_PACK, got 'X'"):
        ray_cluster.RayCluster(plan, folder, own_address=False, placement="X")
    monkeypatch.setattr(ray_cluster, "find_actor", lambda name: object() if name == "target-1" else None)
    with pytest.raises(ConfigError, match=r"this Ray cluster already \(actor 'target-1'\); end it with"):
        ray_cluster.RayCluster(plan, folder, own_address=False, placement="PACK").start()
    monkeypatch.setattr(ray_cluster, "find_actor", lambda name: None)
    monkeypatch.setattr(ray_cluster, "PLACEMENT_TIMEOUT_S", -1.0)
    full = SimpleNamespace(wait=lambda _: False)
    monkeypatch.setattr(ray_cluster, "placement_group", lambda *_, **__: full)
    cluster = ray_cluster.RayCluster(plan, folder, own_address=False, placement="STRICT_SPREAD")
    expected = "Ray has no room for 3 members of one CPU each by STRICT_SPREAD; give it more, or another --placement"
    with pytest.raises(AdaServeError, match=expected):
        cluster.start()
    cluster.stopping.set()
    with pytest.raises(AdaServeError, match="the cluster was stopped while it started"):
        cluster.start()


def test_processes_that_are_gone_are_said():
    read, write = os.pipe()
    os.write(write, b"ab")
    os.close(write)
    with pytest.raises(EngineDeadError, match="expected 4 bytes from the front end, got 2"):
        process_main._read(read, 4)
    os.close(read)
    one, other = socket.socketpair()
    with one:
        other.sendall(struct.pack("<I", 9)[:2])
        other.close()
        with pytest.raises(EngineDeadError, match="the other process is gone: it closed the connection"):
            hosts._receive_exactly(one, 4)


def test_models_that_cannot_be_held_are_said(tmp_path: Path):
    config: Any = SimpleNamespace(num_heads=12, intermediate_size=12, hidden_size=12, num_kv_heads=4, experts=None)
    with pytest.raises(ConfigError, match=r"target's num_key_value_heads \(4\) or be a multiple of it, got 6"):
        Partition.of(config, 6, exact=False)
    rows = Int8Rows("w", np.zeros((1, 2), np.int8), np.zeros(1, np.float32))
    with pytest.raises(CheckpointError, match="weight w has a value that is not finite, which int8 cannot hold"):
        rows[0:1] = np.array([[1.0, np.inf]], np.float32)
    groups = Int4Groups("w", np.zeros((1, 1), np.int8), np.zeros((1, 1), np.float16), np.zeros((1, 1), np.int8))
    with pytest.raises(CheckpointError, match="weight w has a value that is not finite, which int4 cannot hold"):
        groups[0:1] = np.array([[1.0, np.inf]], np.float32)
    with pytest.raises(UnsupportedModelError, match=r"rope_scaling = .* is not supported; one for all layers is"):
        read_rope(ConfigValues({"rope_scaling": {"full_attention": {"rope_type": "linear"}}}, tmp_path))


def test_an_engine_without_grammars_says_so():
    spells: Any = SimpleNamespace()
    with pytest.raises(RequestError, match="json_schema must be left out: this engine was started without structured"):
        Constraints(16, spells).check(SamplingParams(json_schema="{}"))


def test_pictures_need_their_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(profile_plot, "find_spec", lambda name: None)
    expected = r"--plot needs matplotlib; install it with `pip install adaserve-jax\[plot\]`"
    with pytest.raises(ConfigError, match=expected):
        profile_plot.need_matplotlib(Path("p.png"))


def test_ray_that_is_not_there_and_a_folder_of_others_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    ray = pytest.importorskip("ray", reason="Ray is not installed; pip install 'adaserve-jax[cluster]'")
    from adaserve_jax.cluster import ray_cluster as ray_members
    from adaserve_jax.cluster import ray_cluster as ray_up

    def refuses(*_: object, **__: object) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", refuses)
    with pytest.raises(ConfigError, match="address must be that of a running Ray cluster, got 'h:1': nobody there"):
        ray_up.connect("h:1", 1)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("os.getuid", lambda: -1)
    with pytest.raises(ConfigError, match="is another user's, and logs cannot be written there"):
        ray_members.log_folder()


def test_an_orchestrator_of_no_kind_is_refused():
    with pytest.raises(ConfigError, match="orchestrator must be one of local, ray, got 'kubernetes'"):
        app(["cluster", "up", "--orchestrator", "kubernetes"], standalone_mode=False)


@pytest.mark.parametrize(("options", "message"), [
    (["--address", "auto"], "--address and --placement are of a Ray cluster; give --orchestrator ray too"),
    (["--placement", "PACK"], "--address and --placement are of a Ray cluster"),
    (
        ["--drafts", "1", "--draft-options", "--max-sessions '64"],
        r"--draft-options must be options as a shell reads them, got .*: No closing quotation",
    ),
    (["--draft-options", "--max-sessions 64"], "--draft-options are of draft services, and --drafts starts none"),
])  # fmt: skip
def test_options_of_a_cluster_that_would_do_nothing_are_refused(options: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        app(["cluster", "up", *options], standalone_mode=False)


def test_checkpoints_that_do_not_belong_together_are_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tensors, "_weight_files", lambda folder: [folder / "gone.safetensors"])
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing; expected the checkpoint's weights in"):
        tensors.TensorFiles(tmp_path)
