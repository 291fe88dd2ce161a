"""Controllers that learn from time, on a measured machine: regret, recovery, and what they settle on."""

import numpy as np
import pytest

from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Controller, Feedback
from adaserve_jax.scheduler.controllers.baselines import LinearSampling, LinUcb
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.scheduler.controllers.nightjar import BINGREEDY, V1, V2, NightjarController, SwitchTable
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.sim.machines import load_machine
from tests.conftest import ROOT
from tests.scheduler.test_controllers import load_of

MACHINE = load_machine(str(ROOT / "benchmarks" / "results" / "profile-110m-cpu.json"))
LIMITS = MACHINE.limits()
COSTS = CostTable(MACHINE.samples(LIMITS), LIMITS)
GOOD, POOR = 0.64, 0.3
"""Acceptance of a drafted token behind accepted ones: as on the profile's pair, and of a draft that hardly helps."""


def build(name: str, seed: int) -> Controller:
    chains = ChainCosts(LIMITS, COSTS, LearnedAcceptance(LIMITS.max_depth, LIMITS.max_width))
    rules = {"nightjar": V2, "nightjar-v1": V1, "bingreedy": BINGREEDY}
    if name in rules:
        return NightjarController(LIMITS, chains, SwitchTable.of(COSTS, LIMITS), rules[name], seed)
    return LinUcb(LIMITS, chains) if name == "linucb" else LinearSampling(LIMITS, chains, seed)


class Bench:
    """Steps of `rows` rows that all draft. nodes: most of a row. latency_s: f64[arms], expected seconds per token of a
    row: what a fixed arm would have."""

    def __init__(self, rows: int, acceptance: float, seed: int):
        self.rows = rows
        self.depth = np.arange(LIMITS.max_depth + 1)
        self.nodes = np.minimum(self.depth, LIMITS.max_tree_tokens // rows - 1)
        edges = [LIMITS.token_edges.index(LIMITS.bucket(int(rows * (1 + each)))) for each in self.nodes]
        self.seconds = COSTS.verify_s(rows)[edges] + self.depth * COSTS.level_s(rows)[0]
        self.seconds[1:] += COSTS.catchup_s(2 * rows)
        self.rng = np.random.default_rng(seed)
        self.change(acceptance)

    def change(self, acceptance: float) -> None:
        self.acceptance = acceptance
        expected = (1 - acceptance ** (self.nodes + 1)) / (1 - acceptance)
        self.latency_s = self.seconds / expected

    @property
    def best(self) -> int:
        return int(self.latency_s.argmin())

    def play(self, controller: Controller, steps: int) -> np.ndarray:
        """i64[steps], arms."""
        load, arms = load_of(self.rows), np.empty(steps, np.int64)
        for step in range(steps):
            arm = arms[step] = controller.decide(load).depth
            lucky = np.log(self.rng.random(self.rows)) / np.log(self.acceptance)
            tokens = self.rows + int(np.minimum(lucky.astype(np.int64), self.nodes[arm]).sum())
            controller.learn(
                Feedback(
                    rows=self.rows if arm else 0, drafted=int(self.rows * self.nodes[arm]), accepted=0, emitted=tokens,
                    decode_rows=self.rows, decoded=tokens, catchup_tokens=self.rows if arm else 0,
                    step_s=float(self.seconds[arm]),
                )
            )  # fmt: skip
        return arms

    def regret(self, arms: np.ndarray) -> np.ndarray:
        """f64[steps], of each step, in shares of the best arm's latency."""
        return self.latency_s[arms] / self.latency_s.min() - 1


def mean_regret(name: str, rows: int, acceptance: float, steps: int, seeds: int = 2) -> np.ndarray:
    benches = [Bench(rows, acceptance, seed) for seed in range(seeds)]
    return np.mean([bench.regret(bench.play(build(name, seed), steps)) for seed, bench in enumerate(benches)], axis=0)


@pytest.mark.parametrize(("rows", "acceptance"), [(8, GOOD), pytest.param(32, POOR, marks=pytest.mark.slow)])
def test_regret_grows_like_the_square_root_of_time_up_to_a_logarithm(rows, acceptance):
    """sqrt(4) = 2, and log(10,000) / log(2,500) = 1.18 of it more; 4 would be linear."""
    total = mean_regret("nightjar", rows, acceptance, 10_000).cumsum()
    assert total[-1] / total[2499] < 2 * 1.18 * 1.1


SLOWER = (("bingreedy", 0.75), ("lints", 0.5))


@pytest.mark.parametrize(
    ("name", "exponent"),
    [("nightjar-v1", 0.75), ("linucb", 0.5), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOWER)],
)
def test_regret_of_the_others(name, exponent: float):
    """Bins that explore with 1 / sqrt(k) leave T^(3/4), again up to a logarithm."""
    total = mean_regret(name, 8, GOOD, 6_000).cumsum()
    assert total[-1] / total[1499] < 4**exponent * 1.18 * 1.1


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("acceptance", [GOOD, POOR])
def test_what_it_settles_on_is_within_five_percent_of_the_best_fixed_chain(rows, acceptance):
    benches = [Bench(rows, acceptance, seed) for seed in range(2)]
    last = [bench.play(build("nightjar", 1 + seed), 3000)[-1000:] for seed, bench in enumerate(benches)]
    settled = [int(np.bincount(arms).argmax()) for arms in last]
    bench = benches[0]
    assert bench.regret(np.array(settled)).mean() < 0.05
    off_s, on_s = bench.latency_s[0], bench.latency_s[1:].min()
    if max(off_s, on_s) > 1.1 * min(off_s, on_s):
        assert [arm > 0 for arm in settled] == [on_s < off_s] * 2


