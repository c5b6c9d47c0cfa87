"""Trees and models: linen and NNX give the same numbers, and train."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxaccel import quant, train

RULE = quant.LayerRule(observer=quant.minmax)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), strides=2, name="conv")(x))
        x = nn.relu(nn.Conv(4, (3, 3), feature_group_count=4, name="depth")(x))
        return nn.Dense(3, name="head")(x.reshape(len(x), -1))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), strides=2, rngs=rngs)
        self.depth = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.head = nnx.Linear(36, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.depth(nnx.relu(self.conv(x))))
        return self.head(x.reshape(len(x), -1))


@pytest.fixture
def inputs(rng):
    return jnp.asarray(rng.normal(size=(8, 6, 6, 2)), jnp.float32)


def both(inputs):
    """The same weights in linen and in NNX."""
    linen, other = Linen(), Nnx(nnx.Rngs(0))
    params = linen.init(jax.random.key(1), inputs)["params"]
    for name, layer in params.items():
        getattr(other, name).kernel[...] = layer["kernel"]
        getattr(other, name).bias[...] = layer["bias"]
    return linen, params, other


def by_hand(params, x, ranges, rule):
    """Quantizers written out, for ranges of the inputs of each layer."""

    def layer(name, x):
        kernel = params[name]["kernel"]
        if rule.activation is not None:
            p = quant.compute_qparams(*ranges[name], rule.activation)
            x = quant.fake_quant(x, p, rule.activation)
        if rule.weight is not None:
            p = quant.array_qparams(kernel, rule.weight)
            kernel = quant.fake_quant(kernel, p, rule.weight)
        if name == "head":
            return x @ kernel + params[name]["bias"][None]
        strides, groups = (2, 1) if name == "conv" else (1, 4)
        y = jax.lax.conv_general_dilated(
            x,
            kernel,
            (strides, strides),
            "SAME",
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y + params[name]["bias"][None, None, None]

    x = nn.relu(layer("depth", nn.relu(layer("conv", x))))
    return layer("head", x.reshape(len(x), -1))


def float_ranges(params, x):
    seen = {}

    def layer(name, x):
        seen[name] = (x.min(), x.max())
        return by_hand_layer(params, name, x)

    y = nn.relu(layer("depth", nn.relu(layer("conv", x))))
    layer("head", y.reshape(len(y), -1))
    return seen


def by_hand_layer(params, name, x):
    plain = quant.LayerRule(weight=None, activation=None)
    if name == "head":
        return x @ params[name]["kernel"] + params[name]["bias"][None]
    del plain
    strides, groups = (2, 1) if name == "conv" else (1, 4)
    y = jax.lax.conv_general_dilated(
        x,
        params[name]["kernel"],
        (strides, strides),
        "SAME",
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + params[name]["bias"][None, None, None]


def test_calibrated_models_are_quantizers_written_out(inputs):
    linen, params, other = both(inputs)
    wanted = by_hand(params, inputs, float_ranges(params, inputs), RULE)
    ready = quant.calibrate(quant.attach(other, RULE), [inputs[:4], inputs[4:]])
    np.testing.assert_allclose(ready(inputs), wanted, atol=1e-6)
    variables = {"params": params}
    with quant.observe(RULE):
        for batch in (inputs[:4], inputs[4:]):
            _, updated = linen.apply(variables, batch, mutable=["quant_stats"])
            variables = {**variables, **updated}
    with quant.fake_quantize(RULE):
        found = linen.apply(variables, inputs)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    plain = other(inputs)
    assert 1e-4 < float(jnp.abs(wanted - plain).max()) < 0.1
    # Neither the model nor its weights changed.
    np.testing.assert_array_equal(quant.detach(ready)(inputs), plain)
    np.testing.assert_array_equal(linen.apply({"params": params}, inputs), plain)


@pytest.mark.parametrize("learned", [False, True], ids=["minmax", "lsq"])
def test_linen_and_nnx_have_the_same_gradients(inputs, learned):
    linen, params, other = both(inputs)
    rule = quant.LayerRule(
        weight=quant.QuantSpec(bits=4, symmetric=True, channel_axis=-1), learned=learned
    )
    with quant.fake_quantize(rule):
        variables = linen.init(jax.random.key(1), inputs)

        def linen_loss(params):
            y, state = linen.apply(
                {"params": params, "quant_stats": variables["quant_stats"]},
                inputs,
                mutable=["quant_stats"],
            )
            return jnp.sum(y**2), state

        (loss, state), grads = jax.value_and_grad(linen_loss, has_aux=True)(
            variables["params"]
        )
    graph, own, rest = nnx.split(quant.attach(other, rule), nnx.Param, ...)

    def nnx_loss(own):
        module = nnx.merge(graph, own, rest, copy=True)
        loss = jnp.sum(module(inputs) ** 2)
        return loss, nnx.state(module, quant.QuantStat)

    (other_loss, other_state), other_grads = jax.value_and_grad(nnx_loss, has_aux=True)(
        own
    )
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5)
    for name in ("conv", "depth", "head"):
        np.testing.assert_allclose(
            grads[name]["kernel"],
            other_grads[name]["kernel"][...],
            rtol=1e-4,
            atol=1e-4,
        )
        operation = "dot_general" if name == "head" else "conv_general_dilated"
        if learned:
            np.testing.assert_allclose(
                grads[name]["kernel_scale"],
                other_grads[name][operation]["scale"][...],
                rtol=1e-3,
                atol=1e-4,
            )
        stats = other_state[name][operation]["stats"]
        np.testing.assert_allclose(
            state["quant_stats"][name]["input"].hi, stats[1][...], rtol=1e-5
        )
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads["conv"]))


def test_frozen_ranges_are_not_updated(inputs):
    linen, params, other = both(inputs)
    ready = quant.calibrate(quant.attach(other, RULE), [inputs])
    before = [
        stat.copy() for stat in jax.tree.leaves(nnx.state(ready, quant.QuantStat))
    ]
    ready(100 * inputs)
    after = jax.tree.leaves(nnx.state(ready, quant.QuantStat))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    ready.train()
    ready(100 * inputs)
    assert any(
        (old != new).any()
        for old, new in zip(
            before, jax.tree.leaves(nnx.state(ready, quant.QuantStat)), strict=True
        )
    )


def test_ranges_that_nobody_observed_are_an_error(inputs):
    linen, params, other = both(inputs)
    model = quant.attach(other, RULE)
    model.eval()
    with pytest.raises(ValueError, match="never updated"):
        model(inputs)
    with quant.fake_quantize(RULE), pytest.raises(ValueError, match="observed range"):
        linen.apply({"params": params}, inputs)
    with pytest.raises(ValueError, match="no calibration batch"):
        quant.calibrate(model, [])


def test_policies_name_layers(inputs):
    linen, params, other = both(inputs)
    model = quant.attach(other, {"head": None, "": RULE})
    assert not isinstance(model.head.dot_general, quant.Quantizer)
    assert isinstance(model.depth.conv_general_dilated, quant.Quantizer)
    with pytest.raises(ValueError, match="'haed' fits nothing.*conv, depth, head"):
        quant.attach(other, {"haed": None, "": RULE})
    with pytest.raises(ValueError, match="quantized already"):
        quant.attach(model, RULE)
    with pytest.raises(ValueError, match="'haed' fits nothing.*conv, depth, head"):
        with quant.observe({"haed": None, "": RULE}):
            linen.apply({"params": params}, inputs, mutable=["quant_stats"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"activation": quant.QuantSpec(channel_axis=0)}, ValueError, "one scale"),
        ({"weight": quant.QuantSpec(rounding="stochastic")}, ValueError, "stochastic"),
        ({"weight": quant.INT8_ACTIVATION, "learned": True}, ValueError, "symmetric"),
        ({"weight": 8}, TypeError, "QuantSpec"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_rules_check_their_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        quant.LayerRule(**arguments)


def test_trees_of_numpy_and_jax(rng):
    params = {
        "dense": {"kernel": rng.normal(size=(6, 4)), "bias": rng.normal(size=4)},
        "conv": {"kernel": jnp.asarray(rng.normal(size=(3, 3, 2, 5)), jnp.float32)},
    }
    quantized = quant.quantize_params(params)
    kernel = quantized["dense"]["kernel"]
    scale = np.abs(params["dense"]["kernel"]).max(0) / 127
    np.testing.assert_array_equal(
        kernel.values, np.round(params["dense"]["kernel"].astype(np.float32) / scale)
    )
    rounded = quant.dequantize_params(quantized)
    fake = quant.fake_quant_params(params)
    for a, b in zip(jax.tree.leaves(rounded), jax.tree.leaves(fake), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    gradient = jax.grad(
        lambda p: sum(jnp.sum(x) for x in jax.tree.leaves(quant.fake_quant_params(p)))
    )(jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params))
    assert all((g == 1).all() for g in jax.tree.leaves(gradient))
    with pytest.raises(ValueError, match="'kernle' fits nothing.*conv/kernel"):
        quant.quantize_params(params, {"kernle": quant.INT8_WEIGHT})
    with pytest.raises(TypeError, match="must be floating"):
        quant.quantize_params({"kernel": np.arange(4)}, {"kernel": quant.INT8_WEIGHT})


def test_sizes_are_those_of_files(rng, tmp_path):
    params = {"a": {"kernel": rng.normal(size=(64, 33)).astype(np.float32)}}
    params["a"]["bias"] = np.zeros(33, np.float32)
    for bits, ratio in ((8, 3.6), (4, 6.4), (2, 10.0)):
        spec = quant.QuantSpec(bits=bits, symmetric=True, channel_axis=-1)
        quantized = quant.quantize_params(params, {"kernel": spec})
        tensor, report = quantized["a"]["kernel"], quant.size_report(quantized)
        packed = quant.pack_codes(np.asarray(tensor.values), spec)
        path = tmp_path / f"{bits}.bin"
        path.write_bytes(
            packed.tobytes()
            + np.asarray(tensor.qparams.scale).tobytes()
            + params["a"]["bias"].tobytes()
        )
        assert report.nbytes == path.stat().st_size
        assert report.ratio > ratio
        np.testing.assert_array_equal(
            quant.unpack_codes(packed, (64, 33), spec), tensor.values
        )
    assert "int2" in str(report)


def digits_task(model, **options):
    return train.from_nnx(model, train.classification_loss, **options)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2, "finite_guard": True}], ids=str
)
def test_quantization_aware_training_is_an_option_of_the_step(options, rng):
    images = rng.normal(size=(64, 6, 6, 2)).astype(np.float32)
    labels = (images.mean(axis=(1, 2, 3)) > 0).astype(np.int32)
    batch = {"image": images, "label": labels}
    low = functools.partial(quant.QuantSpec, bits=3, symmetric=True)
    model = quant.attach(
        Nnx(nnx.Rngs(0)),
        quant.LayerRule(
            weight=low(channel_axis=-1), activation=quant.QuantSpec(bits=4)
        ),
    )
    task = digits_task(model)
    params, model_state = task.init()
    tx = optax.sgd(0.1, momentum=0.9)
    kept = {k: v for k, v in options.items() if k == "finite_guard"}
    state = train.TrainState.create(
        params, tx, key=jax.random.key(0), model_state=model_state, **kept
    )
    step = train.make_train_step(task.train_loss, tx, **options)
    losses = []
    for _ in range(25):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.6 * losses[0]
    final = task.merge(state.params, state.model_state)
    kernel = final.head.kernel[...]
    assert len(np.unique(quant.QTensor.of(kernel, low(channel_axis=-1)).values)) <= 8
    # In evaluation mode the observed ranges are those of training.
    np.testing.assert_allclose(final(images), final(images))
    counts = [s[...] for s in final.head.dot_general.stats]
    assert int(counts[2]) == 25 * options.get("accumulate", 1)


def test_linen_trains_quantized_too(rng):
    images = rng.normal(size=(32, 6, 6, 2)).astype(np.float32)
    batch = {
        "image": images,
        "label": (images.mean(axis=(1, 2, 3)) > 0).astype(np.int32),
    }
    task = train.from_linen(
        Linen(), train.classification_loss, mutable=("batch_stats", "quant_stats")
    )
    tx = optax.sgd(0.1, momentum=0.9)
    with quant.fake_quantize():
        params, model_state = task.init(jax.random.key(0), batch)
        state = train.TrainState.create(
            params, tx, key=jax.random.key(0), model_state=model_state
        )
        step = train.make_train_step(task.train_loss, tx)
        losses = []
        for _ in range(15):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    assert int(state.model_state["quant_stats"]["head"]["input"].count) == 15
