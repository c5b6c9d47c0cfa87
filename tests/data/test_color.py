"""color_jitter against NumPy, colorsys and Pillow, with the same factors."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageEnhance

from jaxaccel.data import color_jitter

NAMES = ("brightness", "contrast", "saturation", "hue")


def oracle(image, brightness, contrast, saturation, hue):
    """One image, in float64, in the documented order."""
    luma = np.array([0.299, 0.587, 0.114])
    x = np.clip(brightness * image.astype(np.float64), 0, 255)
    x = np.clip(contrast * x + (1 - contrast) * (x @ luma).mean(), 0, 255)
    x = np.clip(saturation * x + (1 - saturation) * (x @ luma)[..., None], 0, 255)
    if hue:
        for pixel in x.reshape(-1, 3):
            h, s, v = colorsys.rgb_to_hsv(*pixel)
            pixel[:] = colorsys.hsv_to_rgb((h + hue) % 1, s, v)
    return x


JITTER = jax.jit(color_jitter, static_argnames=(*NAMES, "p"))


@pytest.mark.parametrize("gray", [False, True])
@pytest.mark.parametrize(
    "factors", [(1.2, 0.7, 1.6, 0.21), (0.4, 1.9, 0.0, -0.5), (1.0, 2.0, 2.0, 0.0)]
)
def test_equals_the_oracle(rng, factors, gray):
    images = rng.integers(0, 256, (2, 9, 8, 3), dtype=np.uint8)
    if gray:
        images = images[..., :1].repeat(3, -1)
    b, c, s, h = ((f, f) for f in factors)
    result = JITTER(
        jax.random.key(0),
        jnp.asarray(images),
        brightness=b,
        contrast=c,
        saturation=s,
        hue=h,
    )
    assert result.dtype == jnp.uint8
    for image, out in zip(images, np.asarray(result), strict=True):
        # Half a level of rounding, and float32's own error.
        assert np.abs(out - oracle(image, *factors)).max() <= 0.5 + 2e-3


@pytest.mark.parametrize(
    ("name", "option"),
    [("Brightness", "brightness"), ("Contrast", "contrast"), ("Color", "saturation")],
)
def test_pillow_agrees_to_one_level(key, rng, name, option):
    image = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    expected = getattr(ImageEnhance, name)(Image.fromarray(image)).enhance(1.4)
    result = JITTER(key, jnp.asarray(image)[None], **{option: (1.4, 1.4)})[0]
    difference = np.asarray(result).astype(int) - np.asarray(expected).astype(int)
    # Pillow truncates, and rounds the gray values first.
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize("name", NAMES)
def test_each_image_draws_its_own_factor_from_the_range(key, name):
    # Red 100 and 60 over two pixels: each change gives its factor away.
    image = jnp.zeros((1, 2, 3), jnp.float32).at[0, :, 0].set(jnp.array([0.5, 0.3]))
    images = jnp.broadcast_to(image, (500, *image.shape))
    bounds = (-0.1, 0.3) if name == "hue" else (0.6, 1.4)
    x = np.asarray(JITTER(key, images, **{name: bounds}), np.float64)
    if name == "brightness":
        found = x[:, 0, 0, 0] / 0.5
    elif name == "contrast":
        found = (x[:, 0, 0, 0] - x[:, 0, 1, 0]) / 0.2
    elif name == "saturation":
        gray = 0.299 * 0.5
        found = (x[:, 0, 0, 0] - gray) / (0.5 - gray)
    else:
        hues = [colorsys.rgb_to_hsv(*pixel)[0] for pixel in x[:, 0, 0]]
        found = (np.array(hues) + 0.5) % 1 - 0.5
    low, high = bounds
    assert found.min() >= low - 1e-5 and found.max() <= high + 1e-5
    # A uniform law: mean and deviation, within 5 standard errors.
    assert abs(found.mean() - (low + high) / 2) < 0.027
    assert abs(found.std() - (high - low) / 12**0.5) < 0.02


def test_a_number_is_a_range_around_the_unchanged(key):
    images = jnp.full((400, 1, 1, 3), 0.25)
    factors = np.asarray(JITTER(key, images, brightness=2.0))[:, 0, 0, 0] * 4
    assert 0 <= factors.min() < 0.05 and 2.9 < factors.max() <= 3
    turned = JITTER(key, jnp.zeros((1, 1, 1, 3)).at[..., 0].set(1.0), hue=0.5)
    assert float(turned.max()) == 1


def test_a_share_of_the_images_stays(key, rng):
    images = jnp.asarray(rng.integers(60, 200, (400, 2, 2, 3), dtype=np.uint8))
    result = JITTER(key, images, brightness=(0.5, 0.5), p=0.8)
    changed = (np.asarray(result) != np.asarray(images)).any(axis=(1, 2, 3))
    assert 0.7 < changed.mean() < 0.9
    np.testing.assert_array_equal(
        JITTER(key, images, brightness=(0.5, 0.5), p=0.0), images
    )


def test_nothing_to_change_changes_nothing(key, rng):
    images = jnp.asarray(rng.integers(0, 256, (2, 3, 3, 3), dtype=np.uint8))
    np.testing.assert_array_equal(color_jitter(key, images), images)


def test_gray_images_have_brightness_and_contrast(key, rng):
    images = rng.integers(0, 256, (1, 4, 4, 1), dtype=np.uint8)
    result = JITTER(
        key, jnp.asarray(images), brightness=(0.9, 0.9), contrast=(0.5, 0.5)
    )
    x = images * 0.9
    expected = 0.5 * x + 0.5 * x.mean()
    assert np.abs(np.asarray(result) - expected).max() <= 0.501


def test_gradients_are_finite_even_at_gray_pixels(key, rng):
    images = jnp.asarray(rng.random((2, 3, 3, 3)), jnp.float32).at[0].set(0.5)
    gradient = jax.grad(lambda x: JITTER(key, x, contrast=0.4, hue=0.1).sum())(images)
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


@pytest.mark.parametrize(
    ("shape", "options", "words"),
    [
        ((1, 2, 2, 3), {"brightness": -0.1}, "brightness must be at least 0.*-0.1"),
        ((1, 2, 2, 3), {"contrast": (1.2, 0.8)}, r"contrast must be \(low, high\)"),
        ((1, 2, 2, 3), {"hue": 0.6}, r"hue must be .*0.5"),
        ((1, 2, 2, 3), {"hue": -0.1}, "hue must be"),
        ((1, 2, 2, 3), {"p": 1.5}, "p must be in 0 to 1, got 1.5"),
        ((1, 2, 2, 1), {"hue": 0.1}, "gray images have neither"),
        ((1, 2, 2, 4), {}, r"1 or 3 channels, got shape \(1, 2, 2, 4\)"),
    ],
)
def test_bad_arguments(key, shape, options, words):
    with pytest.raises(ValueError, match=words):
        color_jitter(key, jnp.zeros(shape, jnp.uint8), **options)
