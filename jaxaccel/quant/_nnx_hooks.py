"""Quantization of Flax NNX modules: attached to their layers, and taken off again."""

from collections.abc import Iterable
from typing import Any

import jax
from flax import nnx

from jaxaccel.quant._layer import initial, quantize_input, quantize_kernel, watch
from jaxaccel.quant._learned import lsq_init
from jaxaccel.quant._policy import LayerPolicy, LayerRule, Rules

# The operation of each kind of layer, an attribute that is called with the layer's
# input and its kernel.
_OPERATIONS: dict[type, str] = {
    nnx.Conv: "conv_general_dilated",
    nnx.Linear: "dot_general",
    nnx.LinearGeneral: "dot_general",
}


class QuantStat(nnx.Variable):
    """What the observer of a layer's input knows; part of the model's state."""


class Quantizer(nnx.Module):
    """Takes the place of a layer's operation; `attach` makes them.

    Attributes:
      rule: How the layer is quantized.
      stats: The observer's state, `QuantStat` variables; none without activations.
      scale: The kernel's scale, an `nnx.Param`, where it is learned; else None.
      use_running_average: Whether the range is frozen; `model.eval()` sets it, and
        `model.train()` takes it back, as for batch normalization.
      observing: Whether it only watches, and quantizes nothing.
    """

    def __init__(self, layer: Any, rule: LayerRule):
        self.operation, self.rule = getattr(layer, _operation_of(layer)), rule
        kernel = layer.kernel[...]
        self.use_running_average = False
        self.observing = False
        self.observer = rule.make_observer()
        leaves, self.structure = [], None
        if self.observer is not None:
            state = initial(self.observer, _features(layer))
            leaves, self.structure = jax.tree.flatten(state)
        self.stats = nnx.List([QuantStat(leaf) for leaf in leaves])
        scale = None
        if rule.learned and rule.weight is not None:
            scale = nnx.Param(lsq_init(kernel, rule.weight))
        self.scale = nnx.data(scale)

    def __call__(self, x: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        """Quantizes the layer's input and kernel, and calls the operation."""
        if self.observer is not None:
            if self.observing or not self.use_running_average:
                self._set(watch(x, self.observer, self._state()))
            if not self.observing:
                x = quantize_input(x, self.observer, self._state())
        if not self.observing:
            scale = None if self.scale is None else self.scale[...]
            kernel = quantize_kernel(kernel, self.rule, scale)
        # LinearGeneral has None for the usual one.
        operation = jax.lax.dot_general if self.operation is None else self.operation
        return operation(x, kernel, *args, **kwargs)

    def range(self) -> tuple[jax.Array, jax.Array]:
        """Returns the least and the largest input, as the observer has it."""
        if self.observer is None:
            raise ValueError("the layer's input is not observed: activation=None")
        return self.observer.range(self._state())

    def check_range(self, path: str) -> None:
        """Raises ValueError if what was observed makes no scale."""
        if self.observer is None or not self._state().count:
            return
        try:
            self.observer.qparams(self._state())
        except ValueError as error:
            raise ValueError(f"{path or 'the model'}: {error}") from error

    def _state(self) -> Any:
        return jax.tree.unflatten(self.structure, [stat[...] for stat in self.stats])

    def _set(self, state: Any) -> None:
        for stat, leaf in zip(self.stats, jax.tree.leaves(state), strict=True):
            stat[...] = leaf


def attach(model: Any, policy: LayerPolicy = LayerRule()) -> Any:  # noqa: B008
    """Returns a copy of an NNX model whose layers quantize input and kernel.

    The layers are those of `nnx.Conv` (depthwise too), `nnx.Linear` and
    `nnx.LinearGeneral`. The gradient passes straight through, so that the copy trains
    as the model does: `jaxaccel.train.from_nnx(attach(model), loss)` makes a task of
    quantization-aware training, with the observers in its `model_state`. In training
    mode they are updated; `model.eval()` freezes them. Fold batch normalization before
    post-training quantization; train with it unfolded, since a folded one would
    normalize anew in training mode.

    After training, or after `calibrate`, the copy in evaluation mode is what
    `lower_integer` takes.

    Args:
      model: An `nnx.Module`; it is not changed.
      policy: A `LayerRule` for all layers, or rules by patterns of the layers' paths,
        such as `{"head": None, "": LayerRule()}`; the first that fits counts.

    Returns:
      The copy.

    Raises:
      TypeError: If it is no NNX module, or a rule is of another kind.
      ValueError: If a rule fits no layer, or a layer is quantized already.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxaccel import quant
      >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> model.kernel[...] = jnp.array([[1.0], [0.3]])
      >>> rule = quant.LayerRule(weight=quant.QuantSpec(bits=2, symmetric=True),
      ...                        activation=None)
      >>> print(quant.attach(model, rule)(jnp.array([[1.0, 10.0]])), model.kernel[1, 0])
      [[1.]] 0.3
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be an nnx.Module; got {type(model).__name__}")
    result, rules, paths = nnx.clone(model), Rules(policy, LayerRule), []
    for path, layer in list(_layers(result)):
        paths.append(path)
        rule = rules.find(path)
        if rule is None:
            continue
        name = _operation_of(layer)
        if isinstance(getattr(layer, name), Quantizer):
            raise ValueError(
                f"{path or 'the model'} is quantized already; detach first"
            )
        if getattr(layer, "dot_general_cls", None) is not None:
            raise ValueError(
                f"{path or 'the model'} has a dot_general_cls, which takes precedence "
                "over a quantizer; use dot_general"
            )
        setattr(layer, name, nnx.data(Quantizer(layer, rule)))
    rules.check_all_used(paths)
    return result


def detach(model: Any) -> Any:
    """Returns a copy of a model without what `attach` did.

    Args:
      model: An `nnx.Module`.

    Returns:
      The copy, with the weights as they are now.

    Raises:
      TypeError: If it is no NNX module.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"model must be an nnx.Module; got {type(model).__name__}")
    result = nnx.clone(model)
    for _, layer in list(_layers(result)):
        name = _operation_of(layer)
        operation = getattr(layer, name)
        if isinstance(operation, Quantizer):
            setattr(layer, name, nnx.static(operation.operation))
    return result


