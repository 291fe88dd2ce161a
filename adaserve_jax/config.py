"""Engine configuration. "auto" values are resolved once, by `resolve` in `runtime/sizing.py`. Imports no jax."""

from __future__ import annotations

import filecmp
import re
from pathlib import Path
from typing import Literal, get_args

from adaserve_jax.drafter_config import DrafterConfig
from adaserve_jax.errors import ConfigError
from adaserve_jax.learn_config import LearnConfig
from adaserve_jax.settings import Dtype, Panel, PathText, Settings, setting, settings

Elastic = Literal["auto", "on", "off"]
Quantize = Literal["auto", "none", "int8", "int4"]
WEIGHT_KINDS: tuple[Quantize, ...] = ("none", "int8", "int4")
"""Values of `quantize` but "auto": what weights are held as."""
INT4_GROUP = 32
"""Inputs of a row that share a scale in int4, where the row can be divided so."""
MTP = "mtp"
"""Name of a draft that is the first MTP layer of its target's own checkpoint."""
Route = Literal["tag", "language", "topic"]
ROUTES: tuple[str, ...] = get_args(Route)
DraftSources = Literal["auto", "none", "model", "suffix", "suffix+model"]
DRAFT_SOURCES: tuple[DraftSources, ...] = get_args(DraftSources)
TEXT_SOURCES = frozenset({"suffix"})
"""Sources that draft from text already seen."""
DEFAULT_DRAFT = "default"
"""Name of `draft` where there are several drafts."""
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9._/:-]{1,128}")
_EMBEDDED_TOKENIZER = Path(__file__).parent / "models/demo/target/tokenizer.json"
LEAST_CONTEXT = 8
"""Tokens: enough for a prompt and for the few that are timed at the start."""


