"""A target, its draft service, and all that may befall the two: its texts are those of plain decoding, no step waits
beyond its deadline, drafts are used before and after, and the service keeps nothing.

An engine in deterministic mode asks a service in a process of its own, by way of a proxy that knows frames, with one
that knows bytes on each side of it. The draft is the target itself, so that what comes in time is accepted.
"""

from __future__ import annotations

import contextlib
import functools
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from adaserve_jax import LLM, DrafterConfig, SamplingParams
from adaserve_jax.star.client.drafter import RemoteDrafter
from adaserve_jax.stats import DrafterStats, ServiceState
from adaserve_jax.types import CandidateTrees, StepPlan
from tests.conftest import ROOT
from tests.models.checkpoints import write_checkpoint
from tests.star.faulty_proxy import NO_FAULTS, ByteProxy, Faults, FrameProxy
from tests.star.service_process import ServiceProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

DEADLINE_S = 0.15
"""Below the 200 ms of a spike."""
SCHEDULING_S = 5.0
"""How long a thread that may run is kept from it, at the very most, on a machine with much else to do."""
LOOK_S = 0.05
DEPTH = 3
SPECULATES = f"spec:{DEPTH}"
ENGINE = {
    "deterministic": True, "dtype": "f32", "max_requests": 4, "max_context": 64, "page_size": 8, "num_pages": 64,
    "max_batch_tokens": 16, "max_depth": DEPTH, "max_width": 1,
}  # fmt: skip
PROMPTS = ["def add(a, b):\n", "import os\n", "for i in", "class Node:\n    def"]
SAMPLING = [SamplingParams(max_tokens=24, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.7, 0.0, 1.0)]
Texts = list[list[int]]


@dataclass
class Rounds:
    """What `propose` took, on the drafter's own clock, beyond the deadline: the most of all rounds."""

    longest_s: float = 0.0
    count: int = 0

    def around(self, propose: Callable[..., CandidateTrees]) -> Callable[..., CandidateTrees]:
        def timed(drafter: RemoteDrafter, plan: StepPlan) -> CandidateTrees:
            clock = drafter._clock
            began = clock()
            found = propose(drafter, plan)
            self.longest_s = max(self.longest_s, clock() - began)
            self.count += 1
            return found

        return timed


@dataclass
class World:
    """The parts, on the way from the target: llm, front, frames, back, service. expected: texts of plain decoding."""

    llm: LLM
    front: ByteProxy
    frames: FrameProxy
    back: ByteProxy
    service: ServiceProcess
    expected: Texts
    rounds: Rounds

    @property
    def counts(self) -> DrafterStats:
        counts = self.llm.stats().drafter
        assert counts is not None
        return counts

    @property
    def state(self) -> ServiceState:
        (state,) = self.counts.services.values()
        return state

    def generate(self) -> int:
        """All requests at once: their texts are right, whatever happens. Returns accepted tokens."""
        outputs = self.llm.generate(PROMPTS, SAMPLING)
        assert [output.token_ids for output in outputs] == self.expected
        assert self.rounds.longest_s <= DEADLINE_S + SCHEDULING_S
        return sum(output.metrics.accepted_tokens for output in outputs)

    def generate_until(self, condition: Callable[[], object]) -> None:
        """Again and again: what is drawn, or what a busy machine does, may take some."""

        def once() -> object:
            self.generate()
            return condition()

        wait_until(once)

    def drafts_are_used(self) -> None:
        """Speculation happens, as soon as it can."""
        wait_until(self.generate)

    def nothing_is_kept(self) -> None:
        """The requests have ended: the service frees their KV, at their end or with their leases."""
        wait_until(lambda: self.service.number("kv_pages_used") == 0, LOOK_S)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    model = write_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    with contextlib.ExitStack() as held:
        service = ServiceProcess(model)
        held.callback(service.close)
        service.wait()
        back = ByteProxy(service.address)
        held.callback(back.close)
        frames = FrameProxy(back.address, seed=7)
        held.callback(frames.close)
        front = ByteProxy(frames.address)
        held.callback(front.close)
        rounds = Rounds()
        patch = held.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(RemoteDrafter, "propose", rounds.around(RemoteDrafter.propose))
        asks = DrafterConfig((f"grpc://127.0.0.1:{front.address[1]}",), 1e3 * DEADLINE_S)
        with LLM(str(model), policy="ar", drafter=asks, **ENGINE) as llm:
            expected = [output.token_ids for output in llm.generate(PROMPTS, SAMPLING)]
            llm.set_policy(SPECULATES)
            world = World(llm, front, frames, back, service, expected, rounds)
            world.drafts_are_used()
            yield world
            assert llm.stats().compiles_after_ready == 0


@pytest.fixture
def world(parts: World) -> Iterator[World]:
    """Speculation works before the test, as it did after the one before it, and again after it; then nothing is left at
    the service."""
    yield parts
    parts.frames.up = parts.frames.down = NO_FAULTS
    parts.frames.on_message = lambda kind: None
    parts.drafts_are_used()
    assert parts.rounds.count
    parts.nothing_is_kept()


