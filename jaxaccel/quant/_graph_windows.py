"""How windows lie on an image: strides, padding, and what they count."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from jaxaccel.quant._graph_nodes import Pairs

Padding = str | Sequence[tuple[int, int]]


def pool_windows(
    shape: tuple[int, ...], window: Any, strides: Any, padding: Padding
) -> tuple[tuple[int, int], tuple[int, int], Pairs, tuple[int, ...]]:
    """Returns window, strides, padding and shape of a pooled tensor."""
    if len(shape) != 3:
        raise ValueError(f"pooling needs (height, width, channels); got {shape}")
    window = pair(window)
    strides = window if strides is None else pair(strides)
    padding = resolve(padding, shape[:2], window, strides)
    sizes = count_windows(shape[:2], window, strides, padding)
    return window, strides, padding, (*sizes, shape[2])


def pair(value: Any) -> tuple[int, int]:
    """Returns one or two sizes as two."""
    sizes = (value, value) if np.ndim(value) == 0 else tuple(value)
    if len(sizes) != 2 or min(sizes) < 1:
        raise ValueError(f"expected one or two sizes of at least 1; got {value}")
    return int(sizes[0]), int(sizes[1])


def resolve(padding: Padding, sizes: Any, window: Any, strides: Any) -> Pairs:
    """Returns padding as pairs of height and width."""
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(sizes, window, strides, padding)
    (top, bottom), (left, right) = padding
    if min(top, bottom, left, right) < 0:
        raise ValueError(f"padding must not be negative; got {padding}")
    return (int(top), int(bottom)), (int(left), int(right))


def count_windows(sizes: Any, window: Any, strides: Any, padding: Pairs) -> list[int]:
    """Returns how many windows there are along height and width."""
    counts = [
        (n + sum(pads) - k) // s + 1
        for n, k, s, pads in zip(sizes, window, strides, padding, strict=True)
    ]
    if min(counts) < 1:
        raise ValueError(f"a window of {tuple(window)} does not fit {tuple(sizes)}")
    return counts


def count_entries(sizes: Any, window: Any, strides: Any, padding: Pairs) -> np.ndarray:
    """Returns how many entries of each window are no padding, as (h, w, 1)."""
    along = []
    for n, k, s, pads in zip(sizes, window, strides, padding, strict=True):
        inside = np.pad(np.ones(n, int), pads)
        along.append(np.lib.stride_tricks.sliding_window_view(inside, k)[::s].sum(-1))
    return np.maximum(along[0][:, None] * along[1], 1)[..., None]
