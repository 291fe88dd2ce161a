"""Policies from files: which one a name means, that they decide like those of the package, and what wrong files say."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler.policies import expand_groups, file_hashes, find_policy
from tests.scheduler.harness import Run, expected_text, limits_of, request_of

HEAD = """
from __future__ import annotations
from dataclasses import dataclass
from adaserve_jax.scheduler.controllers.base import Controller, Decision, Load
from adaserve_jax.scheduler.controllers.baselines import FixedController, fill
from adaserve_jax.scheduler.policies import Parts, Policy
from adaserve_jax.types import Limits
"""
ONE = (
    HEAD
    + """
@dataclass
class Halving(Controller):
    limits: Limits

    def decide(self, load: Load) -> Decision:
        depth = self.limits.max_depth // max(load.num_decode, 1)
        return fill(self.limits, load, depth=depth, width=min(depth, 1))

halving = Policy("deepest alone, half as deep for each more", lambda parts: Halving(parts.limits), selector="equal")
"""
)
TWO = (
    HEAD
    + """
def off(parts: Parts) -> Controller:
    return FixedController(parts.limits, 0)

def chain(parts: Parts) -> Controller:
    return FixedController(parts.limits, 2)

plain = Policy("no speculation", off, selector="equal", uses_draft=False)
chains = Policy("chains of 2", chain, selector="equal", needs_draft=True)
"""
)

FILLED = "fill(self.limits, load, depth=depth, width=min(depth, 1))"


def written(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_a_file_with_one_policy_needs_no_name(tmp_path, monkeypatch):
    path = written(tmp_path, ONE)
    policy, parameter = find_policy(path, 4)
    assert policy.about.startswith("deepest alone") and parameter == 0
    assert find_policy(f"{path}:halving", 4)[0].about == policy.about
    monkeypatch.chdir(tmp_path)
    assert find_policy("mine.py", 4)[0].about == policy.about


def test_of_several_one_is_named(tmp_path):
    path = written(tmp_path, TWO)
    assert find_policy(f"{path}:plain", 0)[0].about == "no speculation"
    assert find_policy(f"{path}:chains", 4)[0].about == "chains of 2"
    with pytest.raises(ConfigError, match=f"mine.py holds 2 policies; name one of {path}:plain, {path}:chains"):
        find_policy(path, 4)
    with pytest.raises(ConfigError, match=r"mine.py has no policy 'trees'; it has \S+:plain, \S+:chains"):
        find_policy(f"{path}:trees", 4)
    with pytest.raises(ConfigError, match="chains needs a draft, but there is none"):
        find_policy(f"{path}:chains", 0)


def test_an_edited_file_is_read_again(tmp_path):
    path = written(tmp_path, TWO)
    assert find_policy(f"{path}:plain", 4)[0].about == "no speculation"
    written(tmp_path, TWO.replace("no speculation", "none at all"))
    assert find_policy(f"{path}:plain", 4)[0].about == "none at all"


def test_the_failing_line_of_a_relative_path_is_named(tmp_path, monkeypatch):
    written(tmp_path, "x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"policy file mine.py fails in line 2: ZeroDivisionError"):
        find_policy("mine.py", 4)


def test_files_of_one_name_are_modules_of_their_own_and_one_that_fails_leaves_none(tmp_path):
    """A dataclass of each finds its own module's names, also after the other file was read."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    built = [find_policy(written(tmp_path / folder, ONE), 4)[0].controller for folder in ("a", "b")]
    modules = [each.__module__ for each in built]
    assert modules[0] != modules[1] and all(vars(sys.modules[each])["Halving"] for each in modules)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        find_policy(written(tmp_path, "1 / 0\n", "other.py"), 4)
    assert set(sys.modules) == before


def test_a_hash_tells_versions_of_a_file_apart(tmp_path):
    path = written(tmp_path, TWO)
    one = file_hashes(["adaserve", f"{path}:plain", "spec:2"])
    assert one == {f"{path}:plain": hashlib.sha256(TWO.encode()).hexdigest()}
    written(tmp_path, TWO + "# edited\n")
    assert file_hashes([f"{path}:plain"]) != one
    with pytest.raises(ConfigError, match="there is no file"):
        file_hashes(["gone.py"])


