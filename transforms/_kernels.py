"""Choosing the kernels of a tree, and mapping over them alone."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxaccel.transforms._dims import KernelDims, KeyPath, Resolver
from jaxaccel.transforms._flax_dims import flax_dims
from jaxaccel.transforms._override import OverrideDims


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
    """

    name: str
    dims: Resolver | None
    axes_of: Callable[[KernelDims], tuple[int, ...]]
    min_size: int = 2
    min_ndim: int = 1
    allow_complex: bool = False

    def __post_init__(self):
        if not (self.dims is None or callable(self.dims)):
            raise TypeError(
                f"{self.name}: `dims` must be a function of (path, leaf), got "
                f"{self.dims!r}; for one leaf use override_dims({{pattern: ...}})"
            )

    def axes(self, path: KeyPath, leaf: Any) -> tuple[int, ...] | None:
        """Returns the axes of a leaf's statistics, or None to leave it as it is."""
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
            axes = self.axes_of(dims.at_rank(len(shape)))
        except ValueError as error:
            raise ValueError(
                f"{self.name}, {jax.tree_util.keystr(path)}: {error}"
            ) from None
        count = math.prod(shape[axis] for axis in axes)
        return axes if count >= self.min_size and math.prod(shape) else None

    def check(self, params: Any) -> None:
        """Raises if no leaf would change, or a rule of `dims` finds none."""
        found = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_masked)
        leaves = [(path, leaf) for path, leaf in found if not _is_masked(leaf)]
        changed = [self.axes(path, leaf) is not None for path, leaf in leaves]
        # Of a masked tree only a part is here: the rest may hold the kernels.
        if not leaves or len(leaves) < len(found):
            return
        if isinstance(self.dims, OverrideDims):
            if unmatched := self.dims.unmatched(path for path, _ in leaves):
                raise ValueError(
                    f"{self.name}: the rules {unmatched} of `dims` find no parameter; "
                    f"the first one is {jax.tree_util.keystr(leaves[0][0])}"
                )
        if not any(changed):
            raise ValueError(self._nothing_selected(leaves))

    def map(self, fn: Callable[[Any, tuple[int, ...]], Any], tree: Any) -> Any:
        """Maps `fn(leaf, axes)` over the kernels, all other leaves pass."""

        def visit(path: KeyPath, leaf: Any) -> Any:
            axes = self.axes(path, leaf)
            return leaf if axes is None else fn(jnp.asarray(leaf), axes)

        return jax.tree_util.tree_map_with_path(visit, tree)

    def _nothing_selected(self, leaves: list[tuple[KeyPath, Any]]) -> str:
        path, leaf = max(leaves, key=lambda item: math.prod(np.shape(item[1])))
        return (
            f"{self.name} would change none of the {len(leaves)} parameters; the "
            f"largest is {jax.tree_util.keystr(path)} with shape {np.shape(leaf)}. "
            "By default kernels are leaves named 'kernel'; they need rank >= "
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