def test_there_is_a_crossover_on_this_machine():
    """So that the test above has both sides."""
    assert [Bench(rows, POOR, 0).best > 0 for rows in (1, 32)] == [True, False]
    assert [Bench(rows, GOOD, 0).best > 0 for rows in (1, 32)] == [True, True]


def last_after_change(before: float, after: float, rows: int, steps: int) -> float:
    """Mean regret in the last quarter of `steps` steps that follow on 2,000 of another acceptance."""
    found = []
    for seed in range(2):
        bench, controller = Bench(rows, before, seed), build("nightjar", seed)
        bench.play(controller, 2000)
        bench.change(after)
        found.append(bench.regret(bench.play(controller, steps))[-steps // 4 :].mean())
    return float(np.mean(found))


def test_it_recovers_when_the_draft_becomes_useless():
    """Within its memory, and not the time that it has run: always the best old arm would lose a third."""
    bench = Bench(8, POOR, 0)
    assert bench.regret(np.array([Bench(8, GOOD, 0).best]))[0] > 0.3
    assert last_after_change(GOOD, POOR, 8, 2000) < 0.1


def test_it_recovers_when_the_draft_becomes_good_while_it_is_off():
    """By exploring, which goes on for ever: there is no deadlock."""
    assert Bench(8, POOR, 0).best == 0
    assert Bench(8, GOOD, 0).regret(np.array([0]))[0] > 0.2
    assert last_after_change(POOR, GOOD, 8, 4000) < 0.12


def by_size(controller: Controller, benches: dict[int, Bench], steps: int) -> float:
    """Mean regret of the second half of `steps` steps, the size of the batch changing every 50."""
    regrets = [
        bench.regret(bench.play(controller, 50))
        for _ in range(steps // 50 // len(benches))
        for bench in benches.values()
    ]
    return float(np.mean(regrets[len(regrets) // 2 :]))


def test_knowing_the_size_of_the_batch_is_worth_something():
    """One row wants long chains, 32 rows none or short ones. Blind to that, one arm serves both."""
    found = {}
    for name in ("nightjar", "bingreedy"):
        found[name] = by_size(build(name, 0), {rows: Bench(rows, 0.5, rows) for rows in (1, 32)}, 8000)
    assert found["nightjar"] < found["bingreedy"] / 1.5
