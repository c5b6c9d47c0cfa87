"""How often a transformation passes over memory, from XLA's cost analysis."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxaccel.transforms import (
    adagc,
    adaptive_grad_clip,
    autoclip,
    centralize_gradients,
    clip_by_global_norm,
    clip_by_layer_norm,
    clip_by_value,
    zclip,
    znorm,
)

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
    update = jax.jit(tx.update)
    cost: Any = update.lower(grads, state, grads).compile().cost_analysis()
    return cost["bytes accessed"]


@pytest.mark.parametrize(
    "ours,optax_peer,limit",
    [
        (znorm(), optax.clip_by_global_norm(1.0), 1.4),
        (znorm(scope="unit"), optax.clip_by_global_norm(1.0), 1.4),
        (
            znorm(scope="pooled", fuse_statistics=True),
            optax.clip_by_global_norm(1.0),
            1.4,
        ),
        (clip_by_global_norm(1.0), optax.clip_by_global_norm(1.0), 1.02),
        (centralize_gradients(), optax.centralize(), 1.05),
        (clip_by_value(1.0), optax.clip(1.0), 1.02),
        (clip_by_layer_norm(1.0), optax.clip_by_block_rms(1.0), 1.02),
        (adaptive_grad_clip(0.01), optax.adaptive_grad_clip(0.01), 1.05),
        (zclip(), optax.clip_by_global_norm(1.0), 1.02),
        (adagc(), optax.clip_by_global_norm(1.0), 1.02),
        (autoclip(), optax.clip_by_global_norm(1.0), 1.02),
    ],
    ids=[
        "znorm",
        "znorm_unit",
        "znorm_pooled",
        "clip_by_global_norm",
        "centralize_gradients",
        "clip_by_value",
        "clip_by_layer_norm",
        "adaptive_grad_clip",
        "zclip",
        "adagc",
        "autoclip",
    ],
)
def test_bytes_against_optax(ours, optax_peer, limit):
    assert bytes_accessed(ours) <= limit * bytes_accessed(optax_peer)
