"""Quantizers attached to NNX models, calibrated, trained, and taken off again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxaccel import quant
from jaxaccel.quant import LayerRule, QuantSpec

MINMAX = LayerRule(observer=quant.minmax)
WEIGHTS = LayerRule(
    weight=QuantSpec(bits=3, symmetric=True, channel_axis=-1), activation=None
)


class Net(nnx.Module):
    """Normalization and dropout between a depthwise convolution and a head."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 8, (3, 3), feature_group_count=4, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.heads = nnx.List([nnx.Linear(8, 3, rngs=rngs)])

    def __call__(self, x, offset=0.0):
        x = self.dropout(nnx.relu(self.norm(self.conv(x))))
        return self.heads[0](x.mean(axis=(1, 2))) + offset


def _net(rng) -> Any:
    model = Net(nnx.Rngs(0))
    return model, jnp.asarray(rng.normal(size=(4, 5, 5, 4)), jnp.float32)


def _stats(model):
    return jax.tree.map(np.array, nnx.state(model, nnx.Not(nnx.RngState)))


def test_neither_attaching_nor_calibrating_changes_the_model(rng):
    model, x = _net(rng)
    before, graph = _stats(model), nnx.graphdef(model)
    ready = quant.calibrate(quant.attach(model, MINMAX), [x])
    jax.tree.map(np.testing.assert_array_equal, _stats(model), before)
    assert nnx.graphdef(model) == graph
    # Running averages and weights are those from before the calibration.
    np.testing.assert_array_equal(ready.norm.mean[...], before["norm"]["mean"][...])
    assert ready.dropout.deterministic and ready.norm.use_running_average


def test_detached_it_is_the_model_again(rng):
    model, x = _net(rng)
    bare = quant.detach(quant.attach(model, MINMAX))
    assert nnx.graphdef(bare) == nnx.graphdef(model)
    jax.tree.map(np.testing.assert_array_equal, _stats(bare), _stats(model))


def test_weights_alone_are_those_of_the_tree(rng):
    model, x = _net(rng)
    model.eval()
    graph, state = nnx.split(model)
    faked = quant.fake_quant_params(state, {"kernel": WEIGHTS.weight})
    wanted = nnx.merge(graph, faked)(x)
    found = quant.attach(model, WEIGHTS)
    np.testing.assert_allclose(found(x), wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(wanted - model(x))).max() > 1e-3
    with pytest.raises(ValueError, match="quantizes no activations"):
        quant.calibrate(found, [x])


def test_a_batch_may_be_several_arguments(rng):
    model, x = _net(rng)
    watched = quant.attach(model, MINMAX)
    one, several = (
        quant.calibrate(watched, batches) for batches in ([x], [(x, np.float32(2))])
    )
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), *map(_stats, (one, several)))
    )


def test_what_calibration_data_must_not_hold(rng):
    model, x = _net(rng)
    watched = quant.attach(model, MINMAX)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match=f"conv.*must be finite; got {bad}"):
            quant.calibrate(watched, [x, x.at[0, 0, 0, 0].set(bad)])


def test_ready_models_run_inside_jit_and_compile_once(rng):
    model, x = _net(rng)
    ready = quant.calibrate(quant.attach(model, MINMAX), [x])
    traces = []

    @nnx.jit
    def run(model, x):
        traces.append(1)
        return model(x)

    np.testing.assert_allclose(run(ready, x), ready(x), rtol=1e-5, atol=1e-6)
    run(ready, 2 * x)
    assert len(traces) == 1
    trace = str(jax.make_jaxpr(ready)(x))
    assert trace.count("= fake_quant[") == 4


def test_training_mode_observes_inside_jit(rng):
    model, x = _net(rng)
    watched = quant.attach(model, MINMAX)
    watched.train()
    nnx.jit(lambda model, x: model(x))(watched, x)
    lo, hi, count = (s[...] for s in watched.conv.conv_general_dilated.stats)
    assert (lo, hi, count) == (x.min(), x.max(), 1)


HEADS = {
    "linear": lambda rngs: nnx.Linear(4, 3, rngs=rngs),
    "heads": lambda rngs: nnx.LinearGeneral(4, (2, 3), rngs=rngs),
    "two axes": lambda rngs: nnx.LinearGeneral((2, 4), (5,), axis=(-2, -1), rngs=rngs),
    "depthwise": lambda rngs: nnx.Conv(4, 8, 3, feature_group_count=4, rngs=rngs),
    "grouped": lambda rngs: nnx.Conv(4, 6, 3, feature_group_count=2, rngs=rngs),
}


