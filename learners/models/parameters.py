"""Small things one does with a parameter tree: name its leaves, copy it, tell two of them apart."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Params = Any
"""A pytree of arrays; for a whole model, the ``nnx.State`` of its ``nnx.Param``s."""


def named_leaves(tree: Params) -> dict[str, Any]:
    """Every array of a pytree under its path, such as ``layers/0/attention/q_kernel``, sorted by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return dict(sorted(((path_name(path), leaf) for path, leaf in leaves), key=lambda item: item[0]))


def fingerprint(tree: Params) -> str:
    """32 hexadecimal digits over the names, dtypes, shapes and exact bytes of every array.

    Two trees have the same fingerprint if and only if they are equal bit for bit (up to a collision of SHA-256 cut to
    128 bits). Learner and engine compare theirs after a weight sync.
    """
    digest = hashlib.sha256()
    for name, leaf in named_leaves(tree).items():
        array = np.asarray(leaf)
        digest.update(f"{name}:{array.dtype}:{array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:32]


@jax.jit
def copy_tree(tree: Params) -> Params:
    """Fresh buffers with the same values, safe from a later donation of the originals."""
    return jax.tree.map(jnp.copy, tree)


def global_norm(tree: Params) -> Array:
    """Scalar Euclidean norm over all arrays of a pytree."""
    return jnp.sqrt(sum((jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)), jnp.zeros(())))


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of ``jax.tree_util`` as names between slashes, without the ``value`` step into an NNX variable."""
    return jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
