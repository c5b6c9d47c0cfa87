"""make_normalizer against float64 NumPy."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.data import make_normalizer


def oracle(images, mean, std):
    return (images / 255.0 - np.asarray(mean)) / np.asarray(std)


def statistics(low, high, channels):
    number = st.floats(low, high)
    return st.one_of(number, st.lists(number, min_size=channels, max_size=channels))


@hypothesis.given(
    data=st.data(),
    lead=st.lists(st.integers(1, 4), max_size=3),
    channels=st.integers(1, 4),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    jitted=st.booleans(),
)
def test_equals_float64(data, lead, channels, dtype, jitted):
    mean = data.draw(statistics(0.0, 1.0, channels))
    std = data.draw(statistics(0.05, 1.0, channels))
    images = np.random.default_rng(0).integers(
        0, 256, (*lead, channels), dtype=np.uint8
    )
    normalize = make_normalizer(mean, std, dtype=dtype)
    y = (jax.jit(normalize) if jitted else normalize)(images)
    assert y.dtype == dtype and y.shape == images.shape
    # Both terms reach 1/std and are rounded once; then comes the cast.
    eps = 2.0**-23 / np.min(std) + float(jnp.finfo(dtype).eps) * np.abs(
        oracle(images, mean, std)
    )
    assert (np.abs(np.asarray(y, np.float64) - oracle(images, mean, std)) <= eps).all()


def test_common_statistics_are_right_to_one_millionth():
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, -1)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    y = make_normalizer(mean, std)(images)
    np.testing.assert_allclose(y, oracle(images, mean, std), rtol=0, atol=1e-6)


def test_bfloat16_is_right_to_one_unit_in_the_last_place():
    images = np.arange(256, dtype=np.uint8).reshape(1, 16, 16, 1).repeat(3, -1)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    y = jax.jit(make_normalizer(mean, std, dtype=jnp.bfloat16))(images)
    assert y.dtype == jnp.bfloat16
    expected = oracle(images, mean, std)
    # Eight bits of significand.
    unit = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 7)
    assert (np.abs(np.asarray(y, np.float64) - expected) <= unit).all()


def test_under_vmap_and_with_numpy_or_tuple_statistics():
    images = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    normalize = make_normalizer(np.array([0.1, 0.2, 0.3]), 0.5)
    np.testing.assert_array_equal(jax.vmap(normalize)(images), normalize(images))
    np.testing.assert_array_equal(
        make_normalizer((0.1, 0.2, 0.3), (0.5,) * 3)(images), normalize(images)
    )


@pytest.mark.parametrize(
    ("mean", "std", "words"),
    [
        (0.5, 0.0, r"std must be in \(0, 1\].*got 0.0"),
        (0.5, [0.2, -1.0], r"got \[0.2, -1.0\]"),
        (127.5, 0.25, "mean must be on the scale 0 to 1, got 127.5; divide"),
        (0.5, 63.0, "std must be in .*63.0; divide"),
        (-0.5, 0.5, "got -0.5"),
        (float("nan"), 0.5, "mean must hold finite numbers, got nan"),
        (0.5, float("inf"), "std must hold finite numbers, got inf"),
        ([], 0.5, "mean must hold finite numbers"),
        ([0.5, 0.5], [0.1, 0.1, 0.1], "mean has 2 channels and std has 3"),
        (np.ones((1, 3)), 0.5, r"mean must be a scalar.*\(1, 3\)"),
    ],
)
def test_bad_statistics(mean, std, words):
    with pytest.raises(ValueError, match=words):
        make_normalizer(mean, std)


def test_bad_images_and_dtypes():
    normalize = make_normalizer((0.5, 0.5, 0.5), 0.5)
    with pytest.raises(TypeError, match="uint8 images .*got float32; ship"):
        jax.jit(normalize)(jnp.zeros((2, 2, 3)))
    with pytest.raises(ValueError, match=r"3 channels.*\(2, 2, 1\)"):
        normalize(np.zeros((2, 2, 1), np.uint8))
    with pytest.raises(ValueError, match="3 channels"):
        normalize(np.uint8(3))
    with pytest.raises(TypeError, match="floating dtype"):
        make_normalizer(0.5, 0.5, dtype=jnp.int32)
