"""Scheduling policies by name: POLICIES, ABLATIONS, and policies in Python files of users.

A policy is a composition of parts, not a class: adding one means adding an entry to POLICIES. docs/policies.md
has the table made from it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Literal, get_args

from adaserve_jax.config import DRAFT_SOURCES, DraftSources, EngineConfig, drafts_from_text
from adaserve_jax.errors import ConfigError
from adaserve_jax.sampling import is_integer
from adaserve_jax.scheduler.acceptance import LearnedAcceptance
from adaserve_jax.scheduler.controllers.base import Controller
from adaserve_jax.scheduler.controllers.baselines import (
    ClosedFormController,
    Exp3Spec,
    FastestChain,
    FixedController,
    GoodputController,
    LinearSampling,
    LinUcb,
    UcbSpec,
)
from adaserve_jax.scheduler.controllers.chain_costs import ChainCosts
from adaserve_jax.scheduler.controllers.corrected import CorrectedController
from adaserve_jax.scheduler.controllers.joint import JointController
from adaserve_jax.scheduler.controllers.just_enough import JustEnough
from adaserve_jax.scheduler.controllers.nightjar import BINGREEDY, V1, V2, NightjarController, Rule, SwitchTable
from adaserve_jax.scheduler.controllers.slack_chunks import SlackChunks, SlidingChunks
from adaserve_jax.scheduler.cost_model import CostTable
from adaserve_jax.scheduler.objective import Objective
from adaserve_jax.scheduler.queue import Ordering
from adaserve_jax.scheduler.selection import SelectionFunction, SloOrder
from adaserve_jax.types import Limits

SelectionRule = Literal[
    "slo", "slo-equal", "slo-only", "throughput", "slo-throughput", "equal", "best", "static"
]  # fmt: skip
SELECTION_RULES: dict[SelectionRule, str] = {
    "slo": "{need}, then the likeliest of all",
    "slo-equal": "{need}, then the same number for each request",
    "slo-only": "{need}, and no more",
    "throughput": "as many of the likeliest as raise throughput",
    "slo-throughput": "as many of the likeliest as raise throughput, among those that keep the most targets",
    "equal": "the same number for each request",
    "best": "the likeliest of all requests",
    "static": "the same tree for each request",
}
"""Which drafted nodes are verified, by rule; {need} is the SLO phase of Algorithm 2, in the policy's form of need."""
NeedRule = Literal["horizon", "step", "code"]
_RULES = {"ordering": Ordering, "need": NeedRule, "slo_order": SloOrder, "sources": DraftSources}

SPECINFER_NODES = (1, 1, 3, 3, 3, 3, 3, 3)
"""Nodes by level; SpecInfer's published expansion is 1, 1, 3, 1, 1, 1, 1, 1 children of each node."""
TETRIS_EXTRA = 2
"""Tokens that `tetris:<k>` drafts beyond k, to choose from."""
DSD_PROBE_STEPS = 50
SARATHI_TOKENS = 512
PYTHON_SUFFIX = ".py"
CHUNK_DIVISOR = 8
"""Without slack-sized prefill a step computes at most one token in this many of the largest step: 128 of AdaServe's
1024.
"""


@dataclass(frozen=True)
class Parts:
    """Parts that a controller may be built from.

    parameter: the k of a policy `<name>:<k>`, else 0. depth_offset, width_offset: c1 and c2 of eq. 8 and 9.
    """

    limits: Limits
    cost: CostTable
    acceptance: LearnedAcceptance
    objective: Objective
    parameter: int
    eq8_eq9: bool
    depth_offset: int
    width_offset: int
    seed: int

    @property
    def switch(self) -> SwitchTable:
        """Cost of turning speculation on."""
        return SwitchTable.of(self.cost, self.limits)

    @property
    def chain_costs(self) -> ChainCosts:
        """Predicted cost of chains."""
        return ChainCosts(self.limits, self.cost, self.acceptance)