def calibrate(model: Any, batches: Iterable[Any]) -> Any:
    """Returns a copy of an attached model whose observers have seen the batches.

    The batches run through the floating model in evaluation mode, jitted; then ranges
    are frozen: post-training quantization.

    Args:
      model: From `attach`.
      batches: Inputs, as the model is called with; a tuple for several arguments.

    Returns:
      The copy in evaluation mode.

    Raises:
      ValueError: If there is no batch, nothing to calibrate, or the range of a layer
        is not finite.

    Examples:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxaccel import quant
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> rule = quant.LayerRule(observer=quant.minmax)
      >>> watched = quant.attach(model, rule)
      >>> ready = quant.calibrate(watched, [jnp.array([[-1.0, 1.55]])])
      >>> print(ready.dot_general.range())
      (Array(-1., dtype=float32), Array(1.55, dtype=float32))
    """
    result = nnx.clone(model)
    quantizers = [m for _, m in nnx.iter_modules(result) if isinstance(m, Quantizer)]
    if not any(quantizer.observer for quantizer in quantizers):
        raise ValueError("the model quantizes no activations; attach a policy first")
    result.eval()
    for quantizer in quantizers:
        quantizer.observing = True
    graph, state = nnx.split(result)

    @jax.jit
    def see(state: Any, arguments: tuple) -> Any:
        module = nnx.merge(graph, state)
        module(*arguments)
        return nnx.state(module)

    count = 0
    for batch in batches:
        state, count = see(state, batch if isinstance(batch, tuple) else (batch,)), 1
    if not count:
        raise ValueError("there is no calibration batch; give at least one")
    result = nnx.merge(graph, state)
    for path, module in nnx.iter_modules(result):
        if isinstance(module, Quantizer):
            module.observing = False
            module.check_range("/".join(map(str, path[:-1])))
    return result


def _layers(model: Any) -> Iterable[tuple[str, Any]]:
    for path, module in nnx.iter_modules(model):
        if isinstance(module, tuple(_OPERATIONS)):
            yield "/".join(map(str, path)), module


def _operation_of(layer: Any) -> str:
    return next(name for kind, name in _OPERATIONS.items() if isinstance(layer, kind))


def _features(layer: Any) -> int:
    """Length of the last axis of a layer's input."""
    features = layer.in_features
    if isinstance(features, int):
        return features
    return features[layer.axis.index(-1) if -1 in layer.axis else -1]
