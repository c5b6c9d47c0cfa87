"""Counts the bytes that gradient transformations move, against Optax's own.

Prints, for each transformation of one float32 tree of a small network, the
`bytes accessed` of XLA's cost analysis of the compiled update, in multiples of
the tree's size. 2.00 is the floor: each gradient read once, each update
written once. The figures are exact, not timed: they belong to a jax version
and a backend, not to a machine or its load.

    python benchmarks/transform_bytes.py [--width 512] [--json FILE]
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxaccel import transforms


def network(width: int) -> Any:
    """Returns the shapes of two convolutions, an attention block and an MLP."""
    heads = (8, width // 8)
    shapes = {
        "Conv_0": {"kernel": (3, 3, width // 8, width // 4), "bias": (width // 4,)},
        "Conv_1": {"kernel": (3, 3, width // 4, width // 4), "bias": (width // 4,)},
        "Attention_0": {
            "query": {"kernel": (width, *heads), "bias": heads},
            "key": {"kernel": (width, *heads), "bias": heads},
            "value": {"kernel": (width, *heads), "bias": heads},
            "out": {"kernel": (*heads, width), "bias": (width,)},
        },
        "Dense_0": {"kernel": (width, 4 * width), "bias": (4 * width,)},
        "Dense_1": {"kernel": (4 * width, width), "bias": (width,)},
        "LayerNorm_0": {"scale": (width,), "bias": (width,)},
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def naive_znorm() -> optax.GradientTransformation:
    """The formula as one writes it first: whole tensors, `jnp.mean`, `jnp.std`."""

    def normalize(g: Any, _: Any) -> Any:
        return (g - g.mean()) / (g.std() + 1e-8) if g.ndim > 1 else g

    return optax.stateless_with_tree_map(normalize)


CONTENDERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "optax.scale (floor)": lambda: optax.scale(0.5),
    "znorm": transforms.znorm,
    "znorm scope=unit": lambda: transforms.znorm(scope="unit"),
    "znorm naive": naive_znorm,
    "centralize_gradients": transforms.centralize_gradients,
    "optax.centralize": optax.centralize,
    "clip_by_global_norm": lambda: transforms.clip_by_global_norm(1.0),
    "optax.clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
}


def bytes_per_size(tx: optax.GradientTransformation, shapes: Any) -> float:
    """Returns the bytes that the compiled update accesses, over the tree's bytes."""
    state = tx.init(shapes)
    update = jax.jit(lambda grads: tx.update(grads, state, grads)[0])
    cost: Any = update.lower(shapes).compile().cost_analysis()
    size = sum(4 * math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    return cost["bytes accessed"] / size


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Bytes accessed by gradient transformations."
    )
    parser.add_argument("--width", type=int, default=512, help="multiple of 64")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.width < 64 or args.width % 64:
        parser.error(f"--width must be a positive multiple of 64, got {args.width}")

    shapes = network(args.width)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
    figures = {
        name: bytes_per_size(build(), shapes) for name, build in CONTENDERS.items()
    }
    backend = jax.default_backend()
    print(f"jax {jax.__version__}, {backend}, {count:,} float32 parameters")
    print(f"{'transformation':<28}{'bytes / 4N':>10}{'of optax clip':>15}")
    for name, figure in figures.items():
        relative = figure / figures["optax.clip_by_global_norm"]
        print(f"{name:<28}{figure:>10.2f}{relative:>14.2f}x")
    if args.json:
        record = {"jax": jax.__version__, "backend": backend, "parameters": count}
        args.json.write_text(json.dumps(record | {"bytes_per_size": figures}, indent=2))


if __name__ == "__main__":
    main()
