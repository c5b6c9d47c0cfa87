"""Quantization of Flax linen modules, by contexts around `init` and `apply`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta

from jaxaccel.quant._layer import initial, quantize_input, quantize_kernel, watch
from jaxaccel.quant._learned import lsq_init
from jaxaccel.quant._policy import LayerPolicy, LayerRule, Rules

COLLECTION = "quant_stats"
_LAYERS = (nn.Conv, nn.Dense, nn.DenseGeneral)


@contextlib.contextmanager
def fake_quantize(policy: LayerPolicy = LayerRule()) -> Iterator[None]:  # noqa: B008
    """Quantizes input and kernel of linen layers that are called inside.

    The layers are `nn.Conv` (depthwise too), `nn.Dense` and `nn.DenseGeneral`. The
    observers' states are the collection `"quant_stats"`: made by `init` inside the
    context, updated where `apply` has it in `mutable`, frozen otherwise. So
    `train.from_linen(module, loss, mutable=("batch_stats", "quant_stats"))`, with
    `init`, losses and steps called inside, is quantization-aware training; with jit it
    is tracing that has to be inside. The numbers are those of `attach` for NNX.

    Scales that are learned are parameters, `"kernel_scale"`: made by `init` too, or
    from trained weights by one `apply` with `mutable=["params", "quant_stats"]`, here
    or in `observe`.

    Args:
      policy: A `LayerRule` for all layers, or rules by patterns of the modules' paths.

    Raises:
      TypeError: If a rule is of another kind.
      ValueError: If a layer has no observed range or learned scale yet; when the
        context ends: if modules were called inside, but a rule fitted no layer.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from jaxaccel import quant
      >>> model, x = nn.Dense(1), jnp.array([[-1.0, 1.55]])
      >>> with quant.fake_quantize(quant.LayerRule(observer=quant.minmax)):
      ...     variables = model.init(jax.random.key(0), x)
      ...     y, updated = model.apply(variables, x, mutable=["quant_stats"])
      >>> print(updated["quant_stats"]["input"].hi)
      1.55
    """
    with _intercepting(policy, quantizing=True):
        yield


@contextlib.contextmanager
def observe(policy: LayerPolicy = LayerRule()) -> Iterator[None]:  # noqa: B008
    """Watches the inputs of linen layers and quantizes nothing: for calibration.

    Run calibration batches inside, in evaluation mode, with `mutable=["quant_stats"]`,
    and hand the updated collection from batch to batch.

    Args:
      policy: As for `fake_quantize`; use the same one there.

    Raises:
      TypeError: As `fake_quantize`.
      ValueError: As `fake_quantize`.
    """
    with _intercepting(policy, quantizing=False):
        yield


@contextlib.contextmanager
def _intercepting(policy: LayerPolicy, *, quantizing: bool) -> Iterator[None]:
    rules, paths = Rules(policy, LayerRule), []
    busy: list[bool] = []

    def intercept(next_call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        called = context.method_name == "__call__"
        if busy or not called or not isinstance(module, _LAYERS):
            return next_call(*args, **kwargs)
        path = "/".join(module.path)
        paths.append(path)
        rule = rules.find(path)
        if rule is None:
            return next_call(*args, **kwargs)
        busy.append(True)
        try:
            return _call(module, rule, next_call, args, kwargs, quantizing)
        finally:
            busy.pop()

    with nn.intercept_methods(intercept):
        yield
    if paths:
        rules.check_all_used(dict.fromkeys(paths))


def _call(
    module: Any,
    rule: LayerRule,
    next_call: Any,
    args: Any,
    kwargs: Any,
    quantizing: bool,
) -> Any:
    x, *rest = args or (kwargs["inputs"],)
    kwargs = {name: value for name, value in kwargs.items() if name != "inputs"}
    if module.is_initializing():
        result = next_call(x, *rest, **kwargs)
        _make_variables(module, rule, x)
        return result
    params: dict[str, Any] = meta.unbox(dict(module.variables["params"]))
    x, kernel = module.promote_dtype(x, params["kernel"], dtype=module.dtype)
    scale = _learned_scale(module, rule, params, needed=quantizing)
    observer = rule.make_observer()
    if observer is not None:
        stats = _stats(module, observer, x)
        if module.is_mutable_collection(COLLECTION):
            stats.value = watch(x, observer, stats.value)
        if quantizing:
            x = quantize_input(x, observer, stats.value)
    if not quantizing or rule.weight is None:
        return next_call(x, *rest, **kwargs)
    params["kernel"] = quantize_kernel(kernel, rule, scale)
    # A copy of the layer with the other kernel: what it is called with is traced, so
    # the gradient finds its way to the parameters.
    bare = module.clone(parent=None, name=None)
    return bare.apply({"params": params}, x, *rest, **kwargs)


def _make_variables(module: Any, rule: LayerRule, x: Any) -> None:
    observer = rule.make_observer()
    if observer is not None:
        _stats(module, observer, x)
    if rule.learned and rule.weight is not None:
        kernel, spec = meta.unbox(module.variables["params"]["kernel"]), rule.weight
        module.param("kernel_scale", lambda key: lsq_init(kernel, spec))


def _learned_scale(
    module: Any, rule: LayerRule, params: dict[str, Any], *, needed: bool
) -> Any:
    """Takes the scale out of the layer's parameters, and makes it if it may."""
    scale = params.pop("kernel_scale", None)
    if not rule.learned or rule.weight is None:
        return None
    if scale is None and module.is_mutable_collection("params"):
        scale = lsq_init(params["kernel"], rule.weight)
        module.put_variable("params", "kernel_scale", scale)
    if scale is None and needed:
        raise ValueError(
            f"layer {'/'.join(module.path)!r} has no kernel_scale to learn: init "
            'inside the context, or apply once with mutable=["params", '
            f"{COLLECTION!r}]"
        )
    return scale


def _stats(module: Any, observer: Any, x: Any) -> Any:
    known = module.has_variable(COLLECTION, "input")
    if not known and not module.is_mutable_collection(COLLECTION):
        raise ValueError(
            f"layer {'/'.join(module.path)!r} has no observed range: pass the "
            f"variables with the collection {COLLECTION!r} of a calibration, or "
            f"mutable=[{COLLECTION!r}]"
        )
    features = jax.numpy.shape(x)[-1]
    return module.variable(COLLECTION, "input", lambda: initial(observer, features))
