"""Every path that an application routes, those that its OpenAPI document does not show included."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def paths_of(routes: Iterable[Any]) -> set[str]:
    found: set[str] = set()
    for route in routes:
        inner = getattr(route, "original_router", route)  # FastAPI's wrapper of an included router
        if hasattr(inner, "routes"):
            found |= paths_of(inner.routes)
        else:
            found.add(route.path)
    return found
