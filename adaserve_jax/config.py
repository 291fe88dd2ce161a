"""Engine configuration: frozen, validated, explicit. "auto" values resolve once, in `runtime.resolve`.

Imports no jax. Unknown keys raise.
"""

# pyright: reportUnnecessaryIsInstance=false
# What users pass is looked at whatever its type says.
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

from adaserve_jax.checked import Checked, is_integer
from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnConfig

LEAST = {
    "max_requests": 0,
    "max_context": 0,
    "max_waiting": 1,
    "page_size": 1,
    "num_pages": 0,
    "max_batch_tokens": 0,
    "max_tree_tokens": 0,
    "max_slo_nodes": 0,
    "max_prefill_tokens": 0,
    "eq8_c1": 0,
    "eq9_c2": -16,
    "memory_limit_mib": 0,
    "seed": 0,
    "tp": 1,
    "num_processes": 1,
    "process_id": 0,
}
"""Integers and their least values; 0 means "auto", or off, where it is allowed."""
QUANTIZE = ("none", "int8")
"""What a model's weights can become when they are loaded."""
ATTENTION = ("auto", "xla", "mosaic", "plain")
"""Who implements attention over pages."""
ELASTIC = ("auto", "on", "off")
"""Whether the draft's memory may become KV pages."""
ROUTES = ("tag", "language", "topic")
"""By what a request gets one of several drafts."""
DEFAULT_DRAFT = "default"
"""What `draft` is called where there are several."""
INFEASIBLE_SLO = ("best_effort", "refuse")
"""What becomes of a request whose target is out of reach."""
LEAST_CONTEXT = 8
"""Tokens: room for a prompt and for a few that are timed at the start."""