@dataclass(frozen=True)
class Policy:
    """Controller (depth, width, most tree tokens) x selection rule x order of admission x memory rule.

    about: description in the table of policies. selector: which drafted nodes are verified, one of SELECTION_RULES or a
    function of the policy's own. need, slo_order: how the SLO phase counts tokens and its order of service.
    tree_widths: nodes by level (selector "static" only). search_budget: the verify budget is chosen again, over the
    token edges, once the candidates are known. calibrated: f is made of calibrated chances instead of the draft's own
    probabilities. uses_draft: the draft is fed and searched at all, when one is loaded. needs_draft: the policy is
    refused without a draft. elastic: the draft's memory becomes KV pages while speculation is off and pages are short;
    otherwise the draft stays. weighs_pages: that happens when pages would bring more than the draft, instead of while
    speculation is off. bounds_lengths: lengths of outputs are learned, for the horizon of need and the order "goodput".
    sources: what its trees are made of, unless `EngineConfig.draft_sources` or the policy's name says otherwise.
    """

    about: str
    controller: Callable[[Parts], Controller]
    selector: SelectionRule | SelectionFunction
    ordering: Ordering = "arrival"
    need: NeedRule = "horizon"
    slo_order: SloOrder = "cheapest-first"
    tree_widths: tuple[int, ...] = ()
    search_budget: bool = False
    calibrated: bool = True
    uses_draft: bool = True
    needs_draft: bool = False
    elastic: bool = False
    weighs_pages: bool = False
    bounds_lengths: bool = False
    sources: DraftSources = "model"

    def __post_init__(self) -> None:
        """Raise ConfigError for a field that is not of its kind: policies of files are not type-checked."""
        rules = _RULES if callable(self.selector) else {"selector": SelectionRule, **_RULES}
        for name, kinds in rules.items():
            if getattr(self, name) not in get_args(kinds):
                known = ", ".join(get_args(kinds))
                raise ConfigError(f"{name} of a policy must be one of {known}, got {getattr(self, name)!r}")
        for each in fields(self):
            if each.type == "bool" and not isinstance(getattr(self, each.name), bool):
                raise ConfigError(f"{each.name} of a policy must be True or False, got {getattr(self, each.name)!r}")
        widths = self.tree_widths
        is_tuple = isinstance(widths, tuple)  # pyright: ignore[reportUnnecessaryIsInstance]
        ok = is_tuple and all(is_integer(width, 1) for width in widths)
        if not ok or bool(widths) != (self.selector == "static"):
            raise ConfigError(
                "tree_widths of a policy must be a tuple of at least one integer of at least 1, nodes by level, with "
                f"selector 'static', and () with others, got {widths!r:.80}"
            )

    def built(self, parts: Parts) -> Controller:
        """Build the controller. Raises ConfigError if a policy of a file brings something else."""
        controller = self.controller(parts) if callable(self.controller) else self.controller
        if Controller not in type(controller).__mro__:
            raise ConfigError(
                "controller of a policy must be a function that takes Parts and returns an object of a class derived "
                f"from Controller, got {controller!r:.80}"
            )
        return controller

    @property
    def gives_up(self) -> bool:
        """True if targets that are out of reach, or no longer all reachable, are dropped; published forms of need
        keep them.
        """
        return self.need == "horizon"


def _adaserve(parts: Parts) -> Controller:
    if parts.eq8_eq9 and parts.limits.max_depth:
        return closed_form(parts)
    joint = JointController(parts.limits, parts.cost, parts.acceptance, parts.objective)
    if not parts.limits.max_depth:
        return joint
    plain_step_s = parts.cost.baseline_s
    return CorrectedController(joint, parts.limits, parts.switch, plain_step_s=plain_step_s)


def closed_form(parts: Parts) -> Controller:
    """Return the controller of AdaServe's eq. 8 and 9."""
    return ClosedFormController.for_limits(
        parts.limits, depth_offset=parts.depth_offset, width_offset=parts.width_offset
    )


def _no_speculation(parts: Parts) -> Controller:
    return FixedController(parts.limits, 0)


def _static_tree(parts: Parts) -> Controller:
    limits = parts.limits
    nodes = [min(count, limits.max_width) for count in SPECINFER_NODES[: limits.max_depth]]
    return FixedController(limits, len(nodes), max(nodes), nodes=sum(nodes))


def _over_drafting(parts: Parts) -> Controller:
    depth = min(parts.parameter + TETRIS_EXTRA, parts.limits.max_depth)
    return FixedController(parts.limits, depth, nodes=parts.parameter)


