"""Batch normalization folded into the layer before it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxaccel.quant._qparams import is_concrete

Pairs = Sequence[tuple[str, str]] | Mapping[str, str]


def fold_batch_norm(
    kernel: ArrayLike,
    bias: ArrayLike | None,
    scale: ArrayLike | None,
    offset: ArrayLike | None,
    mean: ArrayLike,
    var: ArrayLike,
    *,
    eps: float = 1e-5,
) -> tuple[jax.Array, jax.Array]:
    r"""Returns kernel and bias of a layer that includes the normalization after it.

    .. math:: k' = k \, \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}, \qquad
        b' = \beta + (b - \mu)\, \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}}

    along the last axis, the output channels of every kernel of Flax, depthwise ones
    included; only `ConvTranspose(transpose_kernel=True)` has its inputs there.

    Args:
      kernel: `(..., channels)`.
      bias: `(channels,)`, or None for 0.
      scale: :math:`\gamma`, or None for 1.
      offset: :math:`\beta`, or None for 0.
      mean: Running mean.
      var: Running variance.
      eps: As the normalization has it; Flax's default is 1e-5.

    Returns:
      Kernel in its own dtype and bias, both computed in float32.

    Raises:
      ValueError: If a shape is not `(channels,)`, or a variance is negative.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> kernel, bias = quant.fold_batch_norm(
      ...     np.array([[1.0, 2.0]]), None, np.array([3.0, 3.0]), None,
      ...     np.array([1.0, 0.0]), np.array([0.25, 4.0]), eps=0.0)
      >>> print(kernel, bias)
      [[6. 3.]] [-6.  0.]

    References:
      Jacob et al., 2018, arXiv:1712.05877, section 3.2
    """
    channels = np.shape(kernel)[-1:]
    named = dict(bias=bias, scale=scale, offset=offset, mean=mean, var=var)
    for name, value in named.items():
        if value is not None and np.shape(value) != channels:
            raise ValueError(
                f"{name} must be of shape {channels}, the kernel's last axis; got "
                f"{np.shape(value)}"
            )
    if is_concrete(var) and (np.asarray(var) < 0).any():
        raise ValueError(f"var must not be negative; got {np.asarray(var).min()}")

    def wide(value: ArrayLike | None, otherwise: float) -> jax.Array:
        if value is None:
            return jnp.full(channels, otherwise, jnp.float32)
        return jnp.asarray(value, jnp.float32)

    factor = wide(scale, 1.0) / jnp.sqrt(wide(var, 1.0) + np.float32(eps))
    rank = np.ndim(kernel)
    spread = factor.reshape((1,) * (rank - 1) + (-1,))
    folded = jnp.asarray(kernel, jnp.float32) * spread
    shift = wide(offset, 0.0) + (wide(bias, 0.0) - wide(mean, 0.0)) * factor
    dtype = jnp.result_type(kernel)
    return folded.astype(dtype if dtype != np.float64 else jnp.float32), shift


def fold_batch_norms(model: Any, pairs: Pairs, *, eps: float | None = None) -> Any:
    """Folds the batch normalizations of a model into the layers before them.

    The structure stays as it is, so that the same code runs the result: each
    normalization becomes the identity (scale 1, mean 0, and a variance of 1 less its
    epsilon), and keeps the offset if the layer before has no bias.

    Args:
      model: An `nnx.Module`, of which a copy is returned; or linen variables, a dict
        with `"params"` and `"batch_stats"`.
      pairs: Paths of layer and normalization, such as `("convs/0", "norms/0")`: the
        output of one must go nowhere else than into the other.
      eps: Epsilon of linen's normalizations, 1e-5 by default; NNX modules know theirs.

    Returns:
      The model in evaluation mode, or the variables, with the same outputs in
      evaluation mode, but for rounding.

    Raises:
      TypeError: If `model` is of another kind.
      ValueError: If a path leads to no such layer, or shapes do not fit.

    Examples:
      >>> import jax.numpy as jnp, numpy as np
      >>> from flax import nnx
      >>> from jaxaccel import quant
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.dense = nnx.Linear(2, 2, rngs=rngs)
      ...         self.norm = nnx.BatchNorm(2, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.norm(self.dense(x))
      >>> net = Net(nnx.Rngs(0))
      >>> _ = net(jnp.array([[1.0, 2.0], [3.0, 5.0]]))  # running statistics
      >>> net.eval()
      >>> folded = quant.fold_batch_norms(net, [("dense", "norm")])
      >>> x = jnp.ones((1, 2))
      >>> bool(jnp.allclose(folded(x), net(x), atol=1e-5)), folded.norm.mean[...]
      (True, Array([0., 0.], dtype=float32))
    """
    pairs = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
    if isinstance(model, Mapping):
        return _fold_variables(model, pairs, 1e-5 if eps is None else eps)
    from flax import nnx

    if not isinstance(model, nnx.Module):
        raise TypeError(
            "model must be an nnx.Module or a dict of linen variables; got "
            f"{type(model).__name__}"
        )
    return _fold_module(nnx.clone(model), pairs)


def _fold_module(model: Any, pairs: list[tuple[str, str]]) -> Any:
    for layer_path, norm_path in pairs:
        layer, norm = _at(model, layer_path), _at(model, norm_path)
        for path, found, names in (
            (layer_path, layer, ("kernel",)),
            (norm_path, norm, ("mean", "var")),
        ):
            if not all(hasattr(found, name) for name in names):
                raise ValueError(
                    f"{path} is a {type(found).__name__}, without {' and '.join(names)}"
                )
        if getattr(layer, "transpose_kernel", False):
            raise ValueError(
                f"{layer_path} has transpose_kernel=True: the last axis of its kernel "
                "is not that of the output"
            )
        kernel, bias = fold_batch_norm(
            layer.kernel[...],
            _value(layer.bias),
            _value(norm.scale),
            _value(norm.bias),
            norm.mean[...],
            norm.var[...],
            eps=norm.epsilon,
        )
        layer.kernel[...] = kernel
        if layer.bias is not None:
            layer.bias[...] = bias
            bias = jnp.zeros_like(bias)
        elif norm.bias is None:
            raise ValueError(
                f"neither {layer_path} nor {norm_path} has a bias to fold into"
            )
        if norm.bias is not None:
            norm.bias[...] = bias
        if norm.scale is not None:
            norm.scale[...] = jnp.ones_like(norm.scale[...])
        norm.mean[...] = jnp.zeros_like(norm.mean[...])
        norm.var[...] = jnp.full_like(norm.var[...], 1 - norm.epsilon)
    model.eval()
    return model


def _fold_variables(
    variables: Mapping[str, Any], pairs: list[tuple[str, str]], eps: float
) -> dict[str, Any]:
    result = jax.tree.map(lambda x: x, dict(variables))
    for layer_path, norm_path in pairs:
        layer = _in(result, "params", layer_path, ("kernel",))
        norm = _in(result, "params", norm_path, ())
        stats = _in(result, "batch_stats", norm_path, ("mean", "var"))
        kernel, bias = fold_batch_norm(
            layer["kernel"],
            layer.get("bias"),
            norm.get("scale"),
            norm.get("bias"),
            stats["mean"],
            stats["var"],
            eps=eps,
        )
        layer["kernel"] = kernel
        if "bias" in layer:
            layer["bias"], bias = bias, jnp.zeros_like(bias)
        elif "bias" not in norm:
            raise ValueError(
                f"neither {layer_path} nor {norm_path} has a bias to fold into"
            )
        if "bias" in norm:
            norm["bias"] = bias
        if "scale" in norm:
            norm["scale"] = jnp.ones_like(norm["scale"])
        stats["mean"] = jnp.zeros_like(stats["mean"])
        stats["var"] = jnp.full_like(stats["var"], 1 - eps)
    return result


def _value(variable: Any) -> Any:
    return None if variable is None else variable[...]


def _at(model: Any, path: str) -> Any:
    found = model
    for name in path.split("/"):
        try:
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path!r} leads to no layer: no {name!r} in {type(found).__name__}"
            ) from error
    return found


def _in(
    variables: dict[str, Any], collection: str, path: str, names: tuple[str, ...]
) -> dict[str, Any]:
    found: Any = variables.get(collection, {})
    for name in path.split("/"):
        if not isinstance(found, Mapping) or name not in found:
            raise ValueError(f"{path!r} leads to no layer in {collection!r}")
        found = found[name]
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path!r} has no {missing[0]!r} in {collection!r}")
    return found
