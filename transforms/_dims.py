"""Which axes of a kernel are fan-in, output or stacked."""

import dataclasses
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

KeyPath = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class KernelDims:
    """Names the role of every axis of a kernel.

    A unit of the kernel is one index of the output axes; its weight vector
    runs along the reduction axes. Batch axes stack independent kernels, such
    as the layers of a scanned network: no statistic ever crosses them. The
    three together name each axis once; negative axes count from the end.

    Args:
        reduction: axes of the fan-in, at least one.
        output: axes of the output units; may be empty.
        batch: axes that stack independent kernels; none by default.
        rule: how a resolver came to it, for `describe_dims`; not compared.

    Raises:
        TypeError: an entry is not a tuple of integers.
        ValueError: no reduction axis, or one axis is named twice.

    Examples:
        >>> from jaxaccel.transforms import KernelDims
        >>> KernelDims(reduction=(-2,), output=(-1,), batch=(0,)).at_rank(3)
        KernelDims(reduction=(1,), output=(2,), batch=(0,))
    """

    reduction: tuple[int, ...]
    output: tuple[int, ...]
    batch: tuple[int, ...] = ()
    rule: str = dataclasses.field(default="", compare=False, repr=False, kw_only=True)

    def __post_init__(self):
        for name in ("reduction", "output", "batch"):
            axes = _as_axes(name, getattr(self, name))
            object.__setattr__(self, name, axes)
        if not self.reduction:
            raise ValueError(
                f"{self} has no reduction axis, so there is nothing to reduce over; "
                "a resolver answers None for a leaf that is not a kernel"
            )
        _reject_repeated(self, self.reduction + self.output + self.batch)

    def at_rank(self, ndim: int) -> "KernelDims":
        """Returns the same roles with non-negative axes of an array.

        Args:
            ndim: rank of the array.

        Returns:
            The `KernelDims` whose axes together are 0, ..., ndim - 1.

        Raises:
            ValueError: the axes do not name each axis of the array once.
        """
        axes = self.reduction + self.output + self.batch
        if len(axes) != ndim or not all(-ndim <= axis < ndim for axis in axes):
            raise ValueError(
                f"{self} does not fit an array of rank {ndim}: reduction, output and "
                f"batch together must name each of its {ndim} axes once"
            )
        reduction, output, batch = (
            tuple(axis % ndim for axis in axes)
            for axes in (self.reduction, self.output, self.batch)
        )
        return KernelDims(reduction, output, batch, rule=self.rule)

    def with_rule(self, rule: str) -> "KernelDims":
        """Returns the same roles with another account of where they come from."""
        return dataclasses.replace(self, rule=rule)

    def stacked(self, axis: int) -> "KernelDims":
        """Returns the roles once a batch axis is inserted into the array.

        Args:
            axis: where the new axis is, in the array that has it.

        Returns:
            The `KernelDims` of the stack, its axes not negative.

        Raises:
            ValueError: there can be no such axis.

        Examples:
            >>> from jaxaccel.transforms import KernelDims
            >>> KernelDims(reduction=(0,), output=(1,)).stacked(0)
            KernelDims(reduction=(1,), output=(2,), batch=(0,))
        """
        ndim = len(self.reduction + self.output + self.batch)
        if not -ndim - 1 <= axis <= ndim:
            raise ValueError(f"{self} has {ndim} axes: no new one can be at {axis}")
        dims, axis = self.at_rank(ndim), axis % (ndim + 1)
        reduction, output, batch = (
            tuple(old + (old >= axis) for old in axes)
            for axes in (dims.reduction, dims.output, dims.batch)
        )
        return KernelDims(
            reduction, output, tuple(sorted((axis, *batch))), rule=self.rule
        )

    def unstacked(self, axis: int) -> "KernelDims":
        """Returns the roles once a batch axis is taken away: undoes `stacked`.

        Args:
            axis: the batch axis to take away.

        Returns:
            The `KernelDims` of one kernel of the stack.

        Raises:
            ValueError: the axis is not a batch axis.
        """
        ndim = len(self.reduction + self.output + self.batch)
        dims, axis = self.at_rank(ndim), axis % ndim
        if axis not in dims.batch:
            raise ValueError(f"{self} has no batch axis {axis}")
        reduction, output, batch = (
            tuple(old - (old > axis) for old in axes if old != axis)
            for axes in (dims.reduction, dims.output, dims.batch)
        )
        return KernelDims(reduction, output, batch, rule=self.rule)


ASSUMED = "assumed: last axis is output"
"""The rule of leaves that nothing but their rank speaks for."""

Resolver = Callable[[KeyPath, Any], KernelDims | None]


def torch_dims(path: KeyPath, leaf: Any) -> KernelDims | None:
    """Resolves leaves laid out as in PyTorch: output axis first.

    Every leaf of rank >= 2 is a kernel with output axis 0 and all other axes
    fan-in, whatever its name: `(out, in)`, `(out, in, height, width)`.
    `centralize_gradients(dims=torch_dims)` then is `optax.centralize()`. Two of
    PyTorch's layers need `override_dims(..., torch_dims)`: an Embedding, None,
    and a ConvTranspose2d, `(in, out, height, width)`, the axes
    `KernelDims((0, 2, 3), (1,))`.

    Args:
        path: key path of the leaf, as `jax.tree_util` gives it; not read.
        leaf: the array, or anything with its shape.

    Returns:
        The axes, or None for scalars and vectors.

    Examples:
        >>> import jax.numpy as jnp
        >>> from jaxaccel.transforms import torch_dims
        >>> torch_dims((), jnp.zeros((8, 3, 5, 5)))
        KernelDims(reduction=(1, 2, 3), output=(0,), batch=())
    """
    del path
    ndim = np.ndim(leaf)
    if ndim < 2:
        return None
    return KernelDims(tuple(range(1, ndim)), (0,), rule="PyTorch (out, in, ...)")


def path_names(path: KeyPath) -> tuple[str, ...]:
    """Writes a key path as strings, less the attribute that boxes the array.

    An NNX variable and a Linen metadata box hold their array as `.value`:
    only the path to the box is the parameter's name.
    """
    while path and isinstance(path[-1], jax.tree_util.GetAttrKey):
        if path[-1].name not in ("value", "raw_value"):
            break
        path = path[:-1]
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _as_axes(name: str, axes: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(axis) for axis in axes)
    except TypeError:
        raise TypeError(
            f"`{name}` must be a tuple of integer axes, got {axes!r}; "
            f"write ({axes!r},) for a single axis"
        ) from None


def _reject_repeated(dims: KernelDims, axes: tuple[int, ...]) -> None:
    if len(set(axes)) != len(axes):
        raise ValueError(f"{dims} names an axis twice; each axis has one role")