@settings
class EngineConfig(Settings):
    """Configuration of an engine; 0 or None means "auto" where the help says so. Raises ConfigError.

    `draft` "auto" becomes "demo" or None at once. With a `drafter` this engine has no draft, and "auto" becomes None.
    """

    target: PathText = setting(
        "demo", "checkpoint folder of the target model, or 'demo' for the embedded pair",
        Panel.MODELS, expected="a name or a path",
    )  # fmt: skip
    draft: PathText | None = setting(
        "auto", "checkpoint folder of the draft model, the EAGLE-3 head or the Medusa heads, 'demo' or 'demo-head' for "
        "an embedded one, 'mtp' for the MTP layer of the target's checkpoint, or none: the engine drafts from text "
        "already seen (--policy ar: no speculation); auto: 'demo' for targets with its tokenizer, else none",
        Panel.MODELS, expected="a name or a path",
    )  # fmt: skip
    policy: str = setting(
        "adaserve", "scheduling policy by name: adaserve, adaserve-paper, spec:<k>, ar and others (docs/policies.md "
        "has the table), or one of a file: FILE.py or FILE.py:NAME", Panel.POLICY, expected="the name of a policy",
    )  # fmt: skip
    deterministic: bool = setting(
        False, "pin every target step to one bucket, so that outputs are bit-identical whatever the load", Panel.POLICY
    )
    max_requests: int = setting(0, "most requests that run at once; 0: auto by device", Panel.SIZE, ge=0)
    max_context: int = setting(
        0,
        "most tokens of one request, prompt and output; 0: what the models support, at most 2048 on a CPU and 8192 "
        "elsewhere",
        Panel.SIZE,
        ge=0,
    )
    max_waiting: int = setting(1024, "most choices that wait for their first step; more are refused", Panel.SIZE, ge=1)
    page_size: Literal[8, 16, 32, 64, 128] = setting(64, "tokens per KV page: 8, 16, 32, 64 or 128", Panel.SIZE)
    num_pages: int = setting(0, "pages in the KV pool; 0: auto by memory and max_requests", Panel.SIZE, ge=0)
    max_batch_tokens: int = setting(
        0, "largest packed length of one target step, tree and prefill tokens; 0: auto by device", Panel.SIZE, ge=0
    )
    token_edges: tuple[int, ...] = setting(
        (), "packed lengths that are compiled; empty: 1, 4, 8, 16, ... and max_batch_tokens",
        Panel.DEVICES, expected="increasing integers >= 1",
    )  # fmt: skip
    row_edges: tuple[int, ...] = setting(
        (), "numbers of requests that are compiled; empty: 1, 8, 32, ... up to max_requests",
        Panel.DEVICES, expected="increasing integers >= 1",
    )  # fmt: skip
    max_tree_tokens: int = setting(
        0, "most tree tokens of one step, roots included; 0: auto by device", Panel.POLICY, ge=0
    )
    max_depth: int = setting(6, "deepest beam search of the draft", Panel.POLICY, ge=1, le=16)
    max_width: int = setting(4, "widest beam search of the draft", Panel.POLICY, ge=1, le=16)
    draft_sources: DraftSources = setting(
        "auto", "what candidate trees are made of: model (a draft, or a draft service), suffix (what followed the same "
        "tokens before, in a request's own text or in texts that ended lately under its salt), suffix+model, none, or "
        "auto (what the policy uses: adaserve both, the published ones the model)", Panel.POLICY,
    )  # fmt: skip
    synthetic_acceptance: PathText | None = setting(
        None, "accept drafted tokens at random, with given chances, instead of comparing them with the target's, to "
        "measure a machine without a trained draft; the text is then not the target's. LENGTH: mean number of draft "
        "tokens that a verification accepts; or a JSON list of the chances that the token at depth 1, 2, ... is "
        "accepted given the one above",
        Panel.POLICY, expected="a number or a path",
    )  # fmt: skip
    suffix_depth: int = setting(
        16, "longest path of tokens that is proposed from text already seen", Panel.POLICY, ge=1, le=64
    )
    suffix_kept_tokens: int = setting(
        262_144, "most tokens of ended texts that are kept to draft from, rounded up to a power of two; the oldest go "
        "first; 0: only a request's own text", Panel.POLICY, ge=0,
    )  # fmt: skip
    max_slo_nodes: int = setting(0, "cap on nodes added to one request in the SLO phase; 0: no cap", Panel.POLICY, ge=0)
    max_prefill_tokens: int = setting(
        0, "most prompt tokens that one step computes; 0: what the policy finds room for", Panel.SIZE, ge=0
    )
    eq8_eq9: bool = setting(
        False, "choose depth and width by AdaServe's eq. 8 and 9 instead of predicted cost", Panel.POLICY
    )
    eq8_c1: int = setting(
        0, "c1 of AdaServe's eq. 8; 0: the profile's, where there is one that has it", Panel.POLICY, ge=0
    )
    eq9_c2: int = setting(
        0, "c2 of AdaServe's eq. 9; 0: the profile's, where there is one that has it", Panel.POLICY, ge=-16
    )
    infeasible_slo: Literal["best_effort", "refuse"] = setting(
        "best_effort", "a target below what one request alone would get: best_effort (serve the request, and say so) "
        "or refuse (an error that names the tightest feasible target)", Panel.POLICY,
    )  # fmt: skip
    fair_tenants: bool = setting(
        False, "serve the tenants (API keys) of a class equally many tokens while they wait, so that one that floods "
        "the server delays itself and no others", Panel.POLICY,
    )  # fmt: skip
    elastic: Elastic = setting(
        "auto", "whether the draft gives its memory to KV pages while speculation does not pay and pages are short: "
        "on, off, or auto (on where the policy does so and the pool does not hold every request at its longest)",
        Panel.POLICY,
    )  # fmt: skip
    prefix_cache: bool = setting(
        True, "keep KV pages of finished requests for prompts with the same beginning", Panel.SIZE
    )
    memory_limit_mib: int = setting(
        0, "memory that models, KV pages and workspace may take on a device, MiB; 0: what the device has",
        Panel.SIZE, ge=0,
    )  # fmt: skip
    dtype: Dtype = setting("auto", "weights and KV: f32, bf16, or auto (f32 on CPU, bf16 on GPU and TPU)", Panel.MODELS)
    quantize: Quantize = setting(
        "auto", "weights of the target: none (as dtype says), int8 with a scale per row, int4 with a scale per group "
        "of inputs, or auto (none, but int8 or int4 where a checkpoint that is quantised already would not fit into "
        "memory); the draft keeps its own", Panel.MODELS,
    )  # fmt: skip
    attention: Literal["auto", "xla", "cpu", "mosaic"] = setting(
        "auto", "attention over pages: xla, cpu (a C++ kernel), mosaic (a kernel for Hopper GPUs or for TPUs), or "
        "auto (the device's own kernel where it runs, else xla)", Panel.DEVICES,
    )  # fmt: skip
    profile: PathText | None = setting(
        None, "file that `adaserve profile` wrote for these models and options here: start from its times; none: "
        "time", Panel.DEVICES,
    )  # fmt: skip
    calibrate: bool = setting(
        True, "learn the chances that drafted tokens are accepted from verifications, while serving", Panel.POLICY
    )
    calibration: PathText | None = setting(
        None, "file of learned chances: read at the start where it exists, written every few minutes and at the end; "
        "none: the draft's own calibration.json, and what is learned is lost", Panel.POLICY,
    )  # fmt: skip
    compile_cache: PathText | None = setting(
        None, "folder of the persistent compilation cache; none: $JAX_COMPILATION_CACHE_DIR, else "
        "adaserve_jax/compile in the user's cache folder", Panel.DEVICES,
    )  # fmt: skip
    seed: int = setting(
        0, "seeds the draw of seeds for requests that bring none", Panel.DEVICES,
        expected="an integer >= 0 of less than 64 bits", ge=0, lt=2**63,
    )  # fmt: skip
    tp: int = setting(
        1, "devices over which the target is divided (tensor parallelism); the draft stays on the first of them",
        Panel.DEVICES, ge=1,
    )  # fmt: skip
    coordinator: str | None = setting(
        None, "host:port of process 0, where several processes hold the devices; the port after it is used too",
        Panel.DEVICES,
    )  # fmt: skip
    num_processes: int = setting(
        1, "processes that hold the devices together, usually one per host", Panel.DEVICES, ge=1
    )
    process_id: int = setting(
        0, "which of them this is; process 0 serves, the others run `adaserve follow`", Panel.DEVICES, ge=0
    )
    drafts: tuple[str, ...] = setting(
        (), "further drafts of the same shape as NAME=FOLDER, beside `draft`, which is the one named default",
        Panel.MODELS, expected="NAME=FOLDER, beside a draft",
    )  # fmt: skip
    route: Route = setting(
        "tag", "how a request gets one of several drafts: tag (its draft_tag), language, or topic; a draft_tag always "
        "decides", Panel.MODELS,
    )  # fmt: skip
    lora: tuple[str, ...] = setting(
        (), "LoRA adapters of the target, NAME=FOLDER in PEFT's format; a request names one as its model", Panel.MODELS,
        expected="NAME=FOLDER of different names, which have letters, digits and ._/:- only",
    )  # fmt: skip
    max_loras: int = setting(
        0, "most LoRA adapters that are loaded at once; 0: as many as are given", Panel.MODELS, ge=0
    )
    max_lora_rank: int = setting(
        16, "largest rank of a LoRA adapter; memory and time are those of this rank", Panel.MODELS, ge=1, le=512
    )
    learning: LearnConfig | None = setting(None, "whether and how drafts learn from what is served; none: they do not")
    drafter: DrafterConfig | None = setting(
        None, "draft services that draft for this engine, instead of a draft here; none: none is asked", Panel.DRAFTERS
    )

    def __post_init__(self) -> None:
        context = self.max_context
        self._require(context == 0 or context >= LEAST_CONTEXT, "max_context", f"0 or an integer >= {LEAST_CONTEXT}")
        for name in ("token_edges", "row_edges"):
            edges: tuple[int, ...] = getattr(self, name)
            increasing = list(edges) == sorted(set(edges)) and min(edges, default=1) >= 1
            self._require(increasing, name, "increasing integers >= 1")
        if self.draft == EngineConfig.draft:
            object.__setattr__(self, "draft", _draft_of(self.target))
        if self.drafter is not None:
            self._check_drafter()
        named = all(map(_is_named_folder, self.drafts)) and (not self.drafts or self.draft is not None)
        self._require(named, "drafts", "NAME=FOLDER, beside a draft")
        different = len(self.draft_folders) == len(self.drafts) + (self.draft is not None)
        self._require(different, "drafts", f"of different names, none of them {DEFAULT_DRAFT}")
        self._require(all(map(_is_adapter, self.lora)), "lora", "NAME=FOLDER, of letters, digits and ._/:-")
        self._require(len(self.lora_folders) == len(self.lora), "lora", "NAME=FOLDER of different names")
        most = f"0 or at least {len(self.lora)}, as many as are given"
        self._require(not self.max_loras or self.max_loras >= len(self.lora), "max_loras", most)
        if self.lora_slots and self.num_processes > 1:
            raise ConfigError(
                f"lora and max_loras need num_processes to be 1, got {self.num_processes}; merge the adapter into the "
                "weights, or hold the target in one process"
            )
        if self.learning is not None and self.draft is None:
            raise ConfigError("learning needs a draft that learns, and draft is none")
        if self.learning is not None and MTP in self.draft_folders.values():
            raise ConfigError(
                "learning needs a draft in a folder of its own, got 'mtp'; train an EAGLE-3 head by `adaserve distill "
                "--head eagle3`, or leave the learning out"
            )
        if self.learning is not None and self.num_processes > 1:
            raise ConfigError(f"learning needs num_processes to be 1, got {self.num_processes}")
        if self.synthetic_acceptance is not None:
            self._check_synthetic()
        if self.num_processes == 1:
            self._require(self.coordinator is None, "coordinator", "none while num_processes is 1")
        else:
            expected = "host:port of process 0 where num_processes > 1"
            self._require(_is_address(self.coordinator), "coordinator", expected)
        self._require(self.process_id < self.num_processes, "process_id", f"below num_processes ({self.num_processes})")

    def changed(self) -> list[str]:
        """Return the names of the fields that differ from their defaults; a draft does not if "auto" becomes it."""
        auto = None if self.drafter is not None else _draft_of(self.target)
        return [name for name in super().changed() if name != "draft" or self.draft != auto]

    def _check_synthetic(self) -> None:
        """Raise ConfigError for options that need the target's own text, or tokens that a model drafted.

        Whether there is a draft is checked where it is read: a draft service may still be added.
        """
        for name, given, why in (
            ("deterministic", self.deterministic, "it makes the target's text the same under every load"),
            ("learning", self.learning is not None, "a draft learns from the target's text"),
            ("calibration", self.calibration is not None, "the chances that it would keep are not the draft's"),
            ("draft_sources", self.draft_sources not in ("auto", "model"), "only a model's drafts are accepted so"),
            ("num_processes", self.num_processes > 1, "the other processes would accept by comparison"),
        ):
            if given:
                raise ConfigError(f"{name} must be left out with synthetic_acceptance: {why}")

    def _check_drafter(self) -> None:
        """Raise ConfigError for options that need a draft on this device; set `draft` to None."""
        if self.draft not in (None, _draft_of(self.target)):
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

    @property
    def draft_names(self) -> tuple[str, ...]:
        """Names of the drafts as requests give them: "default", then those of `drafts`; empty without a draft."""
        return tuple(self.draft_folders)

    @property
    def draft_folders(self) -> dict[str, str]:
        """Folders by name, in the order of `draft_names`: `draft`, then those of `drafts`, as they were given."""
        return {} if self.draft is None else {DEFAULT_DRAFT: self.draft, **dict(map(_named_folder, self.drafts))}

    @property
    def lora_folders(self) -> dict[str, str]:
        """Folders of the LoRA adapters by name."""
        return dict(map(_named_folder, self.lora))

    @property
    def lora_slots(self) -> int:
        """Adapters that have room at once; 0: the programs know none."""
        return self.max_loras or len(self.lora)

    @property
    def speculates(self) -> bool:
        """True where anything drafts: a draft here, or a draft service."""
        return self.draft is not None or self.drafter is not None

    @property
    def may_draft_from_text(self) -> bool:
        """True where trees may be made of text already seen; with "auto" the policy decides."""
        named = self.draft_sources == "auto" or drafts_from_text(self.draft_sources)
        return self.synthetic_acceptance is None and named


