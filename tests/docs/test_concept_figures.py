"""The pictures of docs/concepts.md: they are drawings, they show what the page says of them, and they are what
scripts/concept_figures.py draws from the code as it is now."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from adaserve_jax import types
from adaserve_jax.scheduler.scheduler import Scheduler
from adaserve_jax.sim.executor import SimExecutor
from tests.conftest import ROOT

FIGURES = ROOT / "docs" / "figures"
NAMES = ("step", "tree", "selection", "slabs")
PAGE = (ROOT / "docs" / "concepts.md").read_text()


@pytest.fixture(scope="module")
def drawn() -> Any:
    """scripts/concept_capture.py."""
    pytest.importorskip("matplotlib")
    from scripts import concept_capture

    return concept_capture


def texts(name: str, folder: Path = FIGURES) -> list[str]:
    """What a picture says, line by line. Letters are outlines, and each line stands beside them as a comment."""
    tree = ET.parse(folder / f"concept-{name}.svg", ET.XMLParser(target=ET.TreeBuilder(insert_comments=True)))
    return [(each.text or "").strip() for each in tree.iter(ET.Comment)]  # type: ignore[call-overload]


def numbers(line: str) -> list[float]:
    return [float(each) for each in re.findall(r"\d+(?:\.\d+)?", line)]


def line_with(name: str, words: str) -> str:
    (line,) = [each for each in texts(name) if words in each]
    return line


def test_the_page_shows_every_picture_that_is_drawn():
    assert re.findall(r"\]\(figures/concept-(\w+)\.svg\)", PAGE) == list(NAMES)
    assert {path.name for path in FIGURES.glob("concept-*")} == {f"concept-{name}.svg" for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_an_image_by_itself(name: str):
    root = ET.parse(FIGURES / f"concept-{name}.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg" and "viewBox" in root.attrib
    links = [each.attrib[key] for each in root.iter() for key in each.attrib if key.endswith("href")]
    assert links and all(link.startswith("#") for link in links), "nothing is loaded"


def test_the_step_has_the_calls_and_what_they_hand_on(drawn: Any):
    lines = texts("step")
    calls = [match[1] for line in lines if (match := re.fullmatch(r"(\w+)\([\w, ]+\)", line))]
    assert calls == ["plan", "speculate", "select", "verify", "commit"]
    owners = (Scheduler, SimExecutor, Scheduler, SimExecutor, Scheduler)
    assert all(callable(getattr(owner, call)) for owner, call in zip(owners, calls, strict=True))
    handed = [line for line in lines if re.fullmatch(r"(?:[A-Z][a-z]+){2}", line)]
    assert handed == ["StepPlan", "CandidateTrees", "DraftTrees", "StepOutcome"]
    assert all(isinstance(getattr(types, name), type) for name in handed)


def test_the_numbers_of_the_step_are_of_the_requests_that_are_served(drawn: Any):
    rows, depth, width = numbers(line_with("step", "requests run"))
    assert rows == len(drawn.PROMPTS) == len(drawn.NEEDS)
    assert depth <= drawn.OPTIONS["max_depth"] and width <= drawn.OPTIONS["max_width"]
    (budget,) = numbers(line_with("step", "tokens to verify"))
    assert budget <= drawn.OPTIONS["max_tree_tokens"]
    assert numbers(line_with("step", "candidates each")) == [depth * width]
    nodes, every = numbers(line_with("step", "roots included"))
    assert nodes <= budget and every == rows * (1 + depth * width)
    assert numbers(line_with("step", "one forward of the target")) == [nodes]
    gained, *each = numbers(line_with("step", "costs and chances"))
    assert len(each) == rows and sum(each) == gained and min(each) >= 1, "every step brings at least one"


def test_the_tree_tells_verified_from_accepted_and_ends_with_the_bonus():
    lines = texts("tree")
    assert {"verified and accepted", "verified, not accepted", "drafted, not verified"} < set(lines)
    assert len({line for line in lines if line.endswith("bonus")}) == 1
    chances = [float(match[1]) for line in lines if (match := re.search(r"  ([01](?:\.\d+)?)$", line))]
    assert max(chances) == 1 and chances.count(1) == 2 and min(chances) >= 0, "the root is certain, and only it"


def test_the_selection_gives_each_what_it_needs(drawn: Any):
    lines = texts("selection")
    assert {"SLO phase", "throughput phase", "not verified", "root"} < set(lines)
    for name, need in zip(drawn.PROMPTS, drawn.NEEDS, strict=True):
        at = lines.index(f"{name} needs {need:g} tokens," if need else f"{name} has no target,")
        (expected,) = numbers(lines[at + 1])
        assert expected >= max(need, 1.0), name


def test_the_slabs_show_the_pages_that_the_pool_hands_out(drawn: Any):
    moments, migration = drawn.pages_over_time()
    lines = texts("slabs")
    places = [lines.index(moment.title) for moment in moments]
    assert places == sorted(places)
    for moment, begin, end in zip(moments, places, [*places[1:], len(lines)], strict=True):
        assert lines[begin + 1 : end] == [holder for holder in moment.holder if holder] + ["K"]
    above = [page for page, holder in enumerate(moments[2].holder) if holder and page >= moments[2].base]
    assert migration.from_pages.tolist() == above and max(migration.to_pages) < moments[2].base
    layouts = " ".join(lines[: places[0]])
    assert layouts.count("draft KV pages") == layouts.count("extension pages") == 1, "the one here, the other away"


@pytest.mark.slow
def test_the_pictures_are_what_the_code_draws_now(
    drawn: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from scripts import concept_figures

    monkeypatch.setattr(sys, "argv", ["concept_figures", "--out", str(tmp_path)])
    concept_figures.main()
    assert [Path(line).name for line in capsys.readouterr().out.splitlines()] == [f"concept-{n}.svg" for n in NAMES]
    assert {name: texts(name, tmp_path) for name in NAMES} == {name: texts(name) for name in NAMES}
