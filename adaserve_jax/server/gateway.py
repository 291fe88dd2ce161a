"""Targets in headers, as gateways in front of inference servers write them. Read only where the gateway is trusted."""

from __future__ import annotations

from typing import TypeVar

from starlette.datastructures import Headers

from adaserve_jax.errors import RequestError
from adaserve_jax.server.errors import ApiError, invalid
from adaserve_jax.server.protocol import GenerationBody
from adaserve_jax.types import SLO

HEADERS = {
    "slo_tpot_ms": ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms"),
    "slo_ttft_ms": ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"),
}
"""By field of the body: the header, and its older name, which the newer one goes before."""
AnyBody = TypeVar("AnyBody", bound=GenerationBody)


def with_header_targets(body: AnyBody, headers: Headers, *, trusted: bool) -> tuple[AnyBody, str]:
    """The body, with targets from the headers where it has none of that kind; and a warning, "" when there is none.

    Raises ApiError(code="invalid_slo") naming a header that is no target, though the body may have its own.
    """
    named = [name for names in HEADERS.values() for name in names if name in headers]
    if not trusted:
        return body, f"ignored headers of an untrusted gateway: {', '.join(named)}" if named else ""
    own_tpot = body.slo_tpot_ms is not None or body.slo_relative is not None
    own = {"slo_tpot_ms": own_tpot, "slo_ttft_ms": body.slo_ttft_ms is not None}
    found = {field: _first([_target(headers, name) for name in names]) for field, names in HEADERS.items()}
    update = {field: value for field, value in found.items() if value is not None and not own[field]}
    return body.model_copy(update=update), ""


def _target(headers: Headers, name: str) -> float | None:
    """Milliseconds that a header asks for; None when it is not there."""
    values = headers.getlist(name)
    if not values:
        return None
    if len(values) > 1:
        raise _refusal(name, "given once", f"{len(values)} of them")
    try:
        return SLO(tpot_ms=float(values[0])).tpot_ms
    except (ValueError, RequestError):
        raise _refusal(name, "a finite number above 0", repr(values[0][:40])) from None


def _refusal(name: str, expected: str, got: str) -> ApiError:
    return invalid(f"the header {name} must be {expected}, got {got}", name, "invalid_slo")


def _first(values: list[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)
