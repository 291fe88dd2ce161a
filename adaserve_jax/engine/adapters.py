"""Adapters of an engine by name: which slot each has, and which slots running requests still need."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from adaserve_jax.config import is_adapter_name
from adaserve_jax.errors import RequestError

NOT_FOUND = "model_not_found"
"""Code of the error about an adapter that is not loaded."""


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter. generation: its place among all that were ever loaded, so that KV and texts of one that had the
    same name are not taken for its own."""

    name: str
    slot: int
    generation: int


NO_ADAPTER = Adapter("", 0, 0)
"""The model alone."""


class AdapterTable:
    """Loaded adapters by name. Only the thread of the steps changes it.

    A name that is unloaded is gone for new requests at once. Its slot is taken again once no sequence uses it.
    """

    def __init__(self, slots: int):
        """Set up a table of so many slots; 0: no adapter can be loaded."""
        self.slots = slots
        self._loaded: dict[str, Adapter] = {}
        self._generation = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order of loading."""
        return tuple(self._loaded)

    def find(self, name: str) -> Adapter:
        """Return the adapter of a request; "" is the model alone. Raises RequestError: it is not loaded."""
        if not name:
            return NO_ADAPTER
        if (found := self._loaded.get(name)) is None:
            raise RequestError(not_loaded(name, self._loaded), param="model", code=NOT_FOUND)
        return found

    def salted(self, adapter: Adapter, salt: str) -> str:
        """Return the salt of a request's KV and texts, apart from those of every other adapter and of the model."""
        return f"{adapter.generation}:{salt}" if self.slots else salt

    def check_new(self, name: str, *, replace: bool) -> None:
        """Raise RequestError unless an adapter of this name may be loaded. replace: one may have it already."""
        if not self.slots:
            raise RequestError(
                "this engine has no room for adapters; start it with max_loras, or with lora NAME=FOLDER",
                param="lora_name",
            )
        if not is_adapter_name(name):
            raise RequestError(
                f"lora_name must be 1 to 128 letters, digits and ._/:-, got {name!r:.100}", param="lora_name"
            )
        if name in self._loaded and not replace:
            raise RequestError(
                f"adapter {name!r} is loaded already; unload it first, or load it with load_inplace true",
                param="lora_name",
            )

    def free_slot(self, name: str, used: Collection[int], *, replace: bool) -> int:
        """Return the slot for a new adapter. used: slots that sequences need. Raises RequestError: there is none.

        With `replace`, the adapter that has the name leaves its slot if nothing uses it.
        """
        self.check_new(name, replace=replace)
        taken = {each.slot for each in self._loaded.values() if each.name != name} | set(used)
        for slot in range(1, self.slots + 1):
            if slot not in taken:
                return slot
        raise RequestError(
            f"all {self.slots} adapters that have room are loaded, or still in use by running requests; unload one, "
            "wait for them, or start the engine with a larger max_loras",
            param="lora_name",
            code="no_adapter_slot",
        )

    def bind(self, name: str, slot: int) -> None:
        """Enter an adapter whose matrices are in its slot."""
        self._generation += 1
        self._loaded[name] = Adapter(name, slot, self._generation)

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises RequestError: it is not loaded."""
        if name not in self._loaded:
            raise RequestError(not_loaded(name, self._loaded), param="lora_name", code=NOT_FOUND)
        del self._loaded[name]


def not_loaded(name: str, loaded: Collection[str]) -> str:
    """Return the message about an adapter that is not loaded."""
    return f"adapter {name!r} must be one that is loaded: {', '.join(loaded) or 'none is'}"
