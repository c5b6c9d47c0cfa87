"""cutout and random_erasing against masks by NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.data import cutout, random_erasing

CUTOUT = jax.jit(cutout, static_argnames=("size", "fill", "p"))
ERASE = jax.jit(random_erasing, static_argnames=("p", "scale", "ratio", "fill"))


def square(shape, row, column, height, width):
    """True inside a rectangle around a centre, cut off at the border."""
    mask = np.zeros(shape, bool)
    top, left = row - height // 2, column - width // 2
    mask[max(top, 0) : max(top + height, 0), max(left, 0) : max(left + width, 0)] = 1
    return mask


@pytest.mark.parametrize(
    ("shape", "size", "dtype"),
    [
        ((5, 4, 1), (2, 3), jnp.uint8),
        ((3, 6, 3), (5, 1), jnp.float32),
        ((2, 3, 3), (7, 4), jnp.bfloat16),
    ],
)
def test_cutout_erases_one_of_the_rectangles(key, rng, shape, size, dtype):
    images = rng.integers(1, 256, (30, *shape)).astype(np.uint8)
    result = CUTOUT(key, jnp.asarray(images).astype(dtype), size)
    assert result.dtype == dtype
    outcomes = {
        np.where(square(shape[:2], r, c, *size)[..., None], 0, image).tobytes()
        for image in images
        for r in range(shape[0])
        for c in range(shape[1])
    }
    for out in np.asarray(result.astype(jnp.uint8)):
        assert out.tobytes() in outcomes


def test_cutout_places_are_equally_likely(key):
    images = jnp.ones((5000, 4, 5, 1), jnp.uint8)
    erased = np.asarray(CUTOUT(key, images, 1))[..., 0] == 0
    counts = erased.sum(axis=0).ravel()
    # Chi-squared with 19 degrees of freedom; 65 has probability 1e-6.
    assert counts.sum() == 5000 and ((counts - 250) ** 2 / 250).sum() < 65


@pytest.mark.parametrize("function", [CUTOUT, ERASE])
def test_fill_and_share(key, function):
    images = jnp.full((300, 8, 8, 3), 200, jnp.uint8)
    options = {"fill": (1, 2, 3), "p": 0.25}
    if function is CUTOUT:
        options["size"] = 4
    result = np.asarray(function(key, images, **options))
    changed = (result != 200).any(axis=(1, 2, 3))
    assert 0.15 < changed.mean() < 0.35
    assert np.unique(result[result[..., 0] != 200], axis=0).tolist() == [[1, 2, 3]]


def test_erased_areas_and_ratios_follow_the_ranges(key):
    images = jnp.ones((600, 40, 40, 1), jnp.uint8)
    result = ERASE(key, images, p=1.0, scale=(0.1, 0.3), ratio=(0.5, 2.0))
    erased = np.asarray(result)[..., 0] == 0
    height, width = erased.any(axis=2).sum(axis=1), erased.any(axis=1).sum(axis=1)
    # As many pixels as the bounding box: a whole rectangle, inside the image.
    np.testing.assert_array_equal(erased.sum(axis=(1, 2)), height * width)
    share, ratio = height * width / 1600, width / height
    assert share.min() > 0.09 and share.max() < 0.32 and abs(share.mean() - 0.2) < 0.015
    assert ratio.min() > 0.45 and ratio.max() < 2.2
    assert abs(np.log(ratio).mean()) < 0.08


def test_where_no_rectangle_fits_the_image_stays(key):
    images = jnp.ones((3, 4, 64, 1), jnp.uint8)
    result = ERASE(key, images, p=1.0, scale=(1.0, 1.0), ratio=(0.1, 0.1))
    assert np.asarray(result).all()


@pytest.mark.parametrize(
    "dtype", [jnp.uint8, pytest.param(jnp.float32, marks=pytest.mark.slow)]
)
def test_noise(key, dtype):
    images = jnp.zeros((60, 16, 16, 1), dtype)
    noise = np.asarray(ERASE(key, images, p=1.0, fill="noise"), np.float64)
    noise = noise[noise != 0]
    mean, std = (128, 74) if dtype == jnp.uint8 else (0, 1)
    # At least 300 pixels: five standard errors.
    assert len(noise) > 300
    assert abs(noise.mean() - mean) < 0.29 * std
    assert abs(noise.std() / std - 1) < 0.2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda k, x: cutout(k, x, 0), "size must be one number of pixels.*got 0"),
        (lambda k, x: cutout(k, x, 2, fill=256), "whole numbers in 0 to 255, got 256"),
        (lambda k, x: cutout(k, x, 2, fill=0.5), "whole numbers .*got 0.5"),
        (lambda k, x: cutout(k, x, 2, fill=(1, 2)), "each of the 1 channels"),
        (lambda k, x: cutout(k, x, 2, p=-1.0), "p must be in 0 to 1, got -1"),
        (lambda k, x: random_erasing(k, x, p=2.0), "p must be in 0 to 1, got 2"),
        (lambda k, x: random_erasing(k, x, scale=(0.0, 0.1)), "0 < low <= high"),
        (lambda k, x: random_erasing(k, x, ratio=(3.0, 1.0)), "ratio must be"),
        (
            lambda k, x: cutout(k, x.astype(jnp.float32), 2, fill=float("nan")),
            "fill must be finite",
        ),
    ],
)
def test_bad_arguments(key, call, words):
    with pytest.raises(ValueError, match=words):
        call(key, jnp.zeros((2, 9, 9, 1), jnp.uint8))
