"""What range activations have: states that batches update, inside of jit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.quant._qparams import QParams, compute_qparams, is_concrete
from jaxaccel.quant._ranges import extremes
from jaxaccel.quant._spec import QuantSpec

State = Any


class RangeState(NamedTuple):
    """What `minmax` and `ema_minmax` keep.

    Attributes:
      lo: Least number, float32 of the shape of the scales.
      hi: Largest number.
      count: Number of updates of this device, int32 scalar.
    """

    lo: jax.Array
    hi: jax.Array
    count: jax.Array


class Observer(NamedTuple):
    """Functions that find the range of what they are shown, in the form of Optax.

    Attributes:
      spec: Format that the range is for.
      init: `init(shape) -> state` for arrays of a shape (of its channel axis only the
        length matters).
      update: `update(state, x) -> state`; ValueError for an empty array, or one with
        other channels than `init` was told.
      range: `range(state) -> (lo, hi)`; NaN before the first update.
      merge: `merge(state, axis_name) -> state`: inside `shard_map` or `vmap`, what one
        observer would know that had seen the data of all devices. `minmax` and
        `ema_minmax` may merge after every update; histograms are added, so merge
        them once, at the end.
    """

    spec: QuantSpec
    init: Callable[[tuple[int, ...]], State]
    update: Callable[[State, Any], State]
    range: Callable[[State], tuple[jax.Array, jax.Array]]
    merge: Callable[[State, Any], State]

    def qparams(self, state: State) -> QParams:
        """Returns scale and zero point for what was seen.

        Args:
          state: After at least one update.

        Returns:
          Those of `compute_qparams`.

        Raises:
          ValueError: Outside of `jit`: if there was no update, or it held NaN or
            infinity. Inside, the scale is NaN then.
        """
        if is_concrete(state.count) and not np.asarray(state.count).all():
            raise ValueError(
                "the observer was never updated; show it calibration batches before "
                "its range is used"
            )
        return compute_qparams(*self.range(state), self.spec)


def minmax(spec: QuantSpec) -> Observer:
    """Observes the least and the largest number of all batches.

    Args:
      spec: Format that the range is for, without blocks.

    Returns:
      The observer; its state is a `RangeState`.

    Raises:
      ValueError: If `spec` has blocks.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> observer = quant.minmax(quant.UINT8_ACTIVATION)
      >>> state = observer.init(())
      >>> for batch in (np.array([0.5, 2.0]), np.array([-0.55, 1.0])):
      ...     state = observer.update(state, batch)
      >>> qparams = observer.qparams(state)
      >>> print(f"{qparams.scale:.2f}", qparams.zero_point)
      0.01 55
    """
    check_observable(spec)

    def update(state: RangeState, x: Any) -> RangeState:
        check_channels(state.lo.shape, x, spec)
        lo, hi = extremes(x, spec)
        return RangeState(
            jnp.minimum(state.lo, lo), jnp.maximum(state.hi, hi), state.count + 1
        )

    def merge(state: RangeState, axis_name: Any) -> RangeState:
        return RangeState(
            jax.lax.pmin(state.lo, axis_name),
            jax.lax.pmax(state.hi, axis_name),
            jax.lax.pmax(state.count, axis_name),
        )

    return Observer(spec, lambda shape: empty_range(spec, shape), update, known, merge)


def ema_minmax(spec: QuantSpec, *, decay: float = 0.99) -> Observer:
    r"""Observes moving averages of the batches' least and largest numbers.

    .. math:: m \leftarrow m + (1 - d)(\min(x) - m)

    which starts with the first batch itself, not with 0. Outliers of single batches
    count little: the usual choice for quantization-aware training.

    Args:
      spec: Format that the range is for, without blocks.
      decay: :math:`d`, in [0, 1).

    Returns:
      The observer; its state is a `RangeState`. Merging takes the mean over the
      devices that have seen batches, each of its own.

    Raises:
      ValueError: If `spec` has blocks, or `decay` is not in [0, 1).

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> observer = quant.ema_minmax(quant.INT8_ACTIVATION, decay=0.75)
      >>> state = observer.init(())
      >>> for largest in (4.0, 8.0):
      ...     state = observer.update(state, np.array([0.0, largest]))
      >>> print(state.hi)
      5.0

    References:
      Jacob et al., 2018, arXiv:1712.05877
    """
    check_observable(spec)
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be >= 0 and < 1; got {decay}")
    new = np.float32(1 - decay)

    def update(state: RangeState, x: Any) -> RangeState:
        check_channels(state.lo.shape, x, spec)
        first = state.count == 0
        lo, hi = (
            # The infinity that the state starts with must not meet arithmetic.
            jnp.where(first, now, old + new * (now - jnp.where(first, now, old)))
            for old, now in zip(state[:2], extremes(x, spec), strict=True)
        )
        return RangeState(lo, hi, state.count + 1)

    def merge(state: RangeState, axis_name: Any) -> RangeState:
        seen = state.count > 0
        devices = jax.lax.psum(seen.astype(jnp.float32), axis_name)
        lo, hi = (
            jax.lax.psum(jnp.where(seen, end, 0.0), axis_name) / jnp.maximum(devices, 1)
            for end in state[:2]
        )
        return RangeState(lo, hi, jax.lax.pmax(state.count, axis_name))

    return Observer(spec, lambda shape: empty_range(spec, shape), update, known, merge)


def known(state: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the range of a state, NaN before the first update."""
    never = state.count == 0
    nan = np.float32(np.nan)
    return jnp.where(never, nan, state.lo), jnp.where(never, nan, state.hi)


def empty_range(spec: QuantSpec, shape: tuple[int, ...]) -> RangeState:
    """Returns the state before the first update."""
    shape = spec.params_shape(shape)
    return RangeState(
        jnp.full(shape, np.float32(np.inf)),
        jnp.full(shape, np.float32(-np.inf)),
        jnp.zeros((), jnp.int32),
    )


def check_channels(known: tuple[int, ...], x: Any, spec: QuantSpec) -> None:
    """Raises unless an array has as many channels as the state."""
    wanted = spec.params_shape(np.shape(x))
    if wanted != known:
        raise ValueError(
            f"the observer was made for arrays with scales of shape {known}; got one "
            f"of shape {np.shape(x)}, whose scales are of shape {wanted}: tell init "
            "the shape of the arrays"
        )


def check_observable(spec: QuantSpec) -> None:
    """Raises unless observers know how to group entries."""
    if spec.block_size is not None:
        raise ValueError(
            f"observers find one range, or one a channel; got block_size="
            f"{spec.block_size}: use array_qparams for blocks of a kernel"
        )