def _draft_of(target: str) -> str | None:
    """Return the embedded draft for a target that has its tokenizer, as those that `adaserve grow` makes; else None."""
    if target == "demo":
        return target
    try:
        own = Path(target).expanduser() / "tokenizer.json"
        return "demo" if own.is_file() and filecmp.cmp(own, _EMBEDDED_TOKENIZER, shallow=False) else None
    except (OSError, RuntimeError):  # loading names the folder and says what is wrong with it
        return None


def drafts_from_text(sources: str) -> bool:
    """Return True if sources, joined by "+", include one that reads text already seen."""
    return not TEXT_SOURCES.isdisjoint(sources.split("+"))


def _is_address(value: object) -> bool:
    """Return whether a value is "host:port" with a port that leaves room for the next one, which is used too."""
    host, _, port = str(value).rpartition(":")
    return bool(host) and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65535


def _named_folder(draft: str) -> tuple[str, str]:
    name, _, folder = draft.partition("=")
    return name, folder


def _is_adapter(text: str) -> bool:
    name, folder = _named_folder(text)
    return is_adapter_name(name) and bool(folder)


def is_adapter_name(name: str) -> bool:
    """Return whether a name may be that of an adapter, and so of a model."""
    return _ADAPTER_NAME.fullmatch(name) is not None


def _is_named_folder(draft: str) -> bool:
    name, folder = _named_folder(draft)
    return name.replace("-", "_").isidentifier() and bool(folder)