def test_it_stands_beside_names_of_the_package(tmp_path):
    path = written(tmp_path, ONE)
    assert expand_groups(("halves", path))[-2:] == ("adaserve", path)
    assert find_policy("spec:2", 4)[1] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "holds no Policy; it must assign one at module level: NAME = Policy"),
        ("x = 1\ny = x / 0\n", r"mine.py fails in line 2: ZeroDivisionError: division by zero"),
        ("def f(:\n", r"mine.py fails: SyntaxError: .*line 1"),
        (
            "import nothing_of_this_name\n",
            "fails in line 1: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        ),
        (
            HEAD + "p = Policy('x', None, 'fair')\n",
            "line 8: ConfigError: selector of a policy must be one of slo, .*'fair'",
        ),
        (HEAD + "p = Policy('x', None, 'slo', 'fifo')\n", "ordering of a policy must be one of .*got 'fifo'"),
        (HEAD + "p = Policy('no controller')\n", "fails in line 8: TypeError: .* missing 2 required .*'controller'"),
    ],
)
def test_wrong_files_say_what_is_wrong(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        find_policy(written(tmp_path, text), 4)


def test_a_file_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        find_policy("gone.py:mine", 4)
    assert f"there is no file gone.py in {tmp_path}; give the path of a Python file" in str(caught.value)


def test_the_scheduler_runs_it(tmp_path):
    """One request alone drafts 4 deep, two of them 2, and the text is that of plain decoding."""
    limits = limits_of()
    for rows, depth in ((1, 4), (2, 2)):
        run = Run.of(limits, policy=written(tmp_path, ONE))
        asked = [request_of(f"r{row}") for row in range(rows)]
        for request in asked:
            run.add(request)
        plans = []
        while run.scheduler.has_work:
            plans.append(run.step()[0])
        # the first step computes the prompts; towards the end rows leave one by one
        assert plans[1].draft.depth == depth
        assert [run.text[request.sequence_id] for request in asked] == [
            expected_text(request, limits.max_context)[0] for request in asked
        ]


def test_a_decision_that_wants_too_much_is_cut_to_what_a_step_holds(tmp_path):
    """Prompts first: trees have what they leave, roots at least."""
    limits = limits_of(token_edges=(16,), max_tree_tokens=12)
    run = Run.of(
        limits, policy=written(tmp_path, ONE.replace(FILLED, "Decision(4, 1, 10_000, 10_000, feed_draft=True)"))
    )
    for name, prompt in (("a", 4), ("b", 4), ("long", 100)):
        run.add(request_of(name, prompt=prompt, tokens=40, tpot_slo_s=1.0))  # its speed alone is asked for
    beside = []
    while run.scheduler.has_work:
        plan, trees = run.step()
        assert trees.num_nodes <= plan.tree_token_cap <= limits.max_tree_tokens
        assert plan.tree_token_cap + plan.num_prefill_tokens <= limits.max_tokens
        beside += [plan.num_prefill_tokens] * (plan.num_decode == 2)
    assert max(beside) == limits.max_tokens - 2 and run.last.keys() == {"a", "b", "long"}


@pytest.mark.parametrize(("decided", "got"), [
    ("Decision(5, 1, 8, 0, True)", "got depth 5, width 1, tree_token_cap 8, prefill_tokens 0"),
    ("Decision(-1, 1, 8, 0, True)", "got depth -1"),
    ("Decision(2, 9, 8, 0, True)", "got depth 2, width 9"),
    ("Decision(2, 0, 8, 0, True)", "got depth 2, width 0"),
    ("Decision(2, 1, 0, 0, True)", "got depth 2, width 1, tree_token_cap 0"),
    ("Decision(1.5, 1, 8, 0, True)", "got depth 1.5"),
    ("Decision(2, 1, 8 / 2, 0, True)", "got depth 2, width 1, tree_token_cap 4.0"),
    ("Decision(2, 1, 8, None, True)", "got depth 2, width 1, tree_token_cap 8, prefill_tokens None"),
    ("Decision(2, 1, 8, -1, True)", "got depth 2, width 1, tree_token_cap 8, prefill_tokens -1"),
])  # fmt: skip
def test_a_decision_that_no_step_can_run_is_named(tmp_path, decided, got):
    expected = f"must decide, in integers, a depth of 0 to 4.* one token for each row.* of at least 0, {got}.*fix its"
    for when in ("load.num_decode and load.context is not None", "load.context is None"):  # in a step; at the start
        run = Run.of(limits_of(), policy=written(tmp_path, ONE.replace(FILLED, f"{decided} if {when} else {FILLED}")))
        with pytest.raises(ConfigError, match=expected):
            run.add(request_of("r", tpot_slo_s=0.1))
            run.step()
            run.step()


def test_a_width_says_nothing_at_depth_0(tmp_path):
    """As in the example of the documents, which has to run without a draft too."""
    text = ONE.replace(FILLED, "fill(self.limits, load, depth=0, width=1)")
    run = Run.of(limits_of(max_depth=0, max_width=0), policy=written(tmp_path, text))
    run.serve([request_of("r", tpot_slo_s=0.1)])
    assert run.last.keys() == {"r"}


def test_a_controller_may_read_when_tokens_are_due(tmp_path):
    text = ONE.replace(FILLED, "fill(self.limits, load, depth=int((load.due_s < 1e9).any()), width=1)")
    run = Run.of(limits_of(), policy=written(tmp_path, text + "Halving.reads_due = True\n"))
    run.serve([request_of("in no hurry"), request_of("due", tpot_slo_s=0.1)])
    assert run.last.keys() == {"in no hurry", "due"} and run.scheduler.stats.spec_steps > 0


def test_prompts_alone_must_get_a_token(tmp_path):
    """Else no step would ever do anything; integers of NumPy are integers."""
    text = ONE.replace(FILLED, "Decision(0, 0, load.num_decode, 0, False)")
    run = Run.of(limits_of(), policy=written(tmp_path, text))
    run.add(request_of("r"))
    with pytest.raises(ConfigError, match="prefill_tokens of at least 1, got depth 0, width 0, tree_token_cap 0"):
        run.step()
    numpy = ONE.replace(FILLED, "Decision(np.int64(0), True, len(load.need_rate), np.int32(8), np.False_)")
    run = Run.of(limits_of(), policy=written(tmp_path, numpy + "import numpy as np\n", "integers.py"))
    run.add(request_of("r"))
    plan, _ = run.step()
    assert type(plan.tree_token_cap) is int and json.dumps(run.scheduler.stats.last_tree_token_cap)


@pytest.mark.parametrize(("decided", "got"), [
    ("None", r"a controller's decide\(\) must return a Decision, got None"),
    ("(1, 1, 8, 0, True)", r"must return a Decision, got \(1, 1, 8, 0, True\)"),
    ("Decision(1, 1, 8, 8, 'no')", "whether to feed the draft, got 'no'"),
])  # fmt: skip
def test_what_is_no_decision_is_named(tmp_path, decided, got):
    run = Run.of(limits_of(), policy=written(tmp_path, ONE.replace(FILLED, decided)))
    run.add(request_of("r"))
    with pytest.raises(ConfigError, match=got):
        run.step()


def test_a_depth_without_a_draft_says_why(tmp_path):
    text = ONE.replace(FILLED, "Decision(1, 1, 8, 8, True)")
    run = Run.of(limits_of(max_depth=0, max_width=0), policy=written(tmp_path, text))
    run.add(request_of("r"))
    with pytest.raises(
        ConfigError, match=r"a depth of 0 to 0 \(there is no draft, or the policy has uses_draft=False\)"
    ):
        run.step()


@pytest.mark.parametrize("built", ["None", "3", "object()"])
def test_what_is_no_controller_is_named(tmp_path, built):
    path = written(tmp_path, HEAD + f'own = Policy("own", lambda parts: {built}, selector="equal")\n')
    with pytest.raises(ConfigError, match="returns an object of a class derived from Controller, got "):
        Run.of(limits_of(), policy=f"{path}:own")


@pytest.mark.parametrize("rate", ["None", "0.0", "-5.0", "float('nan')", "float('inf')"])
def test_a_speed_that_is_none_is_named(tmp_path, rate):
    fast = f"    def fastest_alone(self, alone):\n        return {rate}\n"
    text = ONE.replace("    def decide(", fast + "\n    def decide(")
    assert text != ONE
    run = Run.of(limits_of(), policy=written(tmp_path, text))
    with pytest.raises(ConfigError, match=r"a controller's fastest_alone\(\) must return a finite number above 0, got"):
        run.add(request_of("r", tpot_slo_s=0.1))


@pytest.mark.parametrize(("field", "error"), [
    ('selector="static"', "tree_widths of a policy must be a tuple of at least one integer of at least 1"),
    ('selector="static", tree_widths=(-1, 2)', r"with selector 'static', and \(\) with others, got \(-1, 2\)"),
    ('selector="static", tree_widths="abc"', "got 'abc'"),
    ('selector="equal", tree_widths=(1, 2)', r"got \(1, 2\)"),
    ('selector="equal", calibrated="no"', "calibrated of a policy must be True or False, got 'no'"),
])  # fmt: skip
def test_a_policy_of_wrong_fields_is_named(tmp_path, field, error):
    path = written(tmp_path, HEAD + f'own = Policy("own", lambda parts: FixedController(parts.limits, 1), {field})\n')
    with pytest.raises(ConfigError, match=error):
        Run.of(limits_of(), policy=f"{path}:own")


def test_a_selector_cannot_change_what_it_is_offered(tmp_path):
    for field in ("f", "need"):
        text = SELECTED.replace(SELECTION, f"offered.{field}.fill(1.0)")
        run = Run.of(limits_of(), policy=f"{written(tmp_path, text, f'{field}.py')}:own")
        run.add(request_of("r", tpot_slo_s=0.1))
        with pytest.raises(ValueError, match="read-only"):
            while run.scheduler.has_work:
                run.step()


SELECTED = (
    HEAD
    + """
import numpy as np
from adaserve_jax.scheduler.selection import Offered, slo_phase

def needed(offered: Offered) -> np.ndarray:
    return slo_phase(offered.f, offered.need, budget=offered.most + len(offered.need))

def controller(parts: Parts) -> Controller:
    return FixedController(parts.limits, 3, 2)

own = Policy("a selector of its own", controller, selector=needed)
known = Policy("the package's", controller, selector="slo-only")
"""
)
SELECTION = "slo_phase(offered.f, offered.need, budget=offered.most + len(offered.need))"


def test_a_file_may_bring_a_selector(tmp_path):
    """One that selects as a rule of the package verifies the same trees, one that takes nothing verifies roots, and a
    count above what was drafted takes all of it."""
    path, limits = written(tmp_path, SELECTED), limits_of()
    verified: dict[str, list[list[list[int]]]] = {}
    none = written(tmp_path, SELECTED.replace(SELECTION, "np.zeros(len(offered.f), int)"), "none.py")
    many = written(tmp_path, SELECTED.replace(SELECTION, "np.full(len(offered.f), 1000)"), "many.py")
    drafted = written(tmp_path, SELECTED.replace(SELECTION, "np.count_nonzero(offered.f, axis=1)"), "drafted.py")
    for name in (f"{path}:own", f"{path}:known", f"{many}:own", f"{drafted}:own", f"{none}:own"):
        run = Run.of(limits, policy=name)
        for row in range(3):
            run.add(request_of(f"r{row}", tokens=30, tpot_slo_s=0.005 * (row + 1)))
        verified[name] = []
        while run.scheduler.has_work:
            _, trees = run.step()
            verified[name].append([trees.parent.tolist(), trees.token.tolist()])
    own, known, many_of_each, all_drafted, roots = verified.values()
    assert own == known != roots
    assert own != many_of_each == all_drafted
    assert run.scheduler.stats.draft_tokens == 0 and run.last.keys() == {"r0", "r1", "r2"}


@pytest.mark.parametrize(("returned", "got"), [
    ("np.zeros(1, int)", r"got \[0\]"),
    ("np.full(len(offered.f), 0.5)", r"got \[0.5, 0.5\]"),
    ("np.array([-1, 1])", r"got \[-1, 1\]"),
    ("np.full(2, 1000)", r"at most \d+ in all, got \[1000, 1000\]"),
    ("np.array([offered.most + 1, 0])", r"at most 2 in all, got \[3, 0\]"),
    ("None", "got None"),
    ("[[1], [1, 2]]", r"got \[\[1\], \[1, 2\]\]"),
])  # fmt: skip
def test_a_selection_that_cannot_be_verified_is_named(tmp_path, returned, got):
    path = written(tmp_path, SELECTED.replace(SELECTION, returned))
    run = Run.of(limits_of(max_tree_tokens=4), policy=f"{path}:own")
    for name in ("a", "b"):
        run.add(request_of(name))
    with pytest.raises(ConfigError, match=rf"in integers, how many nodes of each of 2 requests.*{got}; fix the fun"):
        while run.scheduler.has_work:
            run.step()