def pure_arms(rule: Rule) -> Callable[[Parts], Controller]:
    """Return a builder of Nightjar's controller by this rule."""

    def build(parts: Parts) -> Controller:
        return NightjarController(parts.limits, parts.chain_costs, parts.switch, rule, parts.seed)

    return build


POLICIES: dict[str, Policy] = {
    "adaserve": Policy(
        "ours: depth, width, budget and prefill chunk chosen together by predicted cost, corrected by measured steps",
        _adaserve, selector="slo", ordering="deadline", search_budget=True, elastic=True,
        weighs_pages=True, sources="suffix+model",
    ),
    "adaserve-paper": Policy(
        "AdaServe's Algorithm 2 as in its text: eq. 8 and 9, one step's need, t_spec as measured at warm-up",
        closed_form, selector="slo", need="step", slo_order="slowest-first", calibrated=False, needs_draft=True,
    ),
    "adaserve-code": Policy(
        "AdaServe as in its authors' code: need times 1.05, at least 1, nodes per request capped, smallest need first",
        lambda parts: ClosedFormController.for_limits(parts.limits, rounds_up=True), selector="slo", need="code",
        slo_order="fastest-first", calibrated=False, needs_draft=True,
    ),
    "spec:<k>": Policy(
        "a chain of k for every request, always", lambda parts: FixedController(parts.limits, parts.parameter),
        selector="equal", needs_draft=True,
    ),
    "specinfer": Policy(
        "SpecInfer's static tree, 1, 1, 3, 3, 3, 3, 3, 3 nodes by level, as far as max_depth and max_width go",
        _static_tree, selector="static", tree_widths=SPECINFER_NODES, needs_draft=True,
    ),
    "dsd": Policy(
        "SmartSpec: the chain of highest predicted goodput, every 20 steps",
        lambda parts: GoodputController(parts.limits, parts.cost), selector="equal",
    ),
    "dsd-probe": Policy(
        "`dsd` with a chain of 1 every 50 steps while speculation is off, so that it keeps learning",
        lambda parts: GoodputController(parts.limits, parts.cost, probe_steps=DSD_PROBE_STEPS), selector="equal",
    ),
    "turbospec": Policy(
        "TurboSpec: the goodput of `dsd` in every step, with no bonus for plain decoding, with probes while off",
        lambda parts: GoodputController(
            parts.limits, parts.cost, probe_steps=DSD_PROBE_STEPS, steps_per_decision=1, off_favour=1.0
        ),
        selector="equal",
    ),
    "adaspec": Policy(
        "AdaSpec: the chain length with the most predicted tokens per second; each request's part of it follows from "
        "confidence and TPOT target",
        lambda parts: FastestChain(parts.limits, parts.chain_costs), selector="slo-throughput",
    ),
    "dspark:<k>": Policy(
        "DSpark: chains of k, of which the prefixes that are likely to survive are verified, as many as raise "
        "throughput by the warm-up's profile",
        lambda parts: FixedController(parts.limits, parts.parameter), selector="throughput", needs_draft=True,
    ),
    "tetris:<k>": Policy(
        "TETRIS: chains longer than k, of which the k n likeliest nodes of all requests are verified",
        _over_drafting, selector="best", calibrated=False, needs_draft=True,
    ),
    "ucbspec": Policy(
        "BanditSpec: chain length by UCB on emitted tokens", lambda parts: UcbSpec(parts.limits), selector="equal",
        needs_draft=True,
    ),
    "exp3spec": Policy(
        "BanditSpec: chain length by EXP3", lambda parts: Exp3Spec(parts.limits, parts.seed), selector="equal",
        needs_draft=True,
    ),
    "nightjar": Policy(
        "Nightjar: a bandit over chain lengths, 0 included, by seconds per token and batch size, an arm for each bin",
        pure_arms(V2), selector="equal", elastic=True,
    ),
    "nightjar-v1": Policy(
        "Nightjar's first version: explores more, and chooses anew in each step", pure_arms(V1), selector="equal"
    ),
    "bingreedy": Policy(
        "ADA-BINGREEDY: `nightjar-v1` without batch size and switching cost", pure_arms(BINGREEDY),
        selector="equal",
    ),
    "linucb": Policy(
        "LinUCB: chain length by tokens per second, linear in the size of the batch",
        lambda parts: LinUcb(parts.limits, parts.chain_costs), selector="equal",
    ),
    "lints": Policy(
        "`linucb` with Thompson sampling instead of UCB",
        lambda parts: LinearSampling(parts.limits, parts.chain_costs, parts.seed), selector="equal",
    ),
    "ar": Policy("no speculation", _no_speculation, selector="equal", uses_draft=False),
    "sarathi": Policy(
        "Sarathi-Serve: no speculation; decodes first, prefill chunks in what is left of 512 tokens per step",
        lambda parts: FixedController(parts.limits, 0, step_tokens=SARATHI_TOKENS), selector="equal", uses_draft=False,
    ),
    "niyama": Policy(
        "Niyama: no speculation; prefill chunks as large as the decodes' slack allows; by due time plus prompt length, "
        "requests in danger last",
        lambda parts: SlackChunks(parts.limits, parts.cost), selector="equal", ordering="hybrid", uses_draft=False,
    ),
    "slidingserve": Policy(
        "SlidingServe: no speculation; the chunks of this step and the next planned at once, by deadline",
        lambda parts: SlidingChunks(parts.limits, parts.cost), selector="equal", ordering="deadline", uses_draft=False,
    ),
    "jitserve": Policy(
        "JITServe: the shortest chain and the fewest nodes that keep targets, most goodput per step first, by learned "
        "bounds on output lengths",
        lambda parts: JustEnough(parts.limits, parts.chain_costs), selector="slo-only", ordering="goodput",
        bounds_lengths=True,
    ),
    "priority": Policy(
        "no speculation; strictly by (priority, arrival), the worst is preempted for a better one",
        _no_speculation, selector="equal", ordering="priority", uses_draft=False,
    ),
}  # fmt: skip