@dataclass(frozen=True)
class EngineConfig(Checked):
    """What an engine is built from.

    Each field's help text is in FIELD_HELP; 0 or None means "auto" where the text says so. With a `drafter` there is no
    draft here: `draft`, which may be left at its default, becomes None.
    """

    target: str = "demo"
    draft: str | None = "demo"
    policy: str = "adaserve"
    deterministic: bool = False
    max_requests: int = 0
    max_context: int = 0
    max_waiting: int = 1024
    page_size: int = 64
    num_pages: int = 0
    max_batch_tokens: int = 0
    token_edges: tuple[int, ...] = ()
    row_edges: tuple[int, ...] = ()
    max_tree_tokens: int = 0
    max_depth: int = 6
    max_width: int = 4
    max_slo_nodes: int = 0
    max_prefill_tokens: int = 0
    eq8_eq9: bool = False
    eq8_c1: int = 0
    eq9_c2: int = 0
    infeasible_slo: str = "best_effort"
    elastic: str = "auto"
    prefix_cache: bool = True
    memory_limit_mib: int = 0
    dtype: str = "auto"
    quantize: str = "none"
    attention: str = "auto"
    profile: str | None = None
    calibrate: bool = True
    calibration: str | None = None
    compile_cache: str | None = None
    seed: int = 0
    tp: int = 1
    coordinator: str | None = None
    num_processes: int = 1
    process_id: int = 0
    drafts: tuple[str, ...] = ()
    route: str = "tag"
    learning: LearnConfig | None = field(default=None, metadata={"file_only": True})
    drafter: DrafterConfig | None = field(default=None, metadata={"file_only": True})

    def __post_init__(self) -> None:
        named = ("target", "draft", "profile", "calibration", "compile_cache", "coordinator")
        self._take_paths(named)
        for name in named:
            optional = name != "target" and getattr(self, name) is None
            self._check(optional or isinstance(getattr(self, name), str), name, "a name or a path")
        self._check(isinstance(self.policy, str), "policy", "the name of a policy")
        for name in ("deterministic", "eq8_eq9", "prefix_cache", "calibrate"):
            self._check(isinstance(getattr(self, name), bool), name, "True or False")
        for name, least in LEAST.items():
            self._check(is_integer(getattr(self, name), least), name, f"an integer >= {least}")
        context = self.max_context
        self._check(context == 0 or context >= LEAST_CONTEXT, "max_context", f"0 or an integer >= {LEAST_CONTEXT}")
        self._check(self.page_size in (8, 16, 32, 64, 128), "page_size", "one of 8, 16, 32, 64, 128")
        for name in ("max_depth", "max_width"):
            self._check(is_integer(getattr(self, name), 1, 16), name, "an integer from 1 to 16")
        for name in ("token_edges", "row_edges"):
            edges: Any = getattr(self, name)
            listed: list[Any] = list(cast("list[Any]", edges)) if isinstance(edges, (tuple, list)) else [None]
            ok = all(is_integer(edge, 1) for edge in listed) and listed == sorted(set(listed))
            self._check(ok, name, "increasing integers >= 1")
            object.__setattr__(self, name, tuple(listed))
        self._check_drafter()
        drafts = isinstance(self.drafts, (tuple, list)) and all(_is_named_folder(draft) for draft in self.drafts)
        self._check(drafts and (not self.drafts or self.draft is not None), "drafts", "NAME=FOLDER, beside a draft")
        object.__setattr__(self, "drafts", tuple(self.drafts))
        different = len(self.draft_names) == len(self.drafts) + (self.draft is not None)
        self._check(different, "drafts", f"of different names, none of them {DEFAULT_DRAFT}")
        self._check(self.route in ROUTES, "route", f"one of {', '.join(ROUTES)}")
        self._check_learning()
        self._check(self.infeasible_slo in INFEASIBLE_SLO, "infeasible_slo", f"one of {', '.join(INFEASIBLE_SLO)}")
        self._check(self.elastic in ELASTIC, "elastic", f"one of {', '.join(ELASTIC)}")
        self._check(self.dtype in ("auto", "f32", "bf16"), "dtype", "one of auto, f32, bf16")
        self._check(self.quantize in QUANTIZE, "quantize", f"one of {', '.join(QUANTIZE)}")
        self._check(self.attention in ATTENTION, "attention", f"one of {', '.join(ATTENTION)}")
        self._check_processes()

    def _check_drafter(self) -> None:
        """Raise ConfigError for what needs a draft on this device where a draft service is asked instead."""
        self._check(self.drafter is None or isinstance(self.drafter, DrafterConfig), "drafter", "a DrafterConfig")
        if self.drafter is None:
            return
        if self.draft not in (None, EngineConfig.draft):
            raise ConfigError(
                f"draft must be left out with a drafter, whose service has the draft, got {self.draft!r}; give it to "
                "`adaserve draft --model`, or leave out the drafter"
            )
        object.__setattr__(self, "draft", None)
        if self.elastic == "on":
            raise ConfigError("elastic must be off or auto with a drafter, got 'on': no draft here has memory to give")
        if self.drafts:
            raise ConfigError(
                f"drafts must be left out with a drafter, got {len(self.drafts)}; a draft service has one draft"
            )
        if self.learning is not None:
            raise ConfigError("learning needs a draft of this engine; leave out the drafter, or the learning")
        if self.num_processes > 1:
            raise ConfigError(
                f"drafter needs num_processes to be 1, got {self.num_processes}; leave out the drafter, or hold the "
                "target in one process"
            )

    def _check_learning(self) -> None:
        self._check(self.learning is None or isinstance(self.learning, LearnConfig), "learning", "a LearnConfig")
        if self.learning is not None and self.draft is None:
            raise ConfigError("learning needs a draft that learns, and draft is none")
        if self.learning is not None and self.num_processes > 1:
            raise ConfigError(f"learning needs num_processes to be 1, got {self.num_processes}")

    @property
    def draft_names(self) -> tuple[str, ...]:
        """What requests call the drafts: "default", then those of `drafts`; empty without a draft."""
        return tuple(self.draft_folders)

    @property
    def draft_folders(self) -> dict[str, str]:
        """By name, in the order of `draft_names`: `draft`, then the folders of `drafts`, as they were given."""
        return {} if self.draft is None else {DEFAULT_DRAFT: self.draft, **dict(map(_named_folder, self.drafts))}

    @property
    def speculates(self) -> bool:
        """Whether anything drafts: a draft here, or a draft service."""
        return self.draft is not None or self.drafter is not None

    def _check_processes(self) -> None:
        if self.num_processes == 1:
            self._check(self.coordinator is None, "coordinator", "none while num_processes is 1")
        else:
            self._check(is_address(self.coordinator), "coordinator", "host:port of process 0 where num_processes > 1")
        self._check(self.process_id < self.num_processes, "process_id", f"below num_processes ({self.num_processes})")


def is_address(value: object) -> bool:
    """Whether a value is "host:port"; the port after it is used too."""
    host, _, port = str(value).rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65535


