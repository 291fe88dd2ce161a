"""generation_config.json stands in where a request says nothing, and malformed values are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaserve_jax.errors import CheckpointError
from adaserve_jax.models.config import GenerationDefaults
from adaserve_jax.types import SamplingParams


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "top_k": 20}', GenerationDefaults(0.6, 0.9, 20)),
        ('{"eos_token_id": 3}', GenerationDefaults()),
        ('{"top_k": -1, "min_p": 0.1}', GenerationDefaults(top_k=0, min_p=0.1)),
        ('{"do_sample": false, "temperature": 0.6}', GenerationDefaults(temperature=0.0)),
    ],
)
def test_values_are_read(tmp_path: Path, text: str, expected: GenerationDefaults) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    assert GenerationDefaults.from_folder(tmp_path) == expected


def test_without_a_file_requests_keep_their_own_defaults(tmp_path: Path) -> None:
    assert GenerationDefaults.from_folder(tmp_path).sampling_params() == SamplingParams()
    assert GenerationDefaults(0.6, top_k=20).sampling_params() == SamplingParams(temperature=0.6, top_k=20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": "warm"}', "temperature must be"),
        ('{"top_p": 1.5}', "top_p must be"),
        ('{"top_k": 2.5}', "top_k must be an integer, got 2.5"),
    ],
)
def test_malformed_values_are_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {message}"):
        GenerationDefaults.from_folder(tmp_path)
