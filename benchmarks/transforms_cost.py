"""Claim: our gradient transformations cost no more than Optax's own.

Updates a float32 tree of a transformer (25 million parameters, 65 leaves) with every
transformation of `jaxaccel.transforms` and with Optax's clip, adaptive clip and
centralization, and reports for each

  bytes  `bytes accessed` of the compiled update in XLA's cost analysis, in multiples
         of 4N, the size of the gradients. Exact: they belong to a jax version and a
         backend, not to a machine or its load. 2.00 is the floor, each gradient read
         once and each update written once.
  time   of rounds in which all took turns, as a ratio to Optax's clip and adaptive
         clip with its 95 % interval.

The bounds are printed with whether they hold. The record is named after the version
of jax: the figures differ between versions.
"""

import argparse
import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccel import transforms
from jaxaccel.records import Record, interleave, paired_ratio

RESULTS = Path(__file__).parent / "results"
CLIP, ADAPTIVE = "optax.clip_by_global_norm", "optax.adaptive_grad_clip"
CENTRALIZE, FLOOR = "optax.centralize", "optax.scale, the floor"
NAIVE = "znorm, naive"


def naive_znorm(g: Any, _: Any) -> Any:
    """The formula as one writes it first."""
    return (g - g.mean()) / (g.std() + 1e-8) if g.ndim > 1 else g


PEERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    FLOOR: lambda: optax.scale(0.5),
    CLIP: lambda: optax.clip_by_global_norm(1.0),
    ADAPTIVE: lambda: optax.adaptive_grad_clip(0.01),
    CENTRALIZE: lambda: optax.centralize(),
    NAIVE: lambda: optax.stateless_with_tree_map(naive_znorm),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A transformation of `jaxaccel.transforms`, and what it may cost.

    Attributes:
      name: The call as one writes it.
      build: Makes it.
      bytes_bounds: Largest ratio of bytes accessed, by peer.
      time_bounds: Largest ratio of times, by peer.
    """

    name: str
    build: Callable[[], optax.GradientTransformation]
    bytes_bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    time_bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def function(self) -> str:
        """Name of the function that is called."""
        return self.name.split("(")[0]


ROWS = (
    Row("znorm()", transforms.znorm, {CLIP: 1.4}, {CLIP: 1.5, ADAPTIVE: 1.1}),
    Row("znorm(scope='unit')", lambda: transforms.znorm(scope="unit")),
    Row("znorm(scope='pooled')", lambda: transforms.znorm(scope="pooled")),
    Row("centralize_gradients()", transforms.centralize_gradients, {CENTRALIZE: 1.05}),
    Row(
        "clip_by_global_norm(1.0)",
        lambda: transforms.clip_by_global_norm(1.0),
        {CLIP: 1.02},
    ),
    Row("clip_by_layer_norm(1.0)", lambda: transforms.clip_by_layer_norm(1.0)),
    Row("clip_by_value(1.0)", lambda: transforms.clip_by_value(1.0)),
    Row("adaptive_grad_clip(0.01)", lambda: transforms.adaptive_grad_clip(0.01)),
    Row("zclip()", transforms.zclip),
    Row("adagc()", transforms.adagc),
    Row("autoclip()", transforms.autoclip),
    Row("grokfast_ema()", transforms.grokfast_ema),
    Row(
        "gradient_noise_scale(32, micro_batches=8)",
        lambda: transforms.gradient_noise_scale(32, micro_batches=8),
    ),
    Row(
        "gradient_statistics(optax.scale(0.5))",
        lambda: transforms.gradient_statistics(optax.scale(0.5)),
    ),
)


def main(arguments: list[str] | None = None) -> Record:
    options = parse(arguments)
    shapes = network(options.layers, options.width)
    contenders = {
        name: tx
        for name, tx in build_contenders().items()
        if name in PEERS or name.split("(")[0] not in options.without
    }
    moved = {name: bytes_per_size(tx, shapes) for name, tx in contenders.items()}
    times = measure(contenders, shapes, options.rounds) if options.rounds else {}
    record = describe(options, shapes, moved, times)
    print(record.to_json() if options.json else record.table())
    if options.record:
        record.write(RESULTS)
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the cost of transformations")
    parser.add_argument(
        "--rounds", type=int, default=30, help="0: only count bytes, which is exact"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512, help="a multiple of 8")
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        choices=sorted({row.function for row in ROWS}),
        help="leave these out, for what takes long to compile",
    )
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--record", action="store_true", help="write to results/")
    options = parser.parse_args(arguments)
    if options.rounds < 0 or options.rounds == 1:
        parser.error(f"--rounds must be 0 or at least 2, got {options.rounds}")
    if options.layers < 1 or options.width < 8 or options.width % 8:
        parser.error(
            "--layers must be at least 1 and --width a positive multiple of 8, got "
            f"{options.layers} and {options.width}"
        )
    return options


def network(layers: int, width: int) -> Any:
    """Shapes of a transformer's parameters, 8 leaves a layer and a last norm."""

    def kernel(*shape: int):
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}

    def norm():
        return {"scale": jax.ShapeDtypeStruct((width,), jnp.float32)}

    heads = (8, width // 8)
    layer = {
        "attention": {
            **{name: kernel(width, *heads) for name in ("query", "key", "value")},
            "out": kernel(*heads, width),
        },
        "Dense_0": kernel(width, 4 * width),
        "Dense_1": kernel(4 * width, width),
        "LayerNorm_0": norm(),
        "LayerNorm_1": norm(),
    }
    return {f"layer_{i}": layer for i in range(layers)} | {"LayerNorm_0": norm()}


def build_contenders() -> dict[str, optax.GradientTransformation]:
    """Optax's own, then ours."""
    ours = {row.name: row.build for row in ROWS}
    return {name: build() for name, build in (PEERS | ours).items()}


def exported_transformations() -> list[str]:
    """The functions of `jaxaccel.transforms` that return a transformation."""
    kinds = (optax.GradientTransformation, optax.GradientTransformationExtraArgs)
    found = []
    for name in transforms.__all__:
        function = getattr(transforms, name)
        if not isinstance(function, type) and callable(function):
            if typing.get_type_hints(function).get("return") in kinds:
                found.append(name)
    return found


# ----------------------------------------------------------------------- measuring


def jitted(tx: optax.GradientTransformation) -> Any:
    """The update alone, state included, as a step would call it."""
    update = optax.with_extra_args_support(tx).update
    return jax.jit(lambda grads, state, params: update(grads, state, params))


def bytes_per_size(tx: optax.GradientTransformation, shapes: Any) -> float:
    """Bytes that the compiled update accesses, over the bytes of the tree."""
    state = jax.eval_shape(tx.init, shapes)
    # The compiled object, for the lowered one counts before any fusion.
    cost: Any = jitted(tx).lower(shapes, state, shapes).compile().cost_analysis()
    return cost["bytes accessed"] / (4 * count(shapes))


def count(shapes: Any) -> int:
    """Number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def measure(
    contenders: Mapping[str, optax.GradientTransformation], shapes: Any, rounds: int
) -> dict[str, list[float]]:
    rng = np.random.default_rng(0)

    def normal(leaf):
        return jnp.asarray(rng.standard_normal(leaf.shape, np.float32))

    params = jax.tree.map(normal, shapes)
    grads = jax.tree.map(lambda leaf: 1e-3 * normal(leaf), shapes)

    def contender(tx):
        update, state = jitted(tx), tx.init(params)
        return lambda: update(grads, state, params)

    runs = {name: contender(tx) for name, tx in contenders.items()}
    times = interleave(runs, rounds=rounds)
    return {name: [1e3 * t for t in values] for name, values in times.items()}


# -------------------------------------------------------------------------- record


def describe(
    options: argparse.Namespace,
    shapes: Any,
    moved: Mapping[str, float],
    times: Mapping[str, list[float]],
) -> Record:
    rows = [row for row in ROWS if row.name in moved]
    figures = {f"bytes / 4N: {name}": round(value, 3) for name, value in moved.items()}
    for row in rows:
        figures |= check_bytes(row, moved)
        if times:
            figures |= check_times(row, times)
    held = all(
        str(value).endswith("holds")
        for name, value in figures.items()
        if name.startswith("bound")
    )
    version = "_".join(jax.__version__.split(".")[:2])
    return Record.create(
        f"transforms_cost_jax_{version}",
        "A transformation of jaxaccel accesses no more bytes and takes no more time "
        "than the bounds relative to Optax's own allow",
        verdict="helps" if held and times else "no evidence",
        parameters={
            "layers": options.layers,
            "width": options.width,
            "parameters": count(shapes),
            "leaves": len(jax.tree.leaves(shapes)),
            "rounds": options.rounds,
            "without": options.without,
        },
        unit="ms an update",
        rounds=times,
        ratios=[
            f"{row.name} / {peer}"
            for peer in (CLIP, ADAPTIVE, CENTRALIZE)
            for row in rows
            if times and (peer != CENTRALIZE or CENTRALIZE in row.bytes_bounds)
        ],
        figures=figures,
    )


def check_bytes(row: Row, moved: Mapping[str, float]) -> dict[str, str]:
    found = {}
    for peer, bound in row.bytes_bounds.items():
        ratio = moved[row.name] / moved[peer]
        answer = "holds" if ratio <= bound else "BROKEN"
        key = f"bound, bytes: {row.name} / {peer}"
        found[key] = f"{ratio:.3f}x of at most {bound:g}x: {answer}"
    return found


def check_times(row: Row, times: Mapping[str, list[float]]) -> dict[str, str]:
    found = {}
    for peer, bound in row.time_bounds.items():
        ratio = paired_ratio(times[row.name], times[peer])
        if ratio.high <= bound:
            answer = "holds"
        else:
            answer = "BROKEN" if ratio.low > bound else "undecided"
        key = f"bound, time: {row.name} / {peer}"
        found[key] = f"{ratio} of at most {bound:g}x: {answer}"
    return found


if __name__ == "__main__":
    main()
