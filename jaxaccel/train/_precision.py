"""Which dtypes a step computes in, and the scaling that float16 needs."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

PyTree = Any

# A scale outside of this range has stopped helping: float32 itself would be next.
_SMALLEST, _LARGEST = 1.0, 2.0**24


class LossScale(NamedTuple):
    """State of dynamic loss scaling.

    Attributes:
      scale: What the loss is multiplied by before its gradient, float32 scalar.
      good_steps: Finite steps since the scale last changed, int32 scalar.
    """

    scale: jax.Array
    good_steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Precision:
    r"""A precision policy: what is cast before the loss sees it.

    The parameters of the state stay as they are, normally float32 (the master
    weights). The loss sees copies in `compute`, and so do the arrays of the batch.
    Gradients come back in at least float32. With a loss scale :math:`s` the gradient
    is :math:`\nabla(s L) / s`, whose small entries float16 would lose without it:
    a step that is not finite is skipped and halves :math:`s`; `growth_interval`
    finite steps in a row double it.

    Args:
      compute: Floating dtype of the arithmetic.
      loss_scale: First loss scale, a power of two keeps its division exact. None
        means `2**15` for float16 and no scaling for anything else.
      growth_interval: Finite steps after which the scale doubles.
      keep: Regular expression; parameters whose path (`"dense/kernel"`) it is found
        in are not cast. Those of normalization layers, for example. None casts all.
      exclude: Entries of the batch that are not cast: targets, whose values
        narrower dtypes would round. Integers are never cast.

    Raises:
      TypeError: If `compute` is no floating dtype.
      ValueError: If `loss_scale` is not between 1 and 2**24, `growth_interval < 1`
        or `keep` is no regular expression.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxaccel import train
      >>> policy = train.Precision("bfloat16", keep="norm")
      >>> params = {"dense": jnp.ones(2), "norm": jnp.ones(2)}
      >>> for name, x in policy.cast_params(params).items():
      ...     print(name, x.dtype)
      dense bfloat16
      norm float32
    """

    compute: Any
    loss_scale: float | None = None
    growth_interval: int = 2000
    keep: str | None = None
    exclude: tuple[str, ...] = ("label", "mask", "target", "y")

    def __post_init__(self) -> None:
        try:
            dtype = jnp.dtype(self.compute)
        except TypeError as error:
            raise TypeError(
                f"compute must be a dtype such as 'bfloat16'; got {self.compute!r}"
            ) from error
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(f"compute must be a floating dtype; got {dtype}")
        object.__setattr__(self, "compute", dtype)
        if self.loss_scale is None and dtype == jnp.float16:
            object.__setattr__(self, "loss_scale", 2.0**15)
        scale = self.loss_scale
        if scale is not None and not _SMALLEST <= scale <= _LARGEST:
            raise ValueError(
                f"loss_scale must be between 1 and 2**24; got {scale}. None chooses"
            )
        if self.growth_interval < 1:
            raise ValueError(
                f"growth_interval must be at least 1 step; got {self.growth_interval}"
            )
        try:
            re.compile(self.keep or "")
        except re.error as error:
            raise ValueError(
                f"keep must be a regular expression; got {self.keep!r} ({error})"
            ) from error

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, which implies the finite guard."""
        return self.loss_scale is not None

    def init(self) -> LossScale | None:
        """Returns the first state of the loss scaling; None without."""
        if self.loss_scale is None:
            return None
        return LossScale(
            jnp.asarray(self.loss_scale, jnp.float32), jnp.zeros((), jnp.int32)
        )

    def cast_params(self, params: PyTree) -> PyTree:
        """Casts floating leaves to `compute`, but those that `keep` names."""

        def cast(path: Any, x: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if self.keep is not None and re.search(self.keep, name):
                return x
            return self._cast(x)

        return jax.tree_util.tree_map_with_path(cast, params)

    def cast_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Casts the floating arrays of a batch, but those in `exclude`."""
        return {
            name: x if name in self.exclude else self._cast(x)
            for name, x in batch.items()
        }

    def update(self, state: LossScale, finite: jax.Array) -> LossScale:
        """Returns the loss scale of the next step."""
        good_steps = state.good_steps + 1
        grown = good_steps >= self.growth_interval
        up = jnp.minimum(state.scale * 2, _LARGEST)
        down = jnp.maximum(state.scale / 2, _SMALLEST)
        return LossScale(
            jnp.where(finite, jnp.where(grown, up, state.scale), down),
            jnp.where(finite & ~grown, good_steps, 0),
        )

    def _cast(self, x: Any) -> Any:
        x = jnp.asarray(x)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(self.compute)


def as_precision(precision: Any) -> Precision | None:
    """Returns the policy that an option names; None leaves all dtypes alone."""
    if precision is None or isinstance(precision, Precision):
        return precision
    names = ("float32", "bfloat16", "float16")
    if precision not in names:
        raise ValueError(
            f"precision must be one of {', '.join(names)} or a Precision; got "
            f"{precision!r}"
        )
    return Precision(precision)


def at_least_float32(tree: PyTree) -> PyTree:
    """Widens floating leaves narrower than float32; leaves all others alone."""

    def widen(x: jax.Array) -> jax.Array:
        narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if narrow else x

    return jax.tree.map(widen, tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
    """Gives every leaf the dtype of its counterpart."""
    return jax.tree.map(lambda x, ref: x.astype(ref.dtype), tree, like)
