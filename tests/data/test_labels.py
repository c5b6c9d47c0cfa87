"""one_hot against NumPy."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.data import one_hot

ONE_HOT = jax.jit(one_hot, static_argnums=(1,), static_argnames=("smoothing", "dtype"))


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    labels=st.lists(st.integers(-3, 12), min_size=5, max_size=5),
    dtype=st.sampled_from([np.int8, np.int32, np.uint8, np.uint16]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
)
def test_equals_numpy(labels, dtype, smoothing):
    labels = np.array(labels).clip(np.iinfo(dtype).min).astype(dtype)
    targets = ONE_HOT(jnp.asarray(labels), 10, smoothing=smoothing)
    assert targets.shape == (5, 10) and targets.dtype == jnp.float32
    expected = np.full((5, 10), np.nan)
    valid = (labels >= 0) & (labels < 10)
    expected[valid] = np.eye(10)[labels[valid]] * (1 - smoothing) + smoothing / 10
    np.testing.assert_allclose(targets, expected, rtol=1e-6)


def test_more_classes_than_the_dtype_counts():
    targets = one_hot(jnp.array([255, 0], jnp.uint8), 1000)
    assert targets.argmax(axis=-1).tolist() == [255, 0]
    assert targets.sum(axis=-1).tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_wide_labels_of_the_host(dtype):
    labels = np.array([2**32, 3 * 2**32 + 2, 2**31, 1], dtype)
    targets = np.asarray(one_hot(labels, 3))
    assert np.isnan(targets[:3]).all() and targets[3].tolist() == [0, 1, 0]
    assert np.isnan(one_hot(2**32, 3)).all() and np.isnan(one_hot(labels[0], 3)).all()


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64, np.int64])
def test_wide_labels_of_the_device(dtype):
    labels = np.array([np.iinfo(dtype).max, np.iinfo(dtype).max // 2 + 3, 2], dtype)
    with jax.enable_x64(True):
        targets = one_hot(jnp.asarray(labels), 3)
        assert np.isnan(targets[:2]).all() and targets[2].tolist() == [0, 0, 1]


def test_any_shape_and_dtype():
    labels = np.arange(6, dtype=np.uint8).reshape(2, 3)
    targets = one_hot(labels, 6, dtype=jnp.bfloat16)
    assert targets.shape == (2, 3, 6) and targets.dtype == jnp.bfloat16
    np.testing.assert_array_equal(targets.astype(jnp.float32), np.eye(6)[labels])
    assert one_hot(2, 3).tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda x: one_hot(x, 0), ValueError, "num_classes must be at least 1, got 0"),
        (lambda x: one_hot(x, 3, smoothing=1.5), ValueError, "smoothing must be in 0"),
        (lambda x: one_hot(x.astype(float), 3), TypeError, "got float32"),
        (lambda x: one_hot(x, 3, dtype=jnp.int32), TypeError, "floating dtype"),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call(jnp.zeros(2, jnp.int32))
