"""Provenance is read from the checkout and the checkpoint themselves."""

import json
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from adaserve_jax.errors import CheckpointError
from adaserve_jax.results import provenance
from adaserve_jax.results.provenance import (
    commit_of,
    count_parameters,
    machine_name,
    model_hash,
    source_commit,
    weights_hash,
)
from tests.models.checkpoints import write_checkpoint


def test_parameters_are_counted_from_headers(tmp_path: Path):
    save_file({"a": np.zeros((3, 4), np.float32)}, tmp_path / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"b": np.zeros((5,), np.float16), "c": np.zeros((), np.float32)}, tmp_path / "model-2.safetensors")
    assert count_parameters(tmp_path) == 12 + 5 + 1


def test_unreadable_checkpoints_have_no_count(tmp_path: Path):
    assert count_parameters(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"version https://git-lfs",
        b"\xff" * 16,
        struct.pack("<Q", 5) + b"{nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 1 << 40) + b"{}",
    ],
)
def test_a_broken_header_is_refused_and_has_no_count(tmp_path: Path, content: bytes):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    assert count_parameters(tmp_path) is None
    for hash_of in (model_hash, weights_hash):
        with pytest.raises(CheckpointError, match="safetensors file: its header must be a JSON object"):
            hash_of(tmp_path)


def test_parameters_of_a_converted_checkpoint(tmp_path: Path):
    for name, header in (("embed", {"shape": [320, 32]}), ("layers.0.norm", {"shape": [32]})):
        (tmp_path / "weights" / name).mkdir(parents=True)
        (tmp_path / "weights" / name / "zarr.json").write_text(json.dumps(header))
    assert count_parameters(tmp_path) == 320 * 32 + 32
    (tmp_path / "weights" / "embed" / "zarr.json").write_text("[]")
    assert count_parameters(tmp_path) is None


def test_commit_says_when_tracked_files_differ(tmp_path: Path):
    assert commit_of(tmp_path) == "unknown"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    commit = commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"


def test_machine_names_cores_and_memory_but_no_host():
    name = machine_name()
    assert "cores" in name and "GiB" in name
    assert subprocess.run(["hostname"], capture_output=True, text=True).stdout.strip() not in name.split()


def test_the_hash_of_a_converted_checkpoint_follows_names_and_shapes(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    hashes = {model_hash(tmp_path)}
    for name, header in (("embed", {"shape": [320, 32]}), ("norm", {"shape": [32]}), ("norm", {"shape": [64]})):
        (tmp_path / "weights" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "weights" / name / "zarr.json").write_text(json.dumps(header))
        hashes.add(model_hash(tmp_path))
    assert len(hashes) == 4
    (tmp_path / "weights" / "norm" / "c").write_text("numbers")
    assert model_hash(tmp_path) in hashes


def test_two_trainings_of_one_model_differ_in_their_weights_only(tmp_path: Path):
    hashes = []
    for name, seed in (("one", 1), ("two", 2), ("same", 1)):
        folder = write_checkpoint(tmp_path / name, seed=seed)
        hashes.append((model_hash(folder), weights_hash(folder)))
    one, two, same = hashes
    assert one[0] == two[0] and one[1] != two[1] and one == same


@pytest.mark.parametrize("listing", ["flags\t: fpu\n", None])
def test_a_processor_that_the_system_does_not_name_is_still_something(monkeypatch, listing: str | None):
    def read(path: Path) -> str:
        if listing is None:
            raise OSError("no such file")
        return listing

    monkeypatch.setattr(Path, "read_text", read)
    monkeypatch.setattr(provenance.platform, "processor", lambda: "")
    assert provenance._cpu_model() == "unknown"
    monkeypatch.setattr(provenance.platform, "processor", lambda: "arm64")
    assert provenance._cpu_model() == "arm64"


def test_without_git_no_commit_is_known(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path) == "unknown"


def test_the_packages_own_commit_is_that_of_its_checkout():
    asked = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(asked, cwd=Path(provenance.__file__).parent, capture_output=True, text=True)
    assert source_commit().removesuffix("-dirty") == (done.stdout.strip() if done.returncode == 0 else "unknown")
