"""Trees: of linen, NNX and NumPy, eager, traced and abstract; and what they weigh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxaccel import quant
from jaxaccel.quant import QTensor, QuantSpec

INT4 = QuantSpec(bits=4, symmetric=True, channel_axis=-1)


class LinenNet(nn.Module):
    """A convolution, a depthwise one, and a dense layer."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3), name="conv")(x))
        x = nn.Conv(4, (3, 3), feature_group_count=4, name="depthwise")(x)
        return nn.Dense(3, name="head")(x.mean(axis=(1, 2)))


class NnxNet(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.depthwise = nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.depthwise(nnx.relu(self.conv(x)))
        return self.head(x.mean(axis=(1, 2)))


def _linen_params() -> Any:
    return LinenNet().init(jax.random.key(0), jnp.ones((1, 4, 4, 2)))["params"]


def _rounded(kernel, qmax=127):
    """Quantizes by a loop over output channels, in float64."""
    kernel = np.asarray(kernel, np.float64)
    found = np.empty_like(kernel)
    for channel in range(kernel.shape[-1]):
        column = kernel[..., channel]
        scale = np.float32(np.abs(column).max()) / np.float32(qmax)
        found[..., channel] = np.round(column / scale) * scale
    return found


@pytest.mark.parametrize("layer", ["conv", "depthwise", "head"])
def test_kernels_of_linen_have_a_scale_for_each_output(layer):
    params = _linen_params()
    tensor = quant.quantize_params(params)[layer]["kernel"]
    kernel = params[layer]["kernel"]
    assert tensor.values.dtype == np.int8 and tensor.shape == kernel.shape
    assert tensor.qparams.scale.shape == kernel.shape[-1:]
    back = quant.dequantize_params(quant.quantize_params(params))
    np.testing.assert_allclose(back[layer]["kernel"], _rounded(kernel), rtol=1e-6)
    np.testing.assert_array_equal(back[layer]["bias"], params[layer]["bias"])


def test_fake_quantization_equals_quantizing_and_back():
    params = _linen_params()
    policy = {"head/kernel": INT4, "kernel": quant.INT8_WEIGHT}
    faked = quant.fake_quant_params(params, policy)
    back = quant.dequantize_params(quant.quantize_params(params, policy))
    jax.tree.map(np.testing.assert_array_equal, faked, back)


def test_linen_applies_to_what_comes_back():
    params, x = _linen_params(), jnp.ones((1, 4, 4, 2))
    back = quant.dequantize_params(quant.quantize_params(params))
    run: Any = LinenNet().apply
    y, wanted = (run({"params": p}, x) for p in (back, params))
    np.testing.assert_allclose(y, wanted, atol=0.05)
    assert not np.array_equal(y, wanted)


def test_an_nnx_state_is_a_tree_like_others():
    model, x = NnxNet(nnx.Rngs(0)), jnp.ones((1, 4, 4, 2))
    graph, state = nnx.split(model)
    quantized = quant.quantize_params(state)
    assert isinstance(quantized, nnx.State)
    found = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            quantized, is_leaf=lambda x: isinstance(x, QTensor)
        )
    }
    kernels = {path for path, leaf in found.items() if isinstance(leaf, QTensor)}
    assert {path.split("/")[0] for path in kernels} == {"conv", "depthwise", "head"}
    restored = nnx.merge(graph, quant.dequantize_params(quantized))
    np.testing.assert_allclose(
        restored.head.kernel[...], _rounded(model.head.kernel[...]), rtol=1e-6
    )
    was, now = (net.conv.bias for net in (model, restored))
    assert was is not None and now is not None
    np.testing.assert_array_equal(now[...], was[...])
    np.testing.assert_allclose(restored(x), model(x), atol=0.05)


def test_a_pure_dict_of_an_nnx_state_gives_the_same():
    state = nnx.state(NnxNet(nnx.Rngs(0)), nnx.Param)
    pure = quant.fake_quant_params(nnx.to_pure_dict(state))
    faked = nnx.to_pure_dict(quant.fake_quant_params(state))
    jax.tree.map(np.testing.assert_array_equal, pure, faked)


def test_numpy_trees_give_the_same_codes():
    params = _linen_params()
    host = quant.quantize_params(jax.tree.map(np.asarray, params))
    jax.tree.map(np.testing.assert_array_equal, host, quant.quantize_params(params))


def test_it_runs_inside_jit_and_abstractly():
    params = _linen_params()
    eager = quant.quantize_params(params)
    jitted = jax.jit(quant.quantize_params)(params)
    jax.tree.map(np.testing.assert_array_equal, jitted, eager)
    abstract = jax.eval_shape(quant.quantize_params, params)
    assert jax.tree.structure(abstract) == jax.tree.structure(eager)
    assert abstract["conv"]["kernel"].values.dtype == np.int8
    assert quant.size_report(abstract) == quant.size_report(eager)


def test_half_precision_stays_half():
    params = {"kernel": jnp.linspace(-1, 1, 12, dtype=jnp.bfloat16).reshape(4, 3)}
    assert quant.fake_quant_params(params)["kernel"].dtype == jnp.bfloat16


