"""Under which heading each option stands, in `--help` and in docs/cli.md. An option that is not named here is the
command's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

OWN = "Options"
PANELS: dict[str, tuple[str, ...]] = {
    "A server that runs already": (
        "url", "system", "model", "api_key_env", "header", "endpoint", "send_slo", "baseline_ms", "extra_body",
        "spare_connections", "silence_timeout",
    ),
    "Models": ("target", "draft", "drafts", "route", "dtype", "quantize"),
    "Policy and speculation": (
        "policy", "deterministic", "infeasible_slo", "max_depth", "max_width", "max_tree_tokens", "max_slo_nodes",
        "elastic", "calibrate", "calibration", "eq8_eq9", "eq8_c1", "eq9_c2",
    ),
    "Address, keys and TLS": (
        "host", "port", "api_key", "served_model_name", "tls_cert", "tls_key", "tls_client_ca", "cors_origins",
        "trust_gateway",
    ),
    "Speed targets of requests": (
        "slo_classes", "min_slo_tpot_ms", "max_slo_tpot_ms", "min_slo_ttft_ms", "max_slo_ttft_ms",
    ),
    "Size": (
        "max_requests", "max_context", "max_waiting", "page_size", "num_pages", "max_batch_tokens",
        "max_prefill_tokens", "prefix_cache", "memory_limit_mib",
    ),
    "Limits of the server": (
        "max_inflight", "max_choices", "max_queue_wait", "max_body_bytes", "max_header_bytes", "receive_timeout",
        "keep_alive_timeout", "use_generation_config",
    ),
    "Watching": (
        "dashboard", "records", "records_days", "records_max_mib", "record_text", "otlp_endpoint", "log_level",
    ),
    "Failures and the end": (
        "shutdown_timeout", "watchdog", "max_restarts", "restart_window", "exit_when_dead",
    ),
    "Devices and compilation": (
        "attention", "token_edges", "row_edges", "profile", "compile_cache", "seed", "tp", "coordinator",
        "num_processes", "process_id",
    ),
    "Draft services": (
        "drafter", "drafter_deadline_ms", "drafter_version", "drafter_token_file", "drafter_ca", "drafter_cert",
        "drafter_key",
    ),
    "Learning": (
        "learn", "learn_loss", "learn_beta", "learn_temperature", "learn_positions", "learn_top_k", "learn_every",
        "learn_steps", "learn_rate", "learn_lora_rank", "learn_buffer", "learn_held_out", "learn_tolerance",
        "learn_tenant_share", "learn_delay_ms", "learn_share", "learn_folder", "learn_keep_records",
    ),
}  # fmt: skip
"""In the order in which they are shown, behind the command's own."""
OWN_OF = {"bench": ("seed",), "simulate": ("seed", "max_requests", "max_prefill_tokens"), "draft": ("model",),
          "report": ("records",), "generate": ("seed",)}  # fmt: skip
"""By command: options of its own that are called like one of a heading."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "Serve": ("serve", "generate", "config"),
    "Measure": ("bench", "report", "simulate", "profile", "perplexity"),
    "Make models": ("distill", "convert", "grow"),
    "Several processes": ("cluster", "draft", "follow"),
    "Other": ("version",),
}
"""Headings of `adaserve --help`, and the commands under them."""
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def by_panel(command: str, options: Iterable[Any]) -> dict[str, list[Any]]:
    """The options of a command under their headings, in the order in which both are shown. Empty headings are left
    out."""
    found: dict[str, list[Any]] = {panel: [] for panel in (OWN, *PANELS)}
    own = OWN_OF.get(command, ())
    for option in options:
        found[OWN if option.name in own else _PANEL_OF.get(option.name, OWN)].append(option)
    for panel, names in PANELS.items():
        found[panel].sort(key=lambda option, names=names: names.index(option.name))
    return {panel: listed for panel, listed in found.items() if listed}
