"""The constants that benchmarks/adaserve/constants.py varies: each is read where it is set."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.scheduler import scheduler
from benchmarks.adaserve.constants import KNOBS, Knob, merged, safe_range


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: f"{knob.module}.{knob.name}")
def test_another_value_is_the_one_that_the_scheduler_reads(knob: Knob) -> None:
    """For as long as asked, and from the module: a default argument would keep the value of the definition."""
    assert knob.chosen not in knob.values
    module = importlib.import_module(f"adaserve_jax.scheduler.{knob.module}")
    chosen = knob.chosen
    with knob.at(knob.values[0]):
        found = getattr(scheduler.Objective(), knob.name) if knob.field else getattr(module, knob.name)
        assert found == knob.values[0]
    assert knob.chosen == chosen
    assert getattr(scheduler.Objective(), knob.name, chosen) == chosen
    if not knob.field:
        tree = ast.parse(Path(str(module.__file__)).read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        defaults = [each for one in functions for each in (*one.args.defaults, *one.args.kw_defaults) if each]
        read = [node.id for one in functions for node in ast.walk(one) if isinstance(node, ast.Name)]
        assert knob.name not in {node.id for each in defaults for node in ast.walk(each) if isinstance(node, ast.Name)}
        assert knob.name in read


def test_rows_are_added_to_a_file_only_if_nothing_else_has_changed() -> None:
    held = {"machine": "m", "seed": 0, "as_chosen": {"p": 0.9}, "commit": "old", "constants": [
        {"module": "a", "name": "X", "safe": [1, 2]}, {"module": "a", "name": "Y", "safe": [1, 1]},
    ]}  # fmt: skip
    new = [{"module": "a", "name": "Y", "safe": [0, 1]}, {"module": "b", "name": "X", "safe": [3, 3]}]
    both = merged({**held, "commit": "new", "constants": new}, held)
    assert both["commit"] == "old"
    assert both["constants"] == [held["constants"][0], *({**row, "commit": "new"} for row in new)]
    with pytest.raises(ConfigError, match=r"--out has another as_chosen, .*; run all constants"):
        merged({**held, "as_chosen": {"p": 0.8}}, held)


def test_the_safe_range_ends_at_the_first_value_that_loses_more_than_half_a_point() -> None:
    tried = {1: 0.0, 2: -0.02, 4: -0.004, 16: 0.01, 32: -0.005, 64: -0.006}
    assert safe_range(tried, 8) == (4, 32)
    assert safe_range({1: -0.1, 2: -0.1}, 3) == (3, 3)
