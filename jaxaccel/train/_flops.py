"""How many floating-point operations a step takes, and how many the device could."""

import dataclasses
import time
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

# Dense peaks in TFLOP/s; sheets that quote 2:4 sparsity are halved. The longest
# name found in jax's `device_kind` counts.
_NVIDIA = "NVIDIA data sheet, dense"
_GOOGLE = "Google Cloud documentation"
_PEAKS: dict[str, tuple[str, dict[str, float]]] = {
    "B200": (_NVIDIA, {"bfloat16": 2250, "float16": 2250}),
    "H200": (
        _NVIDIA,
        {"bfloat16": 989, "float16": 989, "tensorfloat32": 494, "float32": 67},
    ),
    "H100": (
        _NVIDIA,
        {"bfloat16": 989, "float16": 989, "tensorfloat32": 494, "float32": 67},
    ),
    "H100 PCIe": (
        _NVIDIA,
        {"bfloat16": 756, "float16": 756, "tensorfloat32": 378, "float32": 51},
    ),
    "A100": (
        _NVIDIA,
        {"bfloat16": 312, "float16": 312, "tensorfloat32": 156, "float32": 19.5},
    ),
    "L40S": (
        _NVIDIA,
        {"bfloat16": 362, "float16": 362, "tensorfloat32": 183, "float32": 91.6},
    ),
    "L4": (
        _NVIDIA,
        {"bfloat16": 121, "float16": 121, "tensorfloat32": 60, "float32": 30.3},
    ),
    "V100": (_NVIDIA, {"float16": 125, "float32": 15.7}),
    "T4": (_NVIDIA, {"float16": 65, "float32": 8.1}),
    "TPU v4": (_GOOGLE, {"bfloat16": 275}),
    "TPU v5 lite": (_GOOGLE, {"bfloat16": 197}),
    "TPU v5": (_GOOGLE, {"bfloat16": 459}),
    "TPU v6 lite": (_GOOGLE, {"bfloat16": 918}),
}


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most operations that the devices do in a second, and who says so.

    Attributes:
      flops_per_second: Of all devices together.
      dtype: What the operations are done in.
      source: Where the number comes from: a data sheet or a measurement.

    Raises:
      ValueError: If `flops_per_second` is not positive.

    Examples:
      >>> from jaxaccel import train
      >>> print(train.Peak(1.5e12, "float32", "measured"))
      1.5 TFLOP/s float32 (measured)
    """

    flops_per_second: float
    dtype: str
    source: str

    def __post_init__(self):
        if not self.flops_per_second > 0:
            raise ValueError(f"a peak must be positive; got {self.flops_per_second}")

    def __str__(self) -> str:
        return (
            f"{self.flops_per_second / 1e12:.4g} TFLOP/s {self.dtype} ({self.source})"
        )


def data_sheet_peak(
    dtype: str = "bfloat16", *, device: Any = None, count: int = 1
) -> Peak:
    """Looks up the dense peak of an accelerator.

    Args:
      dtype: `"bfloat16"`, `"float16"`, `"tensorfloat32"` (in which jax multiplies
        float32 matrices on NVIDIA's GPUs since the A100) or `"float32"` (their
        ordinary cores).
      device: A jax device, or the name of its kind; None means the first one.
      count: Number of such devices that share a step.

    Returns:
      The peak of all of them, and its source.

    Raises:
      ValueError: If no number is known, as for CPUs: use `measure_peak`.

    Examples:
      >>> from jaxaccel import train
      >>> print(train.data_sheet_peak(device="NVIDIA A100-SXM4-80GB", count=2))
      624 TFLOP/s bfloat16 (2 x A100, NVIDIA data sheet, dense)
    """
    device = jax.devices()[0] if device is None else device
    kind = device if isinstance(device, str) else device.device_kind
    name = max((name for name in _PEAKS if name in kind), key=len, default=None)
    source, peaks = _PEAKS[name] if name else ("", {})
    if dtype not in peaks:
        raise ValueError(
            f"no data-sheet peak of {dtype} is known for {kind!r}"
            + (f" (known: {', '.join(peaks)})" if peaks else "")
            + f"; use measure_peak({dtype!r}), or Peak(...) with a number of your own"
        )
    return Peak(peaks[dtype] * 1e12 * count, dtype, f"{count} x {name}, {source}")


def measure_peak(
    dtype: Any = "float32", *, size: int | None = None, rounds: int = 5, count: int = 1
) -> Peak:
    r"""Measures the rate of a large matrix product, :math:`2 n^3 / t`.

    The fastest round counts: whatever else the machine does makes a round slower,
    never faster.

    Args:
      dtype: Of the matrices.
      size: :math:`n`; None means 1024 on the CPU and 8192 elsewhere.
      rounds: Number of measurements.
      count: Number of devices that share a step; one is measured, and its rate
        multiplied.

    Returns:
      The peak, with the size in its source.

    Raises:
      ValueError: If `size`, `rounds` or `count` is less than 1.

    Examples:
      >>> from jaxaccel import train
      >>> peak = train.measure_peak(size=64, rounds=2)
      >>> peak.dtype, peak.source
      ('float32', '1 x cpu, measured by products of 64 x 64 matrices')
    """
    device = jax.devices()[0]
    if size is None:
        size = 1024 if device.platform == "cpu" else 8192
    if min(size, rounds, count) < 1:
        raise ValueError(
            "size, rounds and count must be at least 1; got "
            f"{size}, {rounds} and {count}"
        )
    matrix = jnp.full((size, size), 1 / size, dtype)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(matrix, matrix))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(product(matrix, matrix))
        seconds.append(time.perf_counter() - start)
    return Peak(
        2 * size**3 / min(seconds) * count,
        str(matrix.dtype),
        f"{count} x {device.device_kind}, measured by products of {size} x {size} "
        "matrices",
    )


def count_flops(function: Any, *args: Any) -> float:
    """Counts the floating-point operations of a jitted function, without running it.

    XLA counts them in the program before its own optimizations, which is the same
    on every backend and hides nothing in library calls. Taps of a convolution that
    fall on its padding count nothing. XLA counts the body of a scan once; here it
    counts as often as it runs. A `while_loop` of unknown length counts once.

    Recomputation (`rematerialize`) counts: for the utilisation by the model's own
    operations, count a step that does not recompute.

    Args:
      function: A jitted function, such as a train step.
      *args: Its arguments, arrays or `jax.ShapeDtypeStruct`s; none is donated.

    Returns:
      The number of operations of one call.

    Raises:
      TypeError: If the function is not jitted.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import train
      >>> product = jax.jit(lambda x, y: x @ y)
      >>> print(train.count_flops(product, jnp.ones((3, 4)), jnp.ones((4, 5))))
      120.0
    """
    if not hasattr(function, "trace"):
        raise TypeError(
            f"function must be jitted, jax.jit(f); got {type(function).__name__}"
        )
    traced = function.trace(*args)
    return _xla_flops(traced.lower()) + _repeats(traced.jaxpr)


def _xla_flops(lowered: Any) -> float:
    return float((lowered.cost_analysis() or {}).get("flops", 0.0))


def _repeats(jaxpr: Any) -> float:
    """Operations that XLA leaves out: all runs of a scan's body but the first."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            body, length = equation.params["jaxpr"], equation.params["length"]
            once = _body_flops(body) if length > 1 else 0.0
            total += (length - 1) * once + length * _repeats(body)
            continue
        inner = [_repeats(sub) for sub in _subjaxprs(equation)]
        # Like XLA: of the branches of a conditional, the dearest.
        pick = max if equation.primitive.name == "cond" else sum
        total += pick(inner) if inner else 0.0
    return total


def _subjaxprs(equation: Any) -> list[Any]:
    return list(jax.extend.core.jaxprs_in_params(equation.params))


def _body_flops(body: Any) -> float:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in body.in_avals]
    return _xla_flops(jax.jit(jax.extend.core.jaxpr_as_fun(body)).lower(*shapes))