def names_a_file(name: str) -> bool:
    """Return whether a policy's name is `FILE.py` or `FILE.py:NAME`."""
    return _without_sources(name).partition(":")[0].endswith(PYTHON_SUFFIX)


def policy_from_file(name: str) -> Policy:
    """Return the policy that `FILE.py` or `FILE.py:NAME` names; FILE is relative to the working directory.

    Runs the file, which is ordinary Python: every module-level `Policy` in it is a policy. The file's folder is not on
    the import path, so that one file, identified by its hash, holds the whole policy. Raises ConfigError if there is no
    such file, it fails, it has no such policy, or it has several and none is named.
    """
    file, colon, wanted = name.partition(":")
    path = _path(name)
    policies = {key: value for key, value in vars(_run(path)).items() if isinstance(value, Policy)}
    if colon and wanted in policies:
        return policies[wanted]
    if not policies:
        raise ConfigError(
            f"policy file {path} holds no Policy; it must assign one at module level: NAME = Policy(about, controller, "
            "selector=...)"
        )
    listed = ", ".join(f"{file}:{key}" for key in policies)
    if colon:
        raise ConfigError(f"policy file {path} has no policy {wanted!r}; it has {listed}")
    if len(policies) > 1:
        raise ConfigError(f"policy file {path} holds {len(policies)} policies; name one of {listed}")
    return next(iter(policies.values()))


