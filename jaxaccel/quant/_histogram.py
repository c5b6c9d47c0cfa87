"""Observers that keep a histogram: percentiles, and the range of least error."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.quant._observers import Observer, check_channels, check_observable
from jaxaccel.quant._qparams import as_float32, compute_qparams
from jaxaccel.quant._quantize import as_arrays, decode, encode
from jaxaccel.quant._ranges import as_groups, check_entries
from jaxaccel.quant._spec import QuantSpec


class HistogramState(NamedTuple):
    """What `percentile` and `mse_range` keep.

    Attributes:
      counts: Numbers in each of the bins between `-limit` and `limit`, float32
        `(groups, bins)`, one group for each scale; exact up to `2**24` in a bin.
      limit: Bound of the bins, a power of two, float32 `(groups,)`.
      lo: Least number, float32 `(groups,)`.
      hi: Largest number.
      count: Number of updates, int32 scalar.
    """

    counts: jax.Array
    limit: jax.Array
    lo: jax.Array
    hi: jax.Array
    count: jax.Array


def percentile(
    spec: QuantSpec, *, percent: float = 99.99, bins: int = 2048
) -> Observer:
    """Observes the range that holds a percentage of all numbers on either side.

    The lower end is the `100 - percent` percentile, the upper one the `percent`
    percentile, interpolated within the bins of a histogram from `-limit` to `limit`.
    The limit is a power of two that doubles until it is above all numbers, and bins
    are joined in pairs then, so that the order of batches does not matter: a bin is
    at most `4 / bins` of the largest magnitude wide.

    Args:
      spec: Format that the range is for, without blocks.
      percent: Above 50, at most 100, which is `minmax`.
      bins: Number of bins, a power of two.

    Returns:
      The observer; its state is a `HistogramState`.

    Raises:
      ValueError: If `spec` has blocks, or a number is out of range.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> observer = quant.percentile(quant.INT8_ACTIVATION, percent=99.0)
      >>> x = np.append(np.linspace(0.0, 1.0, 999), 100.0)
      >>> lo, hi = observer.range(observer.update(observer.init(()), x))
      >>> print(f"{hi:.1f}")
      1.0
    """
    if not 50 < percent <= 100:
        raise ValueError(f"percent must be above 50 and at most 100; got {percent}")

    def find(state: HistogramState) -> tuple[jax.Array, jax.Array]:
        if percent == 100:
            return state.lo, state.hi
        quantile = jax.vmap(_quantile, in_axes=(0, 0, None))
        share = np.float32(1 - percent / 100)
        low = quantile(state.counts, state.limit, share)
        # From the far end: a share next to 1 has no digits left in float32.
        high = -quantile(state.counts[:, ::-1], state.limit, share)
        # A bin reaches beyond the numbers in it.
        low = jnp.clip(low, state.lo, state.hi)
        return low, jnp.clip(high, low, state.hi)

    return _observer(spec, bins, find)


def mse_range(spec: QuantSpec, *, candidates: int = 80, bins: int = 2048) -> Observer:
    r"""Observes the range whose quantization has the least mean squared error.

    Of the ranges :math:`c\,[\min, \max]`, with :math:`c` from 0.05 to 1, it takes the
    one that minimizes :math:`\sum_i n_i (\hat x_i - x_i)^2` over the histogram that
    `percentile` describes, of numbers in the middle of their bins. Clipping a few
    numbers pays where codes are few: the choice for 4 bits and less.

    Args:
      spec: Format that the range is for, without blocks.
      candidates: Number of ranges that are tried, evenly spaced.
      bins: Number of bins, a power of two.

    Returns:
      The observer; its state is a `HistogramState`.

    Raises:
      ValueError: If `spec` has blocks, or a number is out of range.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(bits=4, symmetric=True)
      >>> observer = quant.mse_range(spec)
      >>> x = np.random.default_rng(0).normal(size=4096)
      >>> lo, hi = observer.range(observer.update(observer.init(()), x))
      >>> print(f"{lo:.1f} of {x.min():.1f}")
      -2.3 of -3.9

    References:
      Nagel et al., A White Paper on Neural Network Quantization, 2021,
      arXiv:2106.08295
    """
    if candidates < 2:
        raise ValueError(f"candidates must be at least 2; got {candidates}")
    shares = np.linspace(0.05, 1, candidates, dtype=np.float32)
    # Of one group there is one scale.
    single = dataclasses.replace(spec, channel_axis=None, rounding="half_even")

    def find_one(counts, limit, lo, hi):
        centers = _edges(limit, bins)[:-1] + limit / bins

        def error(share):
            qparams = compute_qparams(share * lo, share * hi, single)
            scale, zero = as_arrays(qparams)
            codes = encode(centers, scale, zero, spec=single)
            difference = decode(codes, scale, zero, spec=single) - centers
            # Relative, or squares of very large and very small numbers are no numbers.
            return jnp.sum(counts * (difference / limit) ** 2)

        best = jnp.asarray(shares)[jnp.argmin(jax.lax.map(error, jnp.asarray(shares)))]
        return best * lo, best * hi

    def find(state: HistogramState) -> tuple[jax.Array, jax.Array]:
        return jax.vmap(find_one)(*state[:4])

    return _observer(spec, bins, find)


def _observer(spec: QuantSpec, bins: int, find: Any) -> Observer:
    check_observable(spec)
    if bins < 8 or bins & (bins - 1):
        raise ValueError(f"bins must be a power of two, at least 8; got {bins}")

    def init(shape: tuple[int, ...]) -> HistogramState:
        groups = math.prod(spec.params_shape(shape))
        infinite = jnp.full(groups, np.float32(np.inf))
        return HistogramState(
            counts=jnp.zeros((groups, bins), jnp.float32),
            limit=jnp.full(groups, np.float32(2.0**-100)),
            lo=infinite,
            hi=-infinite,
            count=jnp.zeros((), jnp.int32),
        )

    def update(state: HistogramState, x: Any) -> HistogramState:
        x = as_float32(x)
        check_entries(x)
        known = () if spec.channel_axis is None else state.lo.shape
        check_channels(known, x, spec)
        groups = as_groups(x, spec)
        counts, limit = jax.vmap(_add)(state.counts, state.limit, groups)
        return HistogramState(
            counts,
            limit,
            jnp.minimum(state.lo, groups.min(axis=1)),
            jnp.maximum(state.hi, groups.max(axis=1)),
            state.count + 1,
        )

    def merge(state: HistogramState, axis_name: Any) -> HistogramState:
        largest = jax.lax.pmax(state.limit, axis_name)
        counts, limit = jax.vmap(_widen)(state.counts, state.limit, largest)
        return HistogramState(
            jax.lax.psum(counts, axis_name),
            limit,
            jax.lax.pmin(state.lo, axis_name),
            jax.lax.pmax(state.hi, axis_name),
            jax.lax.psum(state.count, axis_name),
        )

    def range_of(state: HistogramState) -> tuple[jax.Array, jax.Array]:
        bad = (state.count == 0) | ~jnp.isfinite(state.lo) | ~jnp.isfinite(state.hi)
        # The histogram of no numbers, or of NaN, would give some range all the same.
        ends = (jnp.where(bad, np.float32(np.nan), end) for end in find(state))
        shape = () if spec.channel_axis is None else state.lo.shape
        lo, hi = (end.reshape(shape) for end in ends)
        return lo, hi

    return Observer(spec, init, update, range_of, merge)


def _add(
    counts: jax.Array, limit: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    finite = jnp.isfinite(x)
    magnitude = jnp.max(jnp.where(finite, jnp.abs(x), 0.0))
    # The least power of two above it. Further up the inverse of it is no normal number,
    # which flushes to 0: there numbers beyond count in the outer bins.
    _, exponent = jnp.frexp(magnitude)
    above = jnp.ldexp(np.float32(1), jnp.minimum(exponent, 126))
    # Zeros are in the middle of any histogram: they must not make it coarse.
    above = jnp.where(magnitude == 0, limit, above)
    counts, limit = _widen(counts, limit, jnp.maximum(above, limit))
    half = counts.shape[0] // 2
    places = jnp.where(finite, jnp.floor(x / limit * half), 0).astype(jnp.int32)
    places = jnp.clip(places, -half, half - 1) + half
    new = jnp.zeros(2 * half, jnp.int32).at[places].add(finite.astype(jnp.int32))
    return counts + new.astype(jnp.float32), limit


def _widen(
    counts: jax.Array, limit: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Doubles the limit until it is the wanted one, joining bins in pairs."""
    bins = counts.shape[0]

    def double(state):
        counts, limit = state
        pairs = counts.reshape(-1, 2).sum(axis=1)
        return jnp.pad(pairs, bins // 4), 2 * limit

    def narrow(state):
        return state[1] < wanted

    # An empty histogram has no bins to join: one step in place of a hundred.
    limit = jnp.where(counts.sum() == 0, wanted, limit)
    return jax.lax.while_loop(narrow, double, (counts, limit))


def _edges(limit: jax.Array, bins: int) -> jax.Array:
    return (jnp.arange(bins + 1, dtype=jnp.float32) * (2 / bins) - 1) * limit


def _quantile(counts: jax.Array, limit: jax.Array, share: Any) -> jax.Array:
    below = jnp.concatenate([jnp.zeros(1, jnp.float32), jnp.cumsum(counts)])
    return jnp.interp(share * below[-1], below, _edges(limit, counts.shape[0]))