def _named_folder(draft: str) -> tuple[str, str]:
    name, _, folder = draft.partition("=")
    return name, folder


def _is_named_folder(draft: object) -> bool:
    name, folder = _named_folder(draft) if isinstance(draft, str) else ("", "")
    return name.replace("-", "_").isidentifier() and bool(folder)


FIELD_HELP: dict[str, str] = {
    "target": "checkpoint folder of the target model, or 'demo' for the embedded pair",
    "draft": "checkpoint folder of the draft model, 'demo', or none for no speculation",
    "policy": "scheduling policy by name: adaserve, adaserve-paper, spec:<k>, ar and others (README has the table), or "
    "one of a file: FILE.py or FILE.py:NAME",
    "deterministic": "pin every target step to one bucket, so that outputs are bit-identical whatever the load",
    "max_requests": "most requests that run at once; 0: auto by device",
    "max_context": "most tokens of one request, prompt and output; 0: what the models support",
    "max_waiting": "most requests that wait; more are refused",
    "page_size": "tokens per KV page: 8, 16, 32, 64 or 128",
    "num_pages": "pages in the KV pool; 0: auto by memory and max_requests",
    "max_batch_tokens": "largest packed length of one target step, tree and prefill tokens; 0: auto by device",
    "token_edges": "packed lengths that are compiled; empty: powers of two up to max_batch_tokens",
    "row_edges": "numbers of requests that are compiled; empty: 1, 8, 32, ... up to max_requests",
    "max_tree_tokens": "most tree tokens of one step, roots included; 0: auto by device",
    "max_depth": "deepest beam search of the draft",
    "max_width": "widest beam search of the draft",
    "max_slo_nodes": "cap on nodes added to one request in the SLO phase; 0: no cap",
    "max_prefill_tokens": "most prompt tokens that one step computes; 0: what the policy finds room for",
    "eq8_eq9": "choose depth and width by AdaServe's eq. 8 and 9 instead of predicted cost",
    "eq8_c1": "c1 of AdaServe's eq. 8; 0: the profile's, where there is one that has it",
    "eq9_c2": "c2 of AdaServe's eq. 9; 0: the profile's, where there is one that has it",
    "infeasible_slo": "a target below what one request alone would get: best_effort (serve the request, and say so) or "
    "refuse (an error that names the least feasible target)",
    "elastic": "whether the draft gives its memory to KV pages while speculation does not pay and pages are short: on, "
    "off, or auto (on where the policy does so and the pool does not hold every request at its longest)",
    "prefix_cache": "keep KV pages of finished requests for prompts that begin alike",
    "memory_limit_mib": "memory that models, KV pages and workspace may take on a device, MiB; 0: what the device has",
    "dtype": "weights and KV: f32, bf16, or auto (f32 on CPU, bf16 on GPU and TPU)",
    "quantize": "weights of the target: none (as dtype says), or int8 with a scale per row; the draft keeps its own",
    "attention": "attention over pages: xla, mosaic (a kernel for Hopper GPUs or for TPUs), plain (the kernels' "
    "algorithm in an interpreter, to check it), or auto (xla)",
    "profile": "file that `adaserve profile` wrote for these models and options here: start from its times; none: time",
    "calibrate": "learn the chances that drafted tokens are accepted from verifications, while serving",
    "calibration": "file of learned chances: read at the start where it exists, written every few minutes and at the "
    "end; none: the draft's own calibration.json, and what is learned is lost",
    "compile_cache": "folder of the persistent compilation cache; none: $JAX_COMPILATION_CACHE_DIR, else "
    "adaserve_jax/compile in the user's cache folder",
    "seed": "seeds the draw of seeds for requests that bring none",
    "tp": "devices over which the target is divided (tensor parallelism); the draft stays on the first of them",
    "coordinator": "host:port of process 0, where several processes hold the devices; the port after it is used too",
    "num_processes": "processes that hold the devices together, usually one per host",
    "process_id": "which of them this is; process 0 serves, the others run `adaserve follow`",
    "drafts": "further drafts of the same shape as NAME=FOLDER, beside `draft`, which is the one named default",
    "route": "by what a request gets one of several drafts: tag (what the request says), language, or topic; a tag "
    "that names a draft always goes first",
    "learning": "whether and how drafts learn from what is served; none: they do not",
    "drafter": "draft services that draft for this engine, instead of a draft here; none: none is asked",
}
