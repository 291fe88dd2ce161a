"""The tokenizer of the embedded pair, and grammars of its ids."""

from __future__ import annotations

import pytest

from adaserve_jax.constraints.grammar import Grammars
from adaserve_jax.models.config import resolve_folder
from adaserve_jax.models.tokenizer import Tokenizer
from tests.constraints.grammar_texts import EOS, V


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(resolve_folder("demo", "target"))


@pytest.fixture(scope="session")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.backend_json(), V, (EOS,))
