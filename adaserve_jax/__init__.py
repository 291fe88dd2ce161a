"""adaserve_jax: an LLM serving engine in which every request carries its own speed target.

    from adaserve_jax import LLM, SLO, SamplingParams
    with LLM(target="demo", draft="demo") as llm:
        (out,) = llm.generate("def add(a, b):", SamplingParams(max_tokens=32), slo=SLO(tpot_ms=40))
    print(out.text, out.metrics.slo_met)

`LLM` is the engine in this process; `EngineConfig`, `LearnConfig` and `DrafterConfig` say how it is built, `SLO` and
`SamplingParams` what a request wants. Every error is an `AdaServeError` (adaserve_jax.errors). docs/python-api.md says
more, and which modules beside this one are meant to be imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from adaserve_jax.errors import AdaServeError

if TYPE_CHECKING:
    from adaserve_jax.config import EngineConfig
    from adaserve_jax.drafter_config import DrafterConfig
    from adaserve_jax.engine.llm import LLM
    from adaserve_jax.learn_config import LearnConfig
    from adaserve_jax.types import SLO, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM", "SLO", "AdaServeError", "DrafterConfig", "EngineConfig", "LearnConfig", "SamplingParams",
    "__version__",
]  # fmt: skip
_MODULES = {
    "LLM": "engine.llm", "SLO": "types", "DrafterConfig": "drafter_config", "EngineConfig": "config",
    "LearnConfig": "learn_config", "SamplingParams": "types",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import public names on first use: tools that run no model need no jax, and a health check not even numpy."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
