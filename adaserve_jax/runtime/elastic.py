"""The draft and more KV pages in turn, in the same device memory: what a swap does on the device, step by step.

Decides nothing: when to swap, which pages to move and who refers to them is the scheduler's. A swap compiles nothing,
and whatever fails leaves what was there before. Source: Nightjar, section 6.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from adaserve_jax.errors import ElasticError, EngineDeadError
from adaserve_jax.models.decoder import Params
from adaserve_jax.models.loading import HostCopy
from adaserve_jax.pallas_kernels.move_pages.moves import check_moves
from adaserve_jax.runtime.compile import CompileCounter, Declared
from adaserve_jax.runtime.model import DeviceModel, free
from adaserve_jax.runtime.pools import Pools, blank, move_to_base

DEVICE_ERRORS = (RuntimeError, MemoryError)
"""What jax raises when a device cannot do as asked, out of memory included, and what NumPy does."""


def declare_expansion(target: DeviceModel, draft: DeviceModel, extension_pages: int) -> list[Declared]:
    """What swaps run: empty pools, and moves of up to all pages of the extension."""
    extension = target.abstract_extension(extension_pages)
    ids = jax.ShapeDtypeStruct((extension_pages,), jnp.int32)
    move = jax.jit(move_to_base, donate_argnums=0)
    return [
        Declared(("target", "extension"), jax.jit(partial(blank, extension)), ()),
        Declared(("target", "move"), move, (target.pools, extension, ids, ids)),
        Declared(("draft", "pools"), jax.jit(partial(blank, abstract(draft.pools))), ()),
    ]


class Elastic:
    """Exchanges the draft for an extension of the target's pools. Call its methods between steps, from one thread.

    The draft's weights have a copy on the host for good, which follows what they become. A thread, the loader, brings
    them back while steps go on.
    """

    def __init__(self, target: DeviceModel, draft: DeviceModel, extension_pages: int, counter: CompileCounter):
        """counter: what counts compilations of swaps, there being none."""
        self._target = target
        self._draft = draft
        self._extension_pages = extension_pages
        self._counter = counter
        self._host_copies = [HostCopy(params) for params in draft.weights]
        self._loading: Future[tuple[list[Params], Pools]] | None = None
        self._came_while_loading: dict[int, Params] = {}
        """Weights that are newer than those on their way, by draft."""
        self._returned: Pools | None = None
        """The extension, once nobody uses it; the loader frees it first of all, since that takes milliseconds."""
        self._resident = True
        self._loader = ThreadPoolExecutor(1, "draft-loader")
        self._loader.submit(threading.get_ident).result()  # so that no swap has to start the thread

    @property
    def resident(self) -> bool:
        """Whether the draft is on its device."""
        return self._resident

    @property
    def host_bytes(self) -> int:
        """Of the drafts' copies."""
        return sum(copy.nbytes for copy in self._host_copies)

    def set_weights(self, draft: int, params: Params) -> None:
        """These are a draft's weights from now on, wherever it is; they are its own. While it is away they live on in
        the copy on the host alone."""
        self._host_copies[draft] = HostCopy(params)
        if self._resident:
            self._draft.weights[draft] = params
        elif self._loading is not None:
            self._came_while_loading[draft] = params
        else:
            free(params)

    def expand(self) -> None:
        """`types.Executor.expand`. Raises ElasticError; EngineDeadError: the draft could not be brought back either."""
        assert self._resident and self._target.pools.extension is None
        with self._counter:
            self._draft.free()
            self._resident = False
            try:
                extension = self._new_extension()
            except DEVICE_ERRORS as error:
                self._bring_back(error)
                raise ElasticError(
                    f"no room for {self._extension_pages} more KV pages where the draft was: {error}; the draft is back"
                ) from error
            self._target.pools = self._target.pools._replace(extension=extension)

    def move_pages(self, from_pages: np.ndarray, to_pages: np.ndarray) -> None:
        """`types.Executor.move_pages`, from the extension into the base: the only way that pages ever go.

        Raises ValueError: other moves, or moves that clash. ElasticError; EngineDeadError: the KV cache is lost.
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
        """`types.Executor.contract`. Never fails: the loader does what could, and `draft_ready` says how it went."""
        pools = self._target.pools
        assert pools.extension is not None
        self._target.pools, self._returned = pools._replace(extension=None), pools.extension
        self._loading = self._loader.submit(self._load)

    def draft_ready(self) -> bool:
        """`types.Executor.draft_ready`."""
        if self._resident:
            return True
        if self._loading is None:
            self._loading = self._loader.submit(self._load)
        if not self._loading.done():
            return False
        self._take_over(self._loading)
        return True

    def wait(self) -> None:
        """After `contract`: return when the draft is there. Raises ElasticError as `draft_ready` does."""
        if self._loading is not None:
            self._take_over(self._loading)

    def close(self) -> None:
        """Wait for the loader, and free what it brought."""
        self._loader.shutdown()
        if self._loading is not None and self._loading.exception() is None:
            free(self._loading.result())
        free((self._returned, self._came_while_loading))

    def _take_over(self, loading: Future[tuple[list[Params], Pools]]) -> None:
        """Wait for the loader; then its drafts are the drafts, but for those that have become others meanwhile."""
        self._loading = None
        newer, self._came_while_loading = self._came_while_loading, {}
        try:
            weights, self._draft.pools = loading.result()
        except DEVICE_ERRORS as error:
            free(newer)
            raise ElasticError(f"the draft could not be loaded: {error}; it is tried again") from error
        for draft, params in newer.items():
            free(weights[draft])
            weights[draft] = params
        self._draft.weights = weights
        self._resident = True

    def _bring_back(self, cause: BaseException) -> None:
        """At once: for an exchange that failed. Raises EngineDeadError."""
        try:
            self._draft.weights, self._draft.pools = self._load()
        except DEVICE_ERRORS as error:
            raise EngineDeadError(
                f"neither the extension ({cause}) nor the draft ({error}) finds room where the draft was; restart"
            ) from error
        self._resident = True

    def _load(self) -> tuple[list[Params], Pools]:
        """The drafts' weights, and pools that hold nothing; all there, or none."""
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
        return [copy.load() for copy in self._host_copies]

    def _copy_pages(self, base: Pools, extension: Pools, from_ids: np.ndarray, to_ids: np.ndarray) -> Pools:
        return jax.block_until_ready(self._target.compiled["target", "move"](base, extension, from_ids, to_ids))

    def _free_extension(self) -> None:
        free(self._returned)
        self._returned = None


def abstract(pools: Pools) -> Pools:
    """The shapes and types of pools."""
    shapes: Pools = jax.tree.map(lambda pool: jax.ShapeDtypeStruct(pool.shape, pool.dtype), pools)
    return shapes
