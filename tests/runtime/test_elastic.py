"""A host copy outlives the weights that it was made of, and shares memory with none."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaserve_jax.runtime.elastic import HostCopy


@pytest.mark.parametrize("pinned", [False, True])
def test_weights_come_back_as_they_were(pinned: bool) -> None:
    """pinned: as on a GPU or TPU; jax's CPU has such a memory too."""
    rng = np.random.default_rng(0)
    given = {"matrix": rng.random((30, 40), np.float32), "norm": rng.random(5).astype(jnp.bfloat16)}
    params = {name: jnp.asarray(array) for name, array in given.items()}
    held = HostCopy(params, pinned=pinned)
    assert sum(array.nbytes for array in held.arrays.values()) == 30 * 40 * 4 + 5 * 2
    for weight in params.values():
        weight.delete()
    first, second = held.load(), held.load()
    places = set()
    for loaded in (first, second):
        for name, array in given.items():
            np.testing.assert_array_equal(loaded[name], array)
            assert loaded[name].dtype == array.dtype
            assert loaded[name].sharding == jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            places.add(loaded[name].unsafe_buffer_pointer())
    assert len(places) == 4
    if not pinned:
        kept = [array for array in held.arrays.values() if isinstance(array, np.ndarray)]
        assert len(kept) == 2
        assert not places & {array.ctypes.data for array in kept}