def test_without_a_fault(world: World) -> None:
    """What it brings is accepted, but for near-ties, since programs are of another size there, and for the first steps
    of a request: the others have DEPTH + 1 tokens."""
    accepted = {}

    def all_in_time() -> bool:
        before = world.counts
        accepted["remote"] = world.generate()
        after = world.counts
        assert (after.lost, after.invalid) == (before.lost, before.invalid)
        return after.trees > before.trees and (after.late, after.resyncs) == (before.late, before.resyncs)

    wait_until(all_in_time)
    most = sum(len(text) * DEPTH // (DEPTH + 1) for text in world.expected)
    assert 0.75 * most < accepted["remote"] <= most
    assert world.state.version and world.state.breaker == "closed"


def test_spikes_of_200_ms(world: World) -> None:
    late = world.counts.late
    world.frames.up = world.frames.down = Faults(delayed=0.1, spike_s=0.2)
    world.generate_until(lambda: world.counts.late > late and world.frames.counts["delayed"] > 2)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(Faults(lost=0.05), id="5% lost"),
        pytest.param(Faults(doubled=0.3, late=0.2), id="doubled and reordered"),
        pytest.param(Faults(garbled=0.1), id="garbled"),
        pytest.param(Faults(lost=0.05, doubled=0.1, late=0.1, delayed=0.05, garbled=0.02, cut=0.02), id="all at once",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_messages(world: World, faults: Faults) -> None:
    counts = world.frames.counts
    counts.clear()
    least = {"lost": 4, "doubled": 4, "late": 4, "delayed": 1, "garbled": 1, "cut": 1}
    world.frames.up = world.frames.down = faults
    world.generate_until(lambda: all(counts[kind] >= least[kind] for kind in least if getattr(faults, kind)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["adaserve", "nightjar", "specinfer", "ucbspec"])
def test_every_policy_under_all_of_it(world: World, policy: str) -> None:
    """Whether they speculate then is theirs to say."""
    world.llm.set_policy(policy)
    world.frames.up = world.frames.down = Faults(lost=0.05, doubled=0.1, late=0.1, delayed=0.05, cut=0.02)
    for _ in range(4):
        world.generate()
    world.llm.set_policy(SPECULATES)


def test_streams_that_are_cut(world: World) -> None:
    lost = world.counts.lost
    world.frames.down = Faults(cut=0.1)
    world.generate_until(lambda: world.counts.lost > lost + 1)


def test_junk_in_a_connection_both_ways(world: World) -> None:
    """What gRPC cannot read ends the connection, at the target and at the service; the next one serves."""
    draw, junked = random.Random(3), []

    def junk(proxy: ByteProxy) -> None:
        junked.append(proxy)
        proxy.junk(draw.randbytes(200))

    for proxy in (world.front, world.back):
        lost = world.counts.lost
        world.frames.on_message = at(20, "tree", functools.partial(junk, proxy))
        world.generate_until(lambda lost=lost: world.counts.lost > lost)
    assert junked == [world.front, world.back]


def test_the_service_is_killed_and_started_again(world: World) -> None:
    """In the middle of the requests, at the tenth tree from now."""
    lost = world.counts.lost
    killed = threading.Event()

    def kill() -> None:
        world.service.kill()
        killed.set()

    world.frames.on_message = at(10, "tree", kill)
    world.generate_until(killed.is_set)
    world.frames.on_message = lambda kind: None
    world.service.start_again()
    ready = threading.Thread(target=world.service.wait)
    ready.start()
    while ready.is_alive():
        world.generate()
        ready.join(0.5)
    assert world.counts.lost > lost


def test_a_service_that_is_frozen(world: World) -> None:
    """Three deadlines, then it is left alone and steps wait no more; tried again, it is found back."""
    world.service.freeze()
    try:
        world.generate_until(lambda: world.state.breaker == "open")
        assert world.state.reason == "it did not answer in time"
    finally:
        world.service.thaw()
    world.drafts_are_used()
    assert world.state.breaker == "closed"


CLIENT = """
import sys, threading
import numpy as np
from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.star.client.channel import GrpcTransport
from adaserve_jax.star.messages import Draft, Hello, Open, SessionSampling, Tree, Welcome
address, vocabulary, cells = sys.argv[1:]
def received(frame):
    for message in frame:
        if isinstance(message, (Welcome, Tree)):
            print(type(message).__name__, flush=True)
stream = GrpcTransport(address, DrafterConfig(("grpc://" + address,))).open(received, print)
text = np.arange(1, 101, dtype=np.int32)
stream.send([Hello("dies", vocabulary, cells)])
for number in range(1, 4):
    stream.send([Open(number, 1, text, SessionSampling(0, 0, 0.0, 0, 1.0, 0.0)),
                 Draft(number, 1, 1, 100, text[:0], 3, 1, True, float("inf"), 100.0)])
threading.Event().wait()
"""
"""A target with three requests of 100 tokens, which never ends them."""


def test_a_target_dies(world: World) -> None:
    """Its sessions are freed with their leases; the other target drafts meanwhile."""
    greeting: list[Any] = []

    def copy(message: Any) -> None:
        if message.WhichOneof("kind") == "hello":
            greeting.append(message.hello)
            message.hello.plain_s = 0.0  # not known: whatever the machine is busy with, the other one may come

    world.frames.up = Faults(rewrite=copy)
    world.front.cut()
    world.generate_until(lambda: greeting)
    ended = world.service.number("leases_ended_total")
    command = [sys.executable, "-c", CLIENT, "{}:{}".format(*world.service.address)]
    command += [greeting[0].vocabulary_hash, greeting[0].cells_hash]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as client:
        try:
            assert client.stdout is not None
            assert [client.stdout.readline() for _ in range(4)] == ["Welcome\n", *["Tree\n"] * 3]
        finally:
            client.kill()
    world.drafts_are_used()
    world.nothing_is_kept()
    wait_until(lambda: world.service.number("leases_ended_total") >= ended + 3, LOOK_S)


def at(count: int, kind: str, call: Callable[[], None]) -> Callable[[str], None]:
    """Calls at the so manieth message of a kind, once."""
    seen = iter(range(1, sys.maxsize))

    def saw(said: str) -> None:
        if said == kind and next(seen) == count:
            call()

    return saw