def test_the_gradient_passes_straight_through_to_every_weight():
    params = _linen_params()
    grads = jax.grad(
        lambda p: sum(
            (x * (i + 1.0)).sum()
            for i, x in enumerate(jax.tree.leaves(quant.fake_quant_params(p)))
        )
    )(params)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        np.testing.assert_array_equal(grad, np.full(grad.shape, i + 1.0))


def test_what_is_quantized_already_stays():
    once = quant.quantize_params(_linen_params())
    policy = QuantSpec(symmetric=True)
    twice = quant.quantize_params(once, policy)
    assert twice["conv"]["kernel"].values is once["conv"]["kernel"].values
    assert isinstance(twice["conv"]["bias"], QTensor)
    with pytest.raises(TypeError, match="conv/kernel is quantized already"):
        quant.quantize_params(once, {"kernel": INT4})


def test_what_cannot_be_quantized_is_named():
    with pytest.raises(TypeError, match="a/kernel must be floating.*int32"):
        quant.quantize_params({"a": {"kernel": np.arange(4, dtype=np.int32)}})
    with pytest.raises(ValueError, match="a/kernel: .*NaN"):
        quant.quantize_params({"a": {"kernel": np.array([[np.nan, 1.0]])}})
    with pytest.raises(ValueError, match="a/kernel: block_size=3 does not divide"):
        spec = QuantSpec(block_size=3)
        quant.quantize_params({"a": {"kernel": np.ones((2, 4))}}, {"kernel": spec})
    with pytest.raises(ValueError, match="a/w: .*without entries"):
        quant.quantize_params({"a": {"w": np.ones((0, 4))}}, {"w": QuantSpec()})


# What a tree weighs.


def _write(path, params):
    """Writes a tree as it would be shipped: packed codes, scales, zero points."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QTensor))
    with open(path, "wb") as file:
        for leaf in leaves:
            if not isinstance(leaf, QTensor):
                file.write(np.asarray(leaf).tobytes())
                continue
            codes = quant.pack_codes(np.asarray(leaf.values), leaf.spec)
            scale, zero = (np.asarray(x) for x in leaf.qparams)
            file.write(codes.tobytes() + scale.tobytes())
            if not leaf.spec.symmetric:
                file.write(zero.astype(leaf.spec.storage_dtype).tobytes())
    return path.stat().st_size


SPECS = {
    "int8": quant.INT8_WEIGHT,
    "int4": INT4,
    "int3_odd": QuantSpec(bits=3),
    "uint2": QuantSpec(bits=2, signed=False, channel_axis=-1),
    "int16": QuantSpec(bits=16, channel_axis=-1),
    "fp8": quant.FP8_E4M3,
    "blocks": QuantSpec(bits=4, symmetric=True, channel_axis=-1, block_size=2),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_report_is_the_size_of_the_file(spec, tmp_path, rng):
    params = {
        "a": {"kernel": rng.normal(size=(6, 5)).astype(np.float32)},
        "b": {"kernel": rng.normal(size=(3, 3, 2, 3)), "bias": np.ones(3, np.float16)},
        "steps": np.int32(3),
    }
    quantized = quant.quantize_params(params, {"kernel": spec})
    report = quant.size_report(quantized)
    assert report.nbytes == _write(tmp_path / "params", quantized)
    assert report.float32_nbytes == 4 * (30 + 54 + 3 + 1)
    assert report.ratio == report.float32_nbytes / report.nbytes
    assert sum(report.by_format.values()) == report.nbytes
    assert report.by_format["float16"] == 6 and report.by_format["int32"] == 4


def test_large_trees_shrink_nearly_by_the_bits():
    tree = {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    for bits, factor in ((8, 3.98), (4, 7.9), (2, 15.7)):
        spec = QuantSpec(bits=bits, symmetric=True, channel_axis=-1)
        shapes = jax.eval_shape(
            lambda tree, spec=spec: quant.quantize_params(tree, {"kernel": spec}), tree
        )
        assert quant.size_report(shapes).ratio >= factor


def test_floating_trees_and_nnx_states_are_weighed():
    params = _linen_params()
    report = quant.size_report(params)
    entries = sum(x.size for x in jax.tree.leaves(params))
    assert report.nbytes == report.float32_nbytes == 4 * entries
    assert report.ratio == 1 and report.by_format == {"float32": 4 * entries}
    state = nnx.state(NnxNet(nnx.Rngs(0)))
    assert quant.size_report(state) == report
    assert quant.size_report(quant.quantize_params(state)) == quant.size_report(
        quant.quantize_params(params)
    )


def test_plain_numbers_are_weighed():
    assert quant.size_report({"a": 1.0, "b": np.float32(2)}).nbytes == 8


def test_the_report_prints_a_table():
    text = str(quant.size_report(quant.quantize_params({"kernel": np.ones((64, 64))})))
    assert text.splitlines() == [
        "int8           4,352 bytes",
        "total          4,352 bytes",
        "3.76 times smaller than float32",
    ]


def test_nothing_to_weigh_is_an_error():
    with pytest.raises(ValueError, match="no array"):
        quant.size_report({})