@pytest.mark.parametrize("make", HEADS.values(), ids=HEADS)
def test_inputs_may_have_a_scale_for_each_feature(make, rng):
    spec = QuantSpec(bits=4, channel_axis=-1)
    rule = LayerRule(weight=None, activation=spec, observer=quant.minmax)
    x = rng.normal(size=(6, 2, 4)) * np.array([1, 2, 4, 8])
    x = jnp.asarray(x, jnp.float32)
    layer = make(nnx.Rngs(0))
    ready = quant.calibrate(quant.attach(layer, rule), [x])
    rounded = quant.QTensor.of(x, spec).dequantize()
    np.testing.assert_allclose(ready(x), layer(rounded), rtol=1e-5, atol=1e-6)


def test_attention_is_that_of_linen(rng):
    x = jnp.asarray(rng.normal(size=(2, 3, 8)), jnp.float32)
    linen = nn.MultiHeadDotProductAttention(num_heads=2)
    params: Any = linen.init(jax.random.key(0), x, x)["params"]
    model = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    for name, layer in params.items():
        getattr(model, name).kernel[...] = layer["kernel"]
        getattr(model, name).bias[...] = layer["bias"]
    rule = LayerRule(activation=QuantSpec(bits=4), observer=quant.minmax)
    ready = quant.calibrate(quant.attach(model, rule), [x])
    variables = {"params": params}
    with quant.observe(rule):
        _, stats = linen.apply(variables, x, x, mutable=["quant_stats"])
    with quant.fake_quantize(rule):
        wanted: Any = linen.apply({**variables, **stats}, x, x)
    np.testing.assert_allclose(ready(x), wanted, rtol=1e-5, atol=1e-5)
    plain: Any = linen.apply(variables, x, x)
    assert np.abs(wanted - plain).max() > 1e-3


def test_layers_of_half_precision_are_those_of_linen(rng):
    x = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
    linen, half = nn.Dense(3, dtype=jnp.bfloat16), jnp.bfloat16
    variables: Any = linen.init(jax.random.key(0), x)
    model = nnx.Linear(4, 3, dtype=half, rngs=nnx.Rngs(0))
    model.kernel[...] = variables["params"]["kernel"]
    ready = quant.calibrate(quant.attach(model, MINMAX), [x])
    with quant.observe(MINMAX):
        _, stats = linen.apply(variables, x, mutable=["quant_stats"])
    with quant.fake_quantize(MINMAX):
        wanted: Any = linen.apply({**variables, **stats}, x)
    found = ready(x)
    assert found.dtype == wanted.dtype == half
    np.testing.assert_array_equal(found, wanted)
    assert float(ready.dot_general.range()[1]) == float(x.astype(half).max())


def test_histograms_are_states_as_well(rng):
    observer = functools.partial(quant.percentile, percent=90.0)
    rule = LayerRule(observer=observer)
    model, x = _net(rng)
    ready = quant.calibrate(quant.attach(model, rule), [x[:2], x[2:]])
    top = ready.conv.conv_general_dilated.range()[1]
    ordered = np.sort(np.asarray(x).ravel())
    assert ordered[int(0.85 * x.size)] < top < ordered[-1]


def test_layers_without_activations_have_no_state(rng):
    model, _ = _net(rng)
    watched = quant.attach(model, {"conv": WEIGHTS, "heads": None})
    assert not jax.tree.leaves(nnx.state(watched, quant.QuantStat))
    assert isinstance(watched.conv.conv_general_dilated, quant.Quantizer)
    assert not isinstance(watched.heads[0].dot_general, quant.Quantizer)


def test_paths_of_layers_in_lists_are_named(rng):
    model, _ = _net(rng)
    with pytest.raises(ValueError, match="'head/0' fits nothing.*conv, heads/0"):
        quant.attach(model, {"head/0": MINMAX})
    with pytest.raises(ValueError, match="conv is quantized already"):
        quant.attach(quant.attach(model, {"conv": MINMAX}), MINMAX)


def test_what_is_no_model_is_refused():
    for function in (quant.attach, quant.detach):
        with pytest.raises(TypeError, match="model must be an nnx.Module; got dict"):
            function({})
