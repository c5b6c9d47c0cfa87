"""A resolver that reads the layouts off a Flax model."""

import itertools
from typing import Any

import jax
import numpy as np

from jaxaccel.transforms._dims import KernelDims, KeyPath, Resolver, path_names
from jaxaccel.transforms._flax_dims import flax_dims
from jaxaccel.transforms._linen_dims import linen_dims


def module_dims(model: Any, *inputs: Any, **kwargs: Any) -> Resolver:
    """Returns a resolver that knows the layers of a Flax model.

    Reads Dense and Linear, DenseGeneral and LinearGeneral (and with them
    attention), Conv, ConvTranspose, both kernel forms, and Linen's ConvLocal.
    Stacked layers have a batch axis: of an NNX model it is the axis more than
    the layer itself has, as `nnx.vmap` adds for `nnx.scan`; a Linen model is
    initialized abstractly, and `nn.scan` and `nn.vmap` say themselves where
    they stack. Kernels of an Einsum are an error that names the remedy; other
    leaves are resolved as `flax_dims` does.

    Args:
        model: an `nnx.Module` or `linen.Module`; only its structure is read,
            nothing is kept.
        *inputs: of a Linen model, what `model.init` takes after the key; arrays
            or `jax.ShapeDtypeStruct`, nothing is computed. None for NNX.
        **kwargs: more of them; `method` is allowed.

    Returns:
        A resolver for the parameters of this model, as `nnx.state` gives
        them, or `nnx.to_pure_dict` of those; of a Linen model
        `variables["params"]`, or a dict with that key. A kernel at a path that
        the model does not have is an error.

    Raises:
        TypeError: the model is no Flax module; a Linen model without inputs;
            an NNX model with inputs.
        ValueError: it is not evident which axis of a kernel is the stacked one.

    Examples:
        >>> import jax
        >>> from flax import nnx
        >>> from jaxaccel.transforms import module_dims
        >>> up = nnx.ConvTranspose(8, 4, (3, 3), transpose_kernel=True,
        ...                        rngs=nnx.Rngs(0))
        >>> params = nnx.to_pure_dict(nnx.state(up, nnx.Param))
        >>> jax.tree_util.tree_map_with_path(module_dims(up), params)["kernel"]
        KernelDims(reduction=(0, 1, 3), output=(2,), batch=())

        Of a Linen model, with a batch that it takes:

        >>> from flax import linen as nn
        >>> module, x = nn.DenseGeneral((2, 4)), jax.ShapeDtypeStruct((1, 8), "float32")
        >>> params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
        >>> dims = module_dims(module, x)
        >>> jax.tree_util.tree_map_with_path(dims, params)["kernel"]
        KernelDims(reduction=(0,), output=(1, 2), batch=())
    """
    from flax import linen, nnx

    if isinstance(model, linen.Module):
        if not (inputs or kwargs):
            raise TypeError(
                "a Linen module holds no parameters: give what its init takes after "
                f"the key, module_dims({type(model).__name__}(...), *inputs)"
            )
        return linen_dims(model, *inputs, **kwargs)
    if not isinstance(model, nnx.Module):
        raise TypeError(
            "module_dims reads an nnx.Module or a linen.Module, got "
            f"{type(model).__name__}; use flax_dims, haiku_dims or torch_dims"
        )
    if inputs or kwargs:
        raise TypeError("module_dims of an nnx.Module takes nothing but the module")
    return _nnx_dims(model)


def _nnx_dims(model: Any) -> Resolver:
    from flax import nnx

    nodes = {tuple(map(str, path)): node for path, node in nnx.iter_graph(model)}
    variables = {path for path, node in nodes.items() if isinstance(node, nnx.Variable)}
    known: dict[tuple[str, ...], KernelDims] = {
        (*path, "kernel"): _layer_dims(path, node)
        for path, node in nodes.items()
        if isinstance(
            node, (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose)
        )
    }
    einsums = {p for p, node in nodes.items() if isinstance(node, nnx.Einsum)}

    def resolver(path: KeyPath, leaf: Any) -> KernelDims | None:
        names = path_names(path)
        if names in known:
            return known[names]
        if names[-1:] == ("kernel",) and names not in variables:
            raise ValueError(
                f"the model given to module_dims has no {jax.tree_util.keystr(path)}; "
                "give the parameters as nnx.state(model, nnx.Param) holds them"
            )
        if names[-1:] == ("kernel",) and names[:-1] in einsums:
            raise ValueError(
                f"{jax.tree_util.keystr(path)} of shape {np.shape(leaf)} belongs to an "
                "nnx.Einsum, whose axes mean what its equation says; give them with "
                f"override_dims({{{'/'.join(names)!r}: KernelDims(...)}}, "
                "module_dims(model))"
            )
        return flax_dims(path, leaf)

    return resolver


def _layer_dims(path: tuple[str, ...], layer: Any) -> KernelDims:
    shape, dims = _own_layout(layer)
    actual = tuple(layer.kernel.shape)
    rank = len(actual)
    stackings = [
        batch
        for batch in itertools.combinations(range(rank), rank - len(shape))
        if tuple(actual[axis] for axis in range(rank) if axis not in batch) == shape
    ]
    if len(stackings) != 1:
        raise ValueError(
            f"the kernel of {'/'.join(path)} has shape {actual}, a layer alone has "
            f"{shape}: which axis is stacked is not evident; use override_dims"
        )
    kept = [axis for axis in range(rank) if axis not in stackings[0]]
    return KernelDims(
        tuple(kept[axis] for axis in dims.reduction),
        tuple(kept[axis] for axis in dims.output),
        stackings[0] + tuple(kept[axis] for axis in dims.batch),
        rule=f"nnx {type(layer).__name__}{', stacked' if stackings[0] else ''}",
    )


def _own_layout(layer: Any) -> tuple[tuple[int, ...], KernelDims]:
    """Shape and roles of the kernel of one layer, before any stacking."""
    from flax import nnx

    if isinstance(layer, nnx.Linear):
        return (layer.in_features, layer.out_features), KernelDims((0,), (1,))
    if isinstance(layer, nnx.LinearGeneral):
        batch = tuple(layer.batch_axis.values())
        shape = batch + tuple(layer.in_features) + tuple(layer.out_features)
        fan_in = len(batch) + len(layer.in_features)
        axes = tuple(range(len(shape)))
        return shape, KernelDims(
            axes[len(batch) : fan_in], axes[fan_in:], axes[: len(batch)]
        )
    shape = tuple(layer.kernel_shape)
    transposed = isinstance(layer, nnx.ConvTranspose) and layer.transpose_kernel
    output = len(shape) - (2 if transposed else 1)
    reduction = tuple(axis for axis in range(len(shape)) if axis != output)
    return shape, KernelDims(reduction, (output,))
