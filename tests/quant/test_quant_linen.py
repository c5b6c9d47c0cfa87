"""Contexts around linen modules: which layers they reach, and what they leave alone."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxaccel import quant
from jaxaccel.quant import LayerRule, QuantSpec

MINMAX = LayerRule(observer=quant.minmax)
INT3 = QuantSpec(bits=3, symmetric=True, channel_axis=-1)
WEIGHTS = LayerRule(weight=INT3, activation=None)


class Block(nn.Module):
    """Layers made in setup, one of them called twice."""

    def setup(self):
        self.first = nn.Dense(6)
        self.shared = nn.Dense(6)

    def __call__(self, x):
        x = nn.relu(self.first(x))
        return self.shared(nn.relu(self.shared(x)))


class Attention(nn.Module):
    """Layers of layers: heads are kernels of rank three."""

    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(num_heads=2, name="attention")(x, x)


class Convolutions(nn.Module):
    """A dilated, a depthwise, a circular and a one-dimensional convolution."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), kernel_dilation=2, name="dilated")(x))
        x = nn.Conv(8, (3, 3), feature_group_count=4, name="depthwise")(x)
        x = nn.Conv(4, (3, 3), padding="CIRCULAR", name="circular")(x)
        x = x.reshape(x.shape[0], -1, 4)
        return nn.Conv(2, 3, strides=2, use_bias=False, name="line")(x)


class Rematerialized(nn.Module):
    """A layer that the backward pass computes anew."""

    @nn.compact
    def __call__(self, x):
        return nn.remat(nn.Dense)(3, name="dense")(x)


MODELS = {
    "setup": (Block(), (4, 5)),
    "attention": (Attention(), (2, 3, 8)),
    "convolutions": (Convolutions(), (2, 6, 6, 2)),
    "remat": (Rematerialized(), (4, 5)),
}


def _apply(model: Any, variables: Any, x: Any, **options) -> Any:
    return model.apply(variables, x, **options)


def _made(name, rng) -> Any:
    model, shape = MODELS[name]
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return model, model.init(jax.random.key(0), x), x


@pytest.mark.parametrize("name", MODELS)
def test_weights_alone_are_those_of_the_tree(name, rng):
    model, variables, x = _made(name, rng)
    policy = {"kernel": INT3}
    with quant.fake_quantize(WEIGHTS):
        found = _apply(model, variables, x)
    wanted = _apply(model, quant.fake_quant_params(variables, policy), x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(found - _apply(model, variables, x)).max() > 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_a_trace_shows_two_quantizers_a_call_and_takes_the_gradient(name, rng):
    model, variables, x = _made(name, rng)
    with quant.observe(MINMAX):
        _, stats = _apply(model, variables, x, mutable=["quant_stats"])
    with quant.fake_quantize(MINMAX):
        run = functools.partial(_apply, model)
        trace = str(jax.make_jaxpr(run)({**variables, **stats}, x))
        grads = jax.grad(lambda v: (run({**v, **stats}, x) ** 2).sum())(variables)
    calls = {"setup": 3, "attention": 4, "convolutions": 4, "remat": 1}[name]
    assert trace.count("= fake_quant[") == 2 * calls
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        # Attention does not change with what all keys have in common.
        if "key" not in jax.tree_util.keystr(path):
            assert float(jnp.abs(grad).max()) > 0, path


def test_a_layer_called_twice_observes_both_inputs(rng):
    model, variables, x = _made("setup", rng)
    with quant.observe(MINMAX):
        _, updated = _apply(model, variables, x, mutable=["quant_stats"])
    stats = updated["quant_stats"]
    assert int(stats["shared"]["input"].count) == 2
    assert int(stats["first"]["input"].count) == 1
    assert stats["first"]["input"].hi == x.max()


def test_init_inside_makes_states_that_have_seen_nothing(rng):
    model, variables, x = _made("setup", rng)
    with quant.fake_quantize(MINMAX):
        inside = model.init(jax.random.key(0), x)
    assert int(inside["quant_stats"]["shared"]["input"].count) == 0
    jax.tree.map(np.testing.assert_array_equal, inside["params"], variables["params"])


@pytest.mark.parametrize("axis", [None, -1])
def test_inputs_may_have_a_scale_for_each_feature(axis, rng):
    spec = QuantSpec(bits=4, channel_axis=axis)
    rule = LayerRule(weight=None, activation=spec, observer=quant.minmax)
    x = rng.normal(size=(6, 5)).astype(np.float32) * np.arange(1, 6, dtype=np.float32)
    model = nn.Dense(3)
    variables = model.init(jax.random.key(0), x)
    with quant.observe(rule):
        _, stats = _apply(model, variables, x, mutable=["quant_stats"])
    with quant.fake_quantize(rule):
        found = _apply(model, {**variables, **stats}, x)
    rounded = quant.QTensor.of(x, spec).dequantize()
    np.testing.assert_allclose(found, _apply(model, variables, rounded), rtol=1e-5)


OBSERVERS = {
    "ema": quant.ema_minmax,
    "percentile": functools.partial(quant.percentile, percent=99.0),
    "mse": quant.mse_range,
}


@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_any_observer_finds_the_range(observer, rng):
    rule = LayerRule(activation=QuantSpec(bits=4), observer=observer)
    x = jnp.asarray(rng.normal(size=(64, 5)), jnp.float32)
    model = nn.Dense(3)
    variables = model.init(jax.random.key(0), x)
    alone = observer(rule.activation)
    state = alone.init(x.shape)
    with quant.observe(rule):
        for batch in (x[:32], x[32:]):
            state = alone.update(state, batch)
            _, updated = _apply(model, variables, batch, mutable=["quant_stats"])
            variables = {**variables, **updated}
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        variables["quant_stats"]["input"],
        state,
    )


