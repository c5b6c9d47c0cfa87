"""How often a transformation passes over memory, from XLA's cost analysis."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxaccel.transforms import centralize_gradients, clip_by_global_norm, znorm

SHAPES = {
    "Conv_0": {"kernel": (3, 3, 64, 128)},
    "Dense_0": {"kernel": (512, 1024), "bias": (1024,)},
    "query": {"kernel": (256, 4, 64)},
    "out": {"kernel": (4, 64, 256)},
}


def bytes_accessed(tx, dtype=jnp.float32):
    grads = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    state = tx.init(grads)
    update = jax.jit(lambda grads: tx.update(grads, state, grads)[0])
    cost: Any = update.lower(grads).compile().cost_analysis()
    return cost["bytes accessed"]


@pytest.mark.parametrize(
    "ours,optax_peer,limit",
    [
        (znorm(), optax.clip_by_global_norm(1.0), 1.4),
        (znorm(scope="unit"), optax.clip_by_global_norm(1.0), 1.4),
        (clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0), 1.02),
        (centralize_gradients(), optax.centralize(), 1.05),
    ],
    ids=["znorm", "znorm_unit", "clip_by_global_norm", "centralize_gradients"],
)
def test_bytes_against_optax(ours, optax_peer, limit):
    assert bytes_accessed(ours) <= limit * bytes_accessed(optax_peer)