def file_hashes(names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 (hex) of the file of each policy that comes from one. Raises ConfigError if there is no
    such file.
    """
    return {name: hashlib.sha256(_path(name).read_bytes()).hexdigest() for name in names if names_a_file(name)}


def _path(name: str) -> Path:
    path = Path(_without_sources(name).partition(":")[0])
    if not path.is_file():
        raise ConfigError(
            f"policy {name}: there is no file {path} in {Path.cwd()}; give the path of a Python file with a Policy"
        )
    return path


def _run(path: Path) -> ModuleType:
    """Run a file as a new module: it may have been edited since it last ran.

    Files of one name in several folders are separate modules, and a file that fails leaves none.
    """
    source = path.resolve()
    name = f"{__name__}.{path.stem}_{hashlib.sha256(bytes(source)).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None, "the suffix of Python's sources has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up while they are made
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        where = _where(error, source)
        raise ConfigError(f"policy file {path} fails{where}: {type(error).__name__}: {error}") from error
    return module


def _where(error: Exception, source: Path) -> str:
    """Return " in line N" of the file if the error came through one of its lines; a syntax error names its line
    itself.
    """
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == source]
    return f" in line {lines[-1]}" if lines else ""


def _budget_by_cost(parts: Parts) -> Controller:
    most = max(1, parts.limits.max_tokens // CHUNK_DIVISOR)
    return JointController(
        parts.limits, parts.cost, parts.acceptance, parts.objective, prefill_tokens=most, admits_by_pace=False
    )


def _slack_sized_prefill(parts: Parts) -> Controller:
    return JointController(parts.limits, parts.cost, parts.acceptance, parts.objective, admits_by_pace=False)


def _model_alone(parts: Parts) -> Controller:
    return JointController(parts.limits, parts.cost, parts.acceptance, parts.objective)


_EQUAL = Policy(
    "eq. 8 and 9, as many nodes for each request, uncalibrated f, by arrival", closed_form, selector="equal",
    calibrated=False, needs_draft=True,
)  # fmt: skip
_SLO = replace(_EQUAL, about="+ SLO phase; equal shares of the rest", selector="slo-equal")
_THROUGHPUT = replace(_SLO, about="+ throughput phase: the likeliest nodes of all with the rest", selector="slo")
_CALIBRATED = replace(_THROUGHPUT, about="+ calibrated f", calibrated=True)
_BUDGET = replace(
    _CALIBRATED, about="+ depth, width and budget by predicted cost", controller=_budget_by_cost, search_budget=True,
    needs_draft=False,
)  # fmt: skip
_PREFILL = replace(_BUDGET, about="+ prefill in chunks of the slack's size", controller=_slack_sized_prefill)
_ADAPTED = POLICIES["adaserve"]

ABLATIONS: dict[str, Policy] = {
    "ladder-equal": _EQUAL,
    "ladder-slo": _SLO,
    "ladder-throughput": _THROUGHPUT,
    "ladder-calibrated": _CALIBRATED,
    "ladder-budget": _BUDGET,
    "ladder-prefill": _PREFILL,
    "half-model": replace(_ADAPTED, about="`adaserve`, but the cost model alone decides", controller=_model_alone),
    "half-bandit": replace(
        _ADAPTED, about="`adaserve`, but a bandit over chains alone decides: `nightjar`'s", controller=pure_arms(V2)
    ),
    "order-slowest": replace(_ADAPTED, about="`adaserve`, but the slowest first", slo_order="slowest-first"),
    "order-fastest": replace(_ADAPTED, about="`adaserve`, but the fastest first", slo_order="fastest-first"),
    "off": replace(
        _ADAPTED,
        about="`adaserve`, but speculation is off, with the draft loaded",
        controller=_no_speculation,
        elastic=False,
        weighs_pages=False,
        sources="model",
    ),
}
LADDER = (*(name for name in ABLATIONS if name.startswith("ladder-")), "adaserve")
"""Policies from AdaServe's building blocks to `adaserve`, each with one part more. `adaserve` adds the corrections,
admission by pace, the order by deadline, text to draft from and, where the draft's memory may become KV pages, elastic
memory.
"""
HALVES = ("half-model", "half-bandit", "adaserve")
"""Deciding by the tables alone, by measured results alone, or by both."""
ORDERS = ("order-slowest", "order-fastest", "adaserve")


GROUPS = {"ladder": LADDER, "halves": HALVES, "orders": ORDERS}
"""Names that commands take in place of several policies."""


def expand_groups(names: Sequence[str]) -> tuple[str, ...]:
    """Replace names of groups by their policies, each once."""
    return tuple(dict.fromkeys(each for name in names for each in GROUPS.get(name, (name,))))


def policy_of(config: EngineConfig) -> Policy:
    """Return the policy of a configuration before anything is loaded.

    Raises ConfigError as `find_policy` and `sources_of` do.
    """
    max_depth = config.max_depth if config.speculates else 0
    policy, _ = find_policy(config.policy, longest_chain(config, max_depth, config.suffix_depth))
    sources_of(config, policy)
    return policy


def sources_of(config: EngineConfig, policy: Policy) -> DraftSources:
    """Return what trees are made of: what the policy's name says, else the configuration, else the policy.

    Raises ConfigError: the policy's name says text already seen, and the configuration has synthetic acceptance or
    other sources.
    """
    named = named_sources(config.policy)
    if config.synthetic_acceptance is not None and drafts_from_text(named):
        raise ConfigError(
            f"policy must draft by a model with synthetic_acceptance, got {config.policy!r}: texts already seen cost "
            "no time to draft from, but would be accepted as often"
        )
    if drafts_from_text(named) and not config.may_draft_from_text:
        raise ConfigError(
            f"policy {config.policy!r} drafts from text already seen, but draft_sources is {config.draft_sources!r}; "
            "leave draft_sources at auto"
        )
    found = config.draft_sources if named == "auto" else named
    return policy.sources if found == "auto" else found


def longest_chain(config: EngineConfig, max_depth: int, suffix_depth: int) -> int:
    """Return the longest chain that the draft sources in force can propose.

    max_depth: of the draft; 0 without one. suffix_depth: of text already seen.
    """
    named = named_sources(config.policy)
    sources = config.draft_sources if named == "auto" else named
    if max_depth and (sources == "auto" or "model" in sources.split("+")):
        return max_depth
    return min(config.max_depth, suffix_depth) if drafts_from_text(sources) else 0


def named_sources(name: str) -> DraftSources:
    """Return the SOURCES of a policy's name `NAME@SOURCES`; "auto" where it has none."""
    for sources in DRAFT_SOURCES:
        if name.endswith(f"@{sources}"):
            return sources
    return "auto"


def _without_sources(name: str) -> str:
    return name if named_sources(name) == "auto" else name.rpartition("@")[0]


def find_policy(name: str, max_depth: int) -> tuple[Policy, int]:
    """Return the policy called `name`, or `name@SOURCES`, and its parameter. Needs nothing loaded.

    max_depth: deepest draft, 0 without one. Raises ConfigError for an unknown name, a policy that needs a draft or a
    deeper one, and for a file as `policy_from_file` does.
    """
    whole_name, name = name, _without_sources(name)
    if "@" in name and not names_a_file(name):
        raise ConfigError(
            f"unknown draft sources in policy {whole_name!r}; after the @ of a policy may stand "
            f"{', '.join(DRAFT_SOURCES[1:])}"
        )
    family, _, parameter = name.partition(":")
    whole = policy_from_file(name) if names_a_file(name) else POLICIES.get(name) or ABLATIONS.get(name)
    if whole is not None and f"{family}:<k>" not in POLICIES:
        if whole.needs_draft and not max_depth:
            raise ConfigError(f"policy {name} needs a draft, but there is none; load one, or choose ar")
        return whole, 0
    if f"{family}:<k>" not in POLICIES:
        near = get_close_matches(name, (*POLICIES, *ABLATIONS), 1)
        raise ConfigError(
            f"unknown policy {name!r}; did you mean {near[0]!r}?" if near else
            f"unknown policy {name!r}; known policies are {', '.join(POLICIES)}, and those of files: FILE.py:NAME; "
            f"each may end in @ and its draft sources: {', '.join(DRAFT_SOURCES[1:])}"
        )  # fmt: skip
    if not (parameter.isascii() and parameter.isdecimal() and len(parameter) <= 9 and int(parameter) >= 1):
        raise ConfigError(f"policy {family}:<k> needs an integer k of at least 1, got {name!r}; for example {family}:4")
    depth = int(parameter)
    if not max_depth:
        raise ConfigError(f"policy {name} needs a draft, but there is none; load one, or choose ar or {name}@suffix")
    if depth > max_depth:
        by_text = drafts_from_text(named_sources(whole_name))
        limits, which = ("max_depth and suffix_depth", "one") if by_text else ("max_depth", "it")
        raise ConfigError(
            f"policy {name} needs {limits} of at least {depth}, but {which} is {max_depth}; raise it (Medusa heads "
            "draft no deeper than there are heads), or choose a smaller k"
        )
    return POLICIES[f"{family}:<k>"], depth