def test_calibration_quantizes_nothing(rng):
    model, variables, x = _made("convolutions", rng)
    with quant.observe(MINMAX):
        y, _ = _apply(model, variables, x, mutable=["quant_stats"])
    np.testing.assert_array_equal(y, _apply(model, variables, x))


def test_the_context_ends_with_an_error_as_well(rng):
    model, variables, x = _made("setup", rng)
    with pytest.raises(KeyError, match="own"), quant.fake_quantize(WEIGHTS):
        raise KeyError("own")
    wanted = _apply(model, variables, x)
    with quant.fake_quantize(WEIGHTS):
        assert not np.array_equal(_apply(model, variables, x), wanted)
    np.testing.assert_array_equal(_apply(model, variables, x), wanted)


def test_an_input_passed_by_name_is_quantized_too(rng):
    class ByName(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3, name="dense")(inputs=x)

    x = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    with quant.fake_quantize(MINMAX):
        variables = ByName().init(jax.random.key(0), x)
        found, _ = _apply(ByName(), variables, x, mutable=["quant_stats"])
        plain = {name: tree["dense"] for name, tree in variables.items()}
        wanted, _ = _apply(nn.Dense(3), plain, x, mutable=["quant_stats"])
    np.testing.assert_array_equal(found, wanted)


def test_annotated_kernels_are_quantized(rng):
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
    x = jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)
    model = nn.Dense(3, kernel_init=init)
    learned = LayerRule(weight=INT3, activation=None, learned=True)
    for rule in (WEIGHTS, learned):
        with quant.fake_quantize(rule):
            variables = model.init(jax.random.key(0), x)
            found = _apply(model, variables, x)
            plain = _apply(model, nn.meta.unbox(variables), x)
        np.testing.assert_array_equal(found, plain)


def test_learned_scales_of_trained_weights_are_made_where_params_is_mutable(rng):
    model, variables, x = _made("setup", rng)
    rule = LayerRule(weight=INT3, activation=None, learned=True)
    with quant.fake_quantize(rule):
        with pytest.raises(ValueError, match="'first' has no kernel_scale.*mutable"):
            _apply(model, variables, x)
        _, updated = _apply(model, variables, x, mutable=["params"])
        kernel = variables["params"]["first"]["kernel"]
        np.testing.assert_array_equal(
            updated["params"]["first"]["kernel_scale"],
            quant.lsq_init(kernel, INT3),
        )
        found = _apply(model, updated, x)
    assert np.isfinite(found).all()
    # Without the context the scales are no hindrance.
    np.testing.assert_array_equal(
        _apply(model, updated, x), _apply(model, variables, x)
    )


def test_ranges_never_observed_are_an_error(rng):
    model, _, x = _made("setup", rng)
    with quant.fake_quantize(MINMAX):
        variables = model.init(jax.random.key(0), x)
        with pytest.raises(ValueError, match="never updated"):
            _apply(model, variables, x)
