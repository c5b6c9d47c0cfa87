"""Choosing the kernels of a tree, and mapping over them alone."""

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccel.transforms._dims import ASSUMED, KernelDims, KeyPath, Resolver
from jaxaccel.transforms._flax_dims import flax_dims
from jaxaccel.transforms._override import OverrideDims
from jaxaccel.transforms._shards import (
    AxisName,
    check_axis_name,
    device_count,
    names_over,
)


class Kernel(NamedTuple):
    """A kernel with what its statistics run over."""

    leaf: Any
    axes: tuple[int, ...]
    count: int  # entries behind one statistic, on all devices together
    mesh_axes: tuple[str, ...]  # over which the statistic's axes are split
    stack_axes: tuple[str, ...]  # mesh axes that split the axes of the stack
    assumed: bool  # the layout is a guess


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The kernels that a transformation changes, each with its statistics' axes.

    Args:
        name: the transformation's name, for messages.
        dims: resolver; None is `flax_dims`.
        axes_of: axes over which a kernel's statistics run.
        min_size: least number of entries behind a statistic.
        min_ndim: least rank.
        allow_complex: whether complex gradients have a meaning here.
        axis_name: mesh axes that split the leaves, inside shard_map.
    """

    name: str
    dims: Resolver | None
    axes_of: Callable[[KernelDims], tuple[int, ...]]
    min_size: int = 2
    min_ndim: int = 1
    allow_complex: bool = False
    axis_name: AxisName | None = None

    def __post_init__(self):
        check_axis_name(self.name, self.axis_name)
        if not (self.dims is None or callable(self.dims)):
            raise TypeError(
                f"{self.name}: `dims` must be a function of (path, leaf), got "
                f"{self.dims!r}; for one leaf use override_dims({{pattern: ...}})"
            )

    def axes(self, path: KeyPath, leaf: Any) -> tuple[int, ...] | None:
        """Returns the axes of a leaf's statistics, or None to leave it as it is."""
        kernel = self.select(path, leaf)
        return None if kernel is None else kernel.axes

    def select(self, path: KeyPath, leaf: Any) -> Kernel | None:
        """Returns a leaf with its statistics' extent, or None to leave it."""
        shape = np.shape(leaf)
        if len(shape) < self.min_ndim:
            return None
        dims = (self.dims or flax_dims)(path, leaf)
        if dims is None:
            return None
        if not isinstance(dims, KernelDims):
            raise TypeError(
                f"{self.name}: `dims` answered {dims!r} for "
                f"{jax.tree_util.keystr(path)}; it must answer KernelDims or None"
            )
        check_inexact(self.name, path, leaf, allow_complex=self.allow_complex)
        try:
            dims = dims.at_rank(len(shape))
        except ValueError as error:
            raise ValueError(
                f"{self.name}, {jax.tree_util.keystr(path)}: {error}"
            ) from None
        axes = self.axes_of(dims)
        mesh_axes = names_over(self.axis_name, path, leaf, axes)
        # A name alone is said to split a statistic's axes: these are others.
        by_leaf = self.axis_name if callable(self.axis_name) else None
        stack_axes = names_over(by_leaf, path, leaf, dims.batch)
        count = math.prod(shape[axis] for axis in axes) * device_count(mesh_axes)
        if count < self.min_size or not math.prod(shape):
            return None
        return Kernel(leaf, axes, count, mesh_axes, stack_axes, dims.rule == ASSUMED)

    def check(self, params: Any, *, needs_kernel: bool = True) -> None:
        """Raises if (unless allowed) no leaf would change, or a rule finds none.

        Warns of leaves that would change though their layout is a guess.
        """
        found = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_masked)
        leaves = [(path, leaf) for path, leaf in found if not _is_masked(leaf)]
        kernels = [(path, self.select(path, leaf)) for path, leaf in leaves]
        assumed = [path for path, kernel in kernels if kernel and kernel.assumed]
        if assumed:
            # To the line that calls `init`, which calls this.
            warnings.warn(self._layouts_assumed(assumed), stacklevel=3)
        # Of a masked tree only a part is here: the rest may hold the kernels.
        if not leaves or len(leaves) < len(found):
            return
        if isinstance(self.dims, OverrideDims):
            if unmatched := self.dims.unmatched(path for path, _ in leaves):
                raise ValueError(
                    f"{self.name}: the rules {unmatched} of `dims` find no parameter; "
                    f"the first one is {jax.tree_util.keystr(leaves[0][0])}"
                )
        if needs_kernel and not any(kernel for _, kernel in kernels):
            raise ValueError(self._nothing_selected(leaves))

    def map(self, fn: Callable[[Any, tuple[int, ...]], Any], tree: Any) -> Any:
        """Maps `fn(leaf, axes)` over the kernels, all other leaves pass."""

        def visit(path: KeyPath, leaf: Any) -> Any:
            axes = self.axes(path, leaf)
            return leaf if axes is None else fn(jnp.asarray(leaf), axes)

        return jax.tree_util.tree_map_with_path(visit, tree)

    def map_together(self, fn: Callable[[list[Kernel]], list[Any]], tree: Any) -> Any:
        """Maps over all kernels in one call, all other leaves pass."""
        found, treedef = jax.tree_util.tree_flatten_with_path(tree)
        kernels = [self.select(path, leaf) for path, leaf in found]
        chosen = [kernel for kernel in kernels if kernel]
        results = iter(fn([k._replace(leaf=jnp.asarray(k.leaf)) for k in chosen]))
        leaves = [
            next(results) if kernel else leaf
            for kernel, (_, leaf) in zip(kernels, found, strict=True)
        ]
        return jax.tree.unflatten(treedef, leaves)

    def _layouts_assumed(self, paths: list[KeyPath]) -> str:
        names = ", ".join(jax.tree_util.keystr(path) for path in paths[:5])
        more = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
        return (
            f"{self.name}: nothing but their rank says how {names}{more} "
            "are laid out; their last axis is taken for the output, all others for "
            "the fan-in. Say what they are with dims=override_dims({'pattern': "
            "KernelDims(...)}), None in its place to leave them untouched, or with "
            "dims=haiku_dims or dims=torch_dims; describe_dims(params, dims) shows "
            "the result"
        )

    def _nothing_selected(self, leaves: list[tuple[KeyPath, Any]]) -> str:
        path, leaf = max(leaves, key=lambda item: math.prod(np.shape(item[1])))
        return (
            f"{self.name} would change none of the {len(leaves)} parameters; the "
            f"largest is {jax.tree_util.keystr(path)} with shape {np.shape(leaf)}. "
            "Biases, norm parameters and embeddings pass; kernels need rank >= "
            f"{self.min_ndim} and {self.min_size} entries a statistic. Name others "
            "with dims=override_dims({'pattern': KernelDims(...)}), use "
            "dims=torch_dims for PyTorch's layouts, or, where nothing is meant to "
            "change here, leave the transformation out"
        )


def check_inexact(name: str, path: KeyPath, leaf: Any, *, allow_complex: bool) -> None:
    """Raises if the leaf is not of floating (or complex) type."""
    dtype = jnp.result_type(leaf)
    allowed = jnp.inexact if allow_complex else jnp.floating
    if not jnp.issubdtype(dtype, allowed):
        kind = "floating or complex" if allow_complex else "floating"
        raise TypeError(
            f"{name} needs gradients of {kind} type, but "
            f"{jax.tree_util.keystr(path)} is {dtype}; "
            "keep such leaves away from it with optax.masked or optax.partition"
        )


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
