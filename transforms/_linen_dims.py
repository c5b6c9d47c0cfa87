"""Reads the layouts of kernels off a Linen model, by watching it initialize."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxaccel.transforms._dims import KernelDims, KeyPath, Resolver, path_names
from jaxaccel.transforms._flax_dims import flax_dims, last_axis_is_output

Init = Callable[..., Any]


def linen_dims(module: Any, *inputs: Any, **kwargs: Any) -> Resolver:
    """Returns a resolver that knows the layers of a Linen model."""
    variables = _watched_variables(module, *inputs, **kwargs)
    boxes = jax.tree_util.tree_leaves_with_path(
        variables.get("params", {}), is_leaf=lambda node: isinstance(node, _box_type())
    )
    # Parameters are given as `variables["params"]`, or with the collection's name.
    bare = {path_names(path): leaf for path, leaf in boxes}
    known = {("params", *names): leaf for names, leaf in bare.items()} | bare

    def resolver(path: KeyPath, leaf: Any) -> KernelDims | None:
        names = path_names(path)
        box: Any = known.get(names)
        if isinstance(box, _box_type()):
            if isinstance(box.dims, KernelDims):
                return box.dims
            raise ValueError(_unknown_axes(path, leaf, box.dims))
        if names[-1:] == ("kernel",) and box is None:
            raise ValueError(
                f"the model given to module_dims has no {jax.tree_util.keystr(path)}; "
                "give the parameters as module.init returns them for the same inputs"
            )
        return flax_dims(path, leaf)

    return resolver


def _watched_variables(module: Any, *inputs: Any, **kwargs: Any) -> Any:
    from flax import linen as nn

    # Only arrays are traced: other inputs are often Python flags.
    leaves, treedef = jax.tree.flatten((inputs, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]

    def initialize(key, *arrays):
        given = iter(arrays)
        values = [
            next(given) if array else leaf
            for leaf, array in zip(leaves, is_array, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(treedef, values)
        with nn.intercept_methods(_box_kernels):
            return module.init(key, *args, **kwargs)

    return jax.eval_shape(initialize, jax.random.key(0), *arrays)


def _box_kernels(call: Init, args: Any, kwargs: Any, context: Any) -> Any:
    """Puts what a layer knows about its kernel into the kernel's metadata.

    Lifted transformations tell metadata at which axis they stack, which
    shapes alone do not say: (6, 6, 6) may be stacked along any of the three.
    """
    layer = context.module
    init = getattr(layer, "kernel_init", None)
    if not callable(init):
        return call(*args, **kwargs)
    # A layer hands its initializer on to the layers inside: the innermost counts.
    inner = init.args[1] if getattr(init, "func", None) is _boxed_init else init
    with _field(layer, "kernel_init", functools.partial(_boxed_init, layer, inner)):
        return call(*args, **kwargs)


def _boxed_init(layer: Any, init: Init, key: Any, shape: Any, *rest: Any) -> Any:
    from flax.core import meta

    value = meta.unbox(init(key, shape, *rest))
    return _box_type()(value, _role(layer, len(shape)))


@contextlib.contextmanager
def _field(layer: Any, name: str, value: Any) -> Iterator[None]:
    # Modules are frozen; this one is a clone bound for the call, and restored.
    before = getattr(layer, name)
    object.__setattr__(layer, name, value)
    try:
        yield
    finally:
        object.__setattr__(layer, name, before)


def _role(layer: Any, rank: int) -> KernelDims | str:
    """Roles of one layer's kernel before any stacking, or why there are none."""
    from flax import linen as nn

    kind = type(layer).__name__
    if isinstance(layer, nn.Einsum):
        return "belongs to a linen.Einsum, whose axes mean what its equation says"
    if isinstance(layer, nn.DenseGeneral):
        batch, fan_in, output = (
            len(np.atleast_1d(np.asarray(part, np.int64)))
            for part in (layer.batch_dims, layer.axis, layer.features)
        )
        axes = tuple(range(batch + fan_in + output))
        parts = axes[batch : batch + fan_in], axes[batch + fan_in :], axes[:batch]
        return KernelDims(*parts, rule=f"linen {kind}")
    if isinstance(layer, nn.ConvTranspose) and layer.transpose_kernel:
        reduction = (*range(rank - 2), rank - 1)
        return KernelDims(reduction, (rank - 2,), rule=f"linen {kind}, transposed")
    if isinstance(layer, nn.ConvLocal):
        # Every position has weights of its own, so a unit is a place and a feature.
        output = (*range(rank - 2), rank - 1)
        return KernelDims((rank - 2,), output, rule=f"linen {kind}")
    if isinstance(layer, (nn.Dense, nn.Conv, nn.ConvTranspose)) or rank == 2:
        return last_axis_is_output(rank, f"linen {kind}")
    return f"belongs to a linen {kind}, which module_dims does not know"


def _unknown_axes(path: KeyPath, leaf: Any, reason: str) -> str:
    return (
        f"{jax.tree_util.keystr(path)} of shape {np.shape(leaf)} {reason}; give its "
        f"axes with override_dims({{{'/'.join(path_names(path))!r}: "
        "KernelDims(...)}, module_dims(model, ...))"
    )


@functools.cache
def _box_type() -> Any:
    """The box's class; flax is imported no earlier than a model is given."""
    from flax import struct
    from flax.core import meta

    @struct.dataclass
    class KernelBox(meta.AxisMetadata):
        """A kernel with its roles, which lifted transformations keep up to date."""

        value: Any
        dims: Any = struct.field(pytree_node=False)

        def unbox(self):
            return self.value

        def replace_boxed(self, val):
            return dataclasses.replace(self, value=val)

        def add_axis(self, index, params):
            if not isinstance(self.dims, KernelDims):
                return self
            rule = self.dims.rule.removesuffix(", stacked") + ", stacked"
            stacked = self.dims.stacked(index).with_rule(rule)
            return dataclasses.replace(self, dims=stacked)

        def remove_axis(self, index, params):
            if not isinstance(self.dims, KernelDims):
                return self
            return dataclasses.replace(self, dims=self.dims.unstacked(index))

    return KernelBox
