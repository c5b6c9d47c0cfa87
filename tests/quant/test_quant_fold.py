"""Batch normalization folded: the same function, and normalizations left idle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel import quant

EPS = 1e-3


def _normalization(rng, channels):
    return {
        "scale": rng.normal(size=channels),
        "offset": rng.normal(size=channels),
        "mean": rng.normal(size=channels),
        "var": rng.uniform(0.01, 4.0, channels),
    }


def _normalized(y, scale, offset, mean, var):
    return (y - mean) / np.sqrt(var + EPS) * scale + offset


@given(seed=st.integers(0, 2**31), channels=st.integers(1, 7), has_bias=st.booleans())
def test_a_folded_dense_layer_is_the_layer_and_its_normalization(
    seed, channels, has_bias
):
    rng = np.random.default_rng(seed)
    x, kernel = rng.normal(size=(5, 4)), rng.normal(size=(4, channels))
    bias = rng.normal(size=channels) if has_bias else None
    norm = _normalization(rng, channels)
    folded, shift = quant.fold_batch_norm(kernel, bias, **norm, eps=EPS)
    wanted = _normalized(x @ kernel + (0 if bias is None else bias), **norm)
    got = x @ np.asarray(folded, np.float64) + np.asarray(shift, np.float64)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_convolutions_fold_along_the_last_axis(groups, rng):
    x = rng.normal(size=(2, 5, 5, 6)).astype(np.float32)
    kernel = rng.normal(size=(3, 3, 6 // groups, 6)).astype(np.float32)
    norm = _normalization(rng, 6)

    def conv(kernel):
        return jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    wanted = _normalized(np.asarray(conv(kernel), np.float64), **norm)
    folded, shift = quant.fold_batch_norm(kernel, None, **norm, eps=EPS)
    got = np.asarray(conv(folded)) + np.asarray(shift)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_without_scale_and_offset_they_are_one_and_zero(rng):
    kernel, norm = rng.normal(size=(3, 2)), _normalization(rng, 2)
    plain = {**norm, "scale": None, "offset": None}
    spelled = {**norm, "scale": np.ones(2), "offset": np.zeros(2)}
    for found, wanted in zip(
        quant.fold_batch_norm(kernel, None, **plain),
        quant.fold_batch_norm(kernel, np.zeros(2), **spelled),
        strict=True,
    ):
        np.testing.assert_array_equal(found, wanted)


def test_a_kernel_keeps_its_dtype_and_folds_inside_jit(rng):
    kernel = jnp.asarray(rng.normal(size=(3, 2)), jnp.bfloat16)
    norm = _normalization(rng, 2)
    eager = quant.fold_batch_norm(kernel, None, **norm)
    jitted = jax.jit(lambda k, n: quant.fold_batch_norm(k, None, **n))(kernel, norm)
    assert jitted[0].dtype == jnp.bfloat16 and jitted[1].dtype == jnp.float32
    np.testing.assert_allclose(
        jitted[0].astype(np.float32), eager[0].astype(np.float32), rtol=2**-7
    )


def test_bad_shapes_and_variances_are_named(rng):
    kernel, norm = np.ones((3, 2)), _normalization(rng, 2)
    with pytest.raises(ValueError, match=r"mean must be of shape \(2,\).*\(3,\)"):
        quant.fold_batch_norm(kernel, None, **{**norm, "mean": np.zeros(3)})
    with pytest.raises(ValueError, match="var must not be negative; got -1"):
        quant.fold_batch_norm(kernel, None, **{**norm, "var": np.array([1.0, -1.0])})


# Whole models.


class LinenNet(nn.Module):
    """Norms after a convolution without bias, a depthwise one, a dense layer."""

    @nn.compact
    def __call__(self, x, train=False):
        def norm(**options):
            return nn.BatchNorm(not train, epsilon=EPS, **options)

        x = nn.relu(norm()(nn.Conv(4, (3, 3), use_bias=False)(x)))
        x = norm(use_scale=False)(nn.Conv(4, (3, 3), feature_group_count=4)(x))
        x = nn.relu(x).reshape(x.shape[0], -1)
        return norm(use_bias=False)(nn.Dense(3)(x))


class NnxNet(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        def norm(**options):
            return nnx.BatchNorm(epsilon=EPS, rngs=rngs, **options)

        self.convs = nnx.List(
            [
                nnx.Conv(2, 4, (3, 3), use_bias=False, rngs=rngs),
                nnx.Conv(4, 4, (3, 3), feature_group_count=4, rngs=rngs),
            ]
        )
        self.norms = nnx.List(
            [norm(num_features=4), norm(num_features=4, use_scale=False)]
        )
        self.head = nnx.Linear(64, 3, rngs=rngs)
        self.last = norm(num_features=3, use_bias=False)

    def __call__(self, x):
        for conv, normalize in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(normalize(conv(x)))
        return self.last(self.head(x.reshape(x.shape[0], -1)))


LINEN_PAIRS = {
    "Conv_0": "BatchNorm_0",
    "Conv_1": "BatchNorm_1",
    "Dense_0": "BatchNorm_2",
}
NNX_PAIRS = [("convs/0", "norms/0"), ("convs/1", "norms/1"), ("head", "last")]


def _randomized(tree, rng):
    """Numbers unlike the first ones, positive: some are variances."""
    return jax.tree.map(
        lambda x: jnp.asarray(rng.uniform(0.2, 2.0, x.shape), x.dtype), tree
    )


def _linen(rng):
    model = LinenNet()
    x = rng.normal(size=(2, 4, 4, 2)).astype(np.float32)
    return model, _randomized(model.init(jax.random.key(0), x), rng), x


def _apply(model, variables, x) -> Any:
    return model.apply(variables, x)


def _nnx(rng):
    model = NnxNet(nnx.Rngs(0))
    nnx.update(model, _randomized(nnx.state(model), rng))
    model.eval()
    return model, rng.normal(size=(2, 4, 4, 2)).astype(np.float32)


def test_linen_variables_give_the_same_outputs_with_idle_normalizations(rng):
    model, variables, x = _linen(rng)
    before = jax.tree.map(np.array, variables)
    folded = quant.fold_batch_norms(variables, LINEN_PAIRS, eps=EPS)
    np.testing.assert_allclose(
        _apply(model, folded, x), _apply(model, variables, x), rtol=1e-4
    )
    jax.tree.map(np.testing.assert_array_equal, variables, before)
    assert jax.tree.structure(folded) == jax.tree.structure(variables)
    for name in ("BatchNorm_0", "BatchNorm_2"):
        np.testing.assert_array_equal(folded["params"][name]["scale"], 1)
        np.testing.assert_array_equal(folded["batch_stats"][name]["mean"], 0)
    np.testing.assert_array_equal(folded["params"]["BatchNorm_1"]["bias"], 0)
    # Where the layer has no bias to take the offset, the normalization keeps it.
    assert (np.asarray(folded["params"]["BatchNorm_0"]["bias"]) != 0).all()


def test_an_nnx_model_gives_the_same_outputs_with_idle_normalizations(rng):
    model, x = _nnx(rng)
    before = jax.tree.map(np.array, nnx.state(model))
    folded = quant.fold_batch_norms(model, NNX_PAIRS)
    np.testing.assert_allclose(folded(x), model(x), rtol=1e-4)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)
    np.testing.assert_array_equal(folded.norms[0].scale[...], 1)
    np.testing.assert_array_equal(folded.norms[1].bias[...], 0)
    np.testing.assert_array_equal(folded.last.mean[...], 0)
    assert folded.last.use_running_average


def test_numpy_variables_fold(rng):
    model, variables, x = _linen(rng)
    host = jax.tree.map(np.asarray, variables)
    folded = quant.fold_batch_norms(host, LINEN_PAIRS, eps=EPS)
    np.testing.assert_allclose(
        _apply(model, folded, x), _apply(model, host, x), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("Conv_9", "BatchNorm_0")], "'Conv_9' leads to no layer in 'params'"),
        ([("Conv_0", "Conv_1")], "'Conv_1' leads to no layer in 'batch_stats'"),
        ([("BatchNorm_0", "BatchNorm_0")], "'BatchNorm_0' has no 'kernel'"),
        ([("Conv_0", "BatchNorm_2")], r"scale must be of shape \(4,\).*\(3,\)"),
    ],
)
def test_wrong_paths_of_variables_are_named(pairs, message, rng):
    variables = _linen(rng)[1]
    with pytest.raises(ValueError, match=message):
        quant.fold_batch_norms(variables, pairs)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("convs/7", "norms/0")], "'convs/7' leads to no layer: no '7'"),
        ([("convs/0", "nothing")], "'nothing' leads to no layer"),
        ([("convs/0", "head")], "head is a Linear, without mean and var"),
        ([("norms/0", "norms/0")], "norms/0 is a BatchNorm, without kernel"),
    ],
)
def test_wrong_paths_of_a_model_are_named(pairs, message, rng):
    model = _nnx(rng)[0]
    with pytest.raises(ValueError, match=message):
        quant.fold_batch_norms(model, pairs)


def test_without_any_bias_there_is_nowhere_to_fold(rng):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(2, 3, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(3, use_bias=False, rngs=rngs)

    with pytest.raises(ValueError, match="neither dense nor norm has a bias"):
        quant.fold_batch_norms(Net(nnx.Rngs(0)), [("dense", "norm")])
    layer = {"kernel": np.ones((2, 3))}
    stats = {"mean": np.zeros(3), "var": np.ones(3)}
    variables = {"params": {"a": layer, "n": {}}, "batch_stats": {"n": stats}}
    with pytest.raises(ValueError, match="neither a nor n has a bias"):
        quant.fold_batch_norms(variables, [("a", "n")])


def test_a_transposed_kernel_is_refused():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.ConvTranspose(3, 3, (2, 2), transpose_kernel=True, rngs=rngs)
            self.norm = nnx.BatchNorm(3, rngs=rngs)

    # Its last axis is the input's: the shapes would fit, and the numbers be wrong.
    with pytest.raises(ValueError, match="up.*transpose_kernel"):
        quant.fold_batch_norms(Net(nnx.Rngs(0)), [("up", "norm")])


def test_something_else_is_no_model():
    with pytest.raises(TypeError, match="nnx.Module or a dict.*got int"):
        quant.fold_batch_norms(3, [])
