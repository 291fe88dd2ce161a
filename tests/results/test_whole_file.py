"""A file is the old one or the new one: while it is written, after a failure, and by whom it may be read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from adaserve_jax.results.whole_file import PRIVATE, SHARED, whole_file, write_whole


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.bin"


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_until_the_end_a_reader_sees_what_was_there(path: Path) -> None:
    path.write_bytes(b"old")
    with whole_file(path, mode=PRIVATE) as file:
        file.write(b"new" * 10_000)
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new" * 10_000
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_fails_leaves_what_was_there_and_nothing_beside_it(
    path: Path, there: bool, error: type[BaseException]
) -> None:
    if there:
        path.write_bytes(b"old")
    with pytest.raises(error), whole_file(path, mode=SHARED) as file:
        file.write(b"new")
        raise error
    assert [each.read_bytes() for each in path.parent.iterdir()] == [b"old"] * there


def test_a_place_that_cannot_be_taken_is_left(path: Path) -> None:
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(path, "text", mode=PRIVATE)
    assert list(path.parent.iterdir()) == [path]
    with pytest.raises(FileNotFoundError):
        write_whole(path / "none" / "file", "text", mode=PRIVATE)


def test_who_may_read_it(path: Path, umask: int) -> None:
    """Also while it is written, and whatever the one before it allowed."""
    path.touch(0o666)
    for mode in (PRIVATE, SHARED):
        with whole_file(path, mode=mode) as file:
            assert os.fstat(file.fileno()).st_mode & 0o777 == mode & ~umask
        assert path.stat().st_mode & 0o777 == mode & ~umask


def test_a_text_is_in_utf_8(path: Path) -> None:
    for content in ("grün\n", b"gr\xc3\xbcn\n"):
        write_whole(path, content, mode=SHARED)
        assert path.read_bytes() == b"gr\xc3\xbcn\n"
