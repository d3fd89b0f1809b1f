"""The key-value cache of the embedded engine: one row a slot, read and written in whole windows.

Keys lie as [slot, K, D, column] and values as [slot, K, column, D]: the two layouts in which a query's dot products
over the columns are contiguous (measured 1.3 times as fast on CPU as one layout for both). The last slot is scratch:
padding rows of a batch read and write there. A window is written at its row's length; the tail of it that holds no
real token lies behind the row's new length, is never visible, and is overwritten by the next write. ``margin`` extra
columns let that tail of the last window fit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

_WINDOW_OF_ROW = lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 3)
)
_COLUMN_OF_KEYS, _COLUMN_OF_VALUES = 3, 2


class KVCache(NamedTuple):
    """One array a layer. ``keys[l]`` [S+1, K, D, C] and ``values[l]`` [S+1, K, C, D], S slots and C columns."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


class KVWindow(NamedTuple):
    """New columns of B rows: ``keys[l]`` [B, K, D, W] and ``values[l]`` [B, K, W, D]."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]


def allocate(
    *, layers: int, slots: int, kv_heads: int, head_dim: int, columns: int, margin: int, dtype: jnp.dtype
) -> KVCache:
    """A cache of zeros for ``slots`` rows (and the scratch row) of ``columns`` tokens each."""
    rows, width = slots + 1, columns + margin
    return KVCache(
        keys=tuple(jnp.zeros((rows, kv_heads, head_dim, width), dtype) for _ in range(layers)),
        values=tuple(jnp.zeros((rows, kv_heads, width, head_dim), dtype) for _ in range(layers)),
    )


def read(cache: KVCache, slots_b: Array, columns: int) -> KVWindow:
    """The first ``columns`` columns of the given slots."""

    def rows(array: Array, column_axis: int) -> Array:
        sizes = tuple(columns if axis == column_axis else size for axis, size in enumerate(array.shape))[1:]
        start = (0,) * len(sizes)
        return jax.vmap(lambda slot: lax.dynamic_slice(array, (slot, *start), (1, *sizes))[0])(slots_b)

    return KVWindow(
        keys=tuple(rows(array, _COLUMN_OF_KEYS) for array in cache.keys),
        values=tuple(rows(array, _COLUMN_OF_VALUES) for array in cache.values),
    )


def write(cache: KVCache, window: KVWindow, slots_b: Array, starts_b: Array) -> KVCache:
    """Write row b of the window into slot ``slots_b[b]`` from column ``starts_b[b]`` on; it must fit the margin."""

    def put(array: Array, update: Array, column_axis: int) -> Array:
        dimensions = _WINDOW_OF_ROW._replace(scatter_dims_to_operand_dims=(0, column_axis))
        indices = jnp.stack([slots_b, starts_b], axis=1)
        return lax.scatter(array, indices, update, dimensions, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)

    return KVCache(
        keys=tuple(put(*pair, _COLUMN_OF_KEYS) for pair in zip(cache.keys, window.keys, strict=True)),
        values=tuple(put(*pair, _COLUMN_OF_VALUES) for pair in zip(cache.values, window.values, strict=True)),
    )
