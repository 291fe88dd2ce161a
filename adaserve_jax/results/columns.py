"""What values the columns of a dataclass may have in a JSON line, from its type hints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list",
         dict: "an object", NoneType: "null"}  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """names: all of them. required: those without a default. types: by column, what `type` its values may have; what
    lists and objects hold is not looked at."""

    names: frozenset[str]
    required: frozenset[str]
    types: Mapping[str, frozenset[type]]

    def first_wrong(self, values: Mapping[str, Any]) -> tuple[str, str] | None:
        """A column whose value is of another type, and what it must be; None when all are right."""
        for name, value in values.items():
            if type(value) not in self.types[name]:
                return name, _named(self.types[name])
        return None


@cache
def columns_of(kind: type) -> Columns:
    """The columns of a dataclass of numbers, texts, None, tuples and dicts."""
    hints, own = get_type_hints(kind), fields(kind)
    return Columns(
        names=frozenset(f.name for f in own),
        required=frozenset(f.name for f in own if f.default is MISSING),
        types={f.name: frozenset(_types(hints[f.name])) for f in own},
    )


def _types(hint: Any) -> set[type]:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return {kind for part in get_args(hint) for kind in _types(part)}
    if origin is Literal:
        return {type(value) for value in get_args(hint)}
    if hint is float:
        return {float, int}
    kind = origin or hint
    return {list if kind is tuple else kind}


def _named(types: frozenset[type]) -> str:
    told = types - {int} if float in types else types
    return " or ".join(text for kind, text in NAMES.items() if kind in told)
