"""Elastic memory: the draft and an extension of the KV pool take turns in the same device memory.

The scheduler decides when to expand and to contract, and which pages move. Nothing compiles, and an exchange that fails
restores what was there before. Source: Nightjar, section 6.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from adaserve_jax.errors import ElasticError, EngineDeadError
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.loading import aligned_buffer
from adaserve_jax.runtime.compile import CompileCounter, Declared
from adaserve_jax.runtime.model import DeviceModel, free
from adaserve_jax.runtime.page_moves import check_moves
from adaserve_jax.runtime.pools import Pools, blank, move_to_base

DEVICE_ERRORS = (RuntimeError, MemoryError)
"""Errors of jax and NumPy when a device fails or memory runs out."""


def declare_expansion(target: DeviceModel, draft: DeviceModel, extension_pages: int) -> list[Declared]:
    """Declare the programs of expansion and contraction: empty pools, and moves of up to all extension pages."""
    extension = target.abstract_extension(extension_pages)
    draft_pools = jax.tree.map(lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype), draft.pools)
    ids = jax.ShapeDtypeStruct((extension_pages,), jnp.int32)
    move = jax.jit(move_to_base, donate_argnums=0)
    return [
        Declared(("target", "extension"), jax.jit(partial(blank, extension)), ()),
        Declared(("target", "move"), move, (target.pools, extension, ids, ids)),
        Declared(("draft", "pools"), jax.jit(partial(blank, draft_pools)), ()),
    ]


class Elastic:
    """Exchanges the draft for an extension of the target's pools. Call its methods between steps, from one thread.

    A copy of the drafts' weights stays on the host and follows their updates. A loader thread brings them back to the
    device while steps go on.
    """

    def __init__(self, target: DeviceModel, draft: DeviceModel, extension_pages: int, counter: CompileCounter):
        """Copy the drafts' weights to the host. counter: counts compilations, of which there must be none."""
        self._target = target
        self._draft = draft
        self._extension_pages = extension_pages
        self._counter = counter
        self.host_copies = [HostCopy(params) for params in draft.weights]
        self._loading: Future[tuple[list[Params], Pools]] | None = None
        self._newer_weights: dict[int, Params] = {}
        """Weights set while older ones are loading, by draft."""
        self._freed_extension: Pools | None = None
        """An extension out of use. The loader deletes it first; that takes milliseconds, which no step should wait."""
        self.resident = True
        """True while the draft is on its device."""
        self._loader = ThreadPoolExecutor(1, "draft-loader")
        self._loader.submit(threading.get_ident).result()  # so that no swap has to start the thread

    def set_weights(self, draft: int, params: Params) -> None:
        """Replace a draft's weights; takes ownership of `params`. While the draft is away, only the host copy stays."""
        self.host_copies[draft] = HostCopy(params)
        if self.resident:
            self._draft.weights[draft] = params
        elif self._loading is not None:
            self._newer_weights[draft] = params
        else:
            free(params)

    def expand(self) -> None:
        """Implement `types.Executor.expand`. Raises ElasticError; EngineDeadError: the draft could not be restored."""
        assert self.resident and self._target.pools.extension is None
        with self._counter:
            self._draft.free()
            self.resident = False
            try:
                extension = self._new_extension()
            except DEVICE_ERRORS as error:
                self._restore_draft(error)
                raise ElasticError(
                    f"no room for {self._extension_pages} more KV pages where the draft was: {error}; the draft is back"
                ) from error
            self._target.pools = self._target.pools._replace(extension=extension)

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        """Implement `types.Executor.move_pages`; pages only ever move from the extension into the base.

        Raises ValueError: moves in another direction, or moves that clash; ElasticError: nothing was copied;
        EngineDeadError: the KV cache is lost.
        """
        pools = self._target.pools
        base, extension = pools._replace(extension=None), pools.extension
        assert extension is not None
        base_pages = base.num_pages
        if np.any((to_pages < 0) | (to_pages >= base_pages)):
            raise ValueError(f"pages must move to pages below {base_pages}, got {to_pages.tolist()}")
        sources = from_pages - base_pages
        check_moves(sources, to_pages, target_pages=base_pages, source_pages=extension.num_pages)
        if not len(to_pages):
            return
        padding = (0, self._extension_pages - len(to_pages))
        from_ids = np.pad(sources, padding).astype(np.int32)
        to_ids = np.pad(to_pages, padding, constant_values=-1).astype(np.int32)
        try:
            with self._counter:
                moved = self._copy_pages(base, extension, from_ids, to_ids)
        except DEVICE_ERRORS as error:
            if any(pool.is_deleted() for pool in jax.tree.leaves(base)):
                raise EngineDeadError(
                    f"the KV cache was lost while pages moved: {error}; restart the engine"
                ) from error
            raise ElasticError(
                f"{len(to_pages)} KV pages could not be copied: {error}; they are where they were"
            ) from error
        self._target.pools = moved._replace(extension=extension)

    def contract(self) -> None:
        """Implement `types.Executor.contract`. Never fails: `draft_ready` reports errors of the loader."""
        pools = self._target.pools
        assert pools.extension is not None
        self._target.pools, self._freed_extension = pools._replace(extension=None), pools.extension
        self._loading = self._loader.submit(self._load)

    def draft_ready(self) -> bool:
        """Implement `types.Executor.draft_ready`."""
        if self.resident:
            return True
        if self._loading is None:
            self._loading = self._loader.submit(self._load)
        if not self._loading.done():
            return False
        self._install(self._loading)
        return True

    def wait(self) -> None:
        """Block until the draft is back after `contract`. Raises ElasticError as `draft_ready` does."""
        if self._loading is not None:
            self._install(self._loading)

    def close(self) -> None:
        """Wait for the loader and delete everything it loaded."""
        self._loader.shutdown()
        if self._loading is not None and self._loading.exception() is None:
            free(self._loading.result())
        free((self._freed_extension, self._newer_weights))

    def _install(self, loading: Future[tuple[list[Params], Pools]]) -> None:
        """Wait for the loader and give its weights to the draft, except where newer ones were set meanwhile."""
        self._loading = None
        newer, self._newer_weights = self._newer_weights, {}
        try:
            weights, self._draft.pools = loading.result()
        except DEVICE_ERRORS as error:
            free(newer)
            raise ElasticError(f"the draft could not be loaded: {error}; it is tried again") from error
        for draft, params in newer.items():
            free(weights[draft])
            weights[draft] = params
        self._draft.weights = weights
        self.resident = True

    def _restore_draft(self, cause: BaseException) -> None:
        """Load the draft at once, after an expansion that failed. Raises EngineDeadError: it does not fit either."""
        try:
            self._draft.weights, self._draft.pools = self._load()
        except DEVICE_ERRORS as error:
            raise EngineDeadError(
                f"neither the extension ({cause}) nor the draft ({error}) finds room where the draft was; restart"
            ) from error
        self.resident = True

    def _load(self) -> tuple[list[Params], Pools]:
        """Load the drafts' weights and make empty pools. On an error nothing of them stays on the device."""
        weights: list[Params] = []
        pools: Pools | None = None
        try:
            with self._counter:
                self._free_extension()
                weights = self._load_weights()
                pools = self._new_draft_pools()
                jax.block_until_ready((weights, pools))
        except BaseException:
            free((weights, pools))
            raise
        return weights, pools

    def _new_extension(self) -> Pools:
        return jax.block_until_ready(self._target.compiled["target", "extension"]())

    def _new_draft_pools(self) -> Pools:
        return self._draft.compiled["draft", "pools"]()

    def _load_weights(self) -> list[Params]:
        return [copy.load() for copy in self.host_copies]

    def _copy_pages(self, base: Pools, extension: Pools, from_ids: np.ndarray, to_ids: np.ndarray) -> Pools:
        return jax.block_until_ready(self._target.compiled["target", "move"](base, extension, from_ids, to_ids))

    def _free_extension(self) -> None:
        free(self._freed_extension)
        self._freed_extension = None


class HostCopy:
    """A copy in host memory of weights that lie on one device.

    Pinned memory, from which a GPU or TPU reads at full speed, where the device has its own memory. On a CPU it is
    plain memory: a device array made of host memory may share it there, and would not free it.
    """

    def __init__(self, params: Params, *, pinned: bool | None = None):
        """Copy the weights. pinned: use pinned memory; None: where the device is not a CPU."""
        (self._device,) = next(iter(params.values())).devices()
        pinned = self._device.platform != "cpu" if pinned is None else pinned
        host = SingleDeviceSharding(self._device, memory_kind="pinned_host") if pinned else None
        self.arrays = {n: np.array(w) if host is None else jax.device_put(w, host) for n, w in params.items()}

    def load(self) -> Params:
        """Return new device arrays. Except on a CPU, their copies may still be running."""
        return {name: self._to_device(held) for name, held in self.arrays.items()}

    def _to_device(self, held: np.ndarray | jax.Array) -> jax.Array:
        if isinstance(held, jax.Array):
            return jax.device_put(held, SingleDeviceSharding(self._device))
        buffer = aligned_buffer(held.shape, held.dtype)
        np.copyto(buffer, held)
        return jax.device_put(buffer, self._device)
