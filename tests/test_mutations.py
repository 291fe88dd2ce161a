"""The list of mutations stays in step with the code, and what runs it tells caught ones from those that survive."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from scripts import mutation_check
from scripts.mutation_check import Mutation, check_all, read_mutations
from tests.conftest import ROOT

MUTATIONS = read_mutations()


@functools.cache
def code_of(file: str) -> tuple[str, str]:
    """Return the text of a file of the package, and what it is parsed as."""
    text = (ROOT / "adaserve_jax" / file).read_text()
    return text, ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_changes_the_code_as_it_is_now_and_its_tests_exist(mutation: Mutation) -> None:
    text, parsed = code_of(mutation.file)
    assert ast.dump(ast.parse(mutation.applied(text))) != parsed
    assert [test for test in mutation.tests if not (ROOT / test.partition("::")[0]).is_file()] == []


def test_names_are_unique_and_every_part_has_five() -> None:
    names = [mutation.name for mutation in MUTATIONS]
    assert len(set(names)) == len(names)
    parts = [mutation.part for mutation in MUTATIONS]
    assert {part: parts.count(part) for part in set(parts) if parts.count(part) < 5} == {}


def test_text_that_is_not_there_once_is_refused() -> None:
    mutation = Mutation("part", "one is two", "one.py", "1", "2", ())
    with pytest.raises(ValueError, match=r"one.py: the text of 'one is two' must be there exactly once, found 2 times"):
        mutation.applied("1 + 1")
    with pytest.raises(ValueError, match="found 0 times"):
        mutation.applied("3")


def test_a_key_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text('[part]\ntests = []\n[[part.mutation]]\nname = "a"\nfiles = "b"\n')
    with pytest.raises(TypeError, match="files"):
        read_mutations(tmp_path / "list.toml")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A package of one function, whose test looks at one of its two lines; the folder for a copy of it."""
    files = {
        "adaserve_jax/__init__.py": "",
        "adaserve_jax/signs.py": 'def sign(x):\n    if x < 0:\n        return "-"\n    return "+"\n',
        "tests/test_signs.py": "from adaserve_jax.signs import sign\n\ndef test_sign():\n    assert sign(-1) == '-'\n",
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\naddopts = ["-p", "no:schemathesis"]\n',
    }
    for name, text in files.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    monkeypatch.setattr(mutation_check, "ROOT", tmp_path / "project")
    monkeypatch.setattr(mutation_check, "COPIED", ("adaserve_jax", "tests", "pyproject.toml"))
    (tmp_path / "copy").mkdir()
    return [tmp_path / "copy"]


@pytest.mark.slow
def test_it_tells_what_was_caught_and_what_survived(project: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    tests = ("tests/test_signs.py",)
    mutations = [
        Mutation("signs", "all are positive", "signs.py", "x < 0", "False", tests),
        Mutation("signs", "positive ones are nothing", "signs.py", '"+"', '""', tests),
        Mutation("signs", "the file cannot be read", "signs.py", "def", "fed", tests),
    ]
    assert check_all(mutations, project) == 2
    told = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert told == ["caught", "SURVIVED", "NOT"]
    assert "x < 0" in (project[0] / "adaserve_jax" / "signs.py").read_text(), "mutations are taken back"


def test_tests_that_fail_already_say_nothing(project: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    test = mutation_check.ROOT / "tests" / "test_signs.py"
    test.write_text(test.read_text().replace("'-'", "'minus'"))
    assert check_all([Mutation("signs", "a", "signs.py", "x < 0", "False", ("tests/test_signs.py",))], project) == 1
    assert "the tests must pass before anything is broken, but: tests/test_signs.py" in capsys.readouterr().err
