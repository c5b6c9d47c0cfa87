"""random_resized_crop against Pillow, image by image."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jaxaccel.data import random_resized_crop
from jaxaccel.data._crops import resize_boxes
from jaxaccel.data._images import Boxes

CROP = jax.jit(
    random_resized_crop,
    static_argnames=("size", "scale", "ratio", "flip", "antialias"),
)

RESIZE = jax.jit(resize_boxes, static_argnames="size")


def by_pillow(image, box, size):
    """Cuts out (top, left, height, width) and resizes to (height, width)."""
    top, left, height, width = (int(x) for x in box)
    part = image[top : top + height, left : left + width]
    planes = [
        Image.fromarray(part[..., c]).resize(size[::-1], Image.Resampling.BILINEAR)
        for c in range(image.shape[-1])
    ]
    return np.stack([np.asarray(plane) for plane in planes], axis=-1)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((12, 9, 13, 3), (5, 17)),
        ((12, 20, 8, 1), (3, 8)),
        ((2, 1, 1, 2), (1, 3)),
    ],
)
def test_resizing_boxes_equals_pillow(rng, shape, size):
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    height = rng.integers(1, shape[1] + 1, shape[0])
    width = rng.integers(1, shape[2] + 1, shape[0])
    top = rng.integers(0, shape[1] - height + 1)
    left = rng.integers(0, shape[2] - width + 1)
    boxes = np.stack([top, left, height, width], axis=1)
    columns = (jnp.asarray(x, jnp.int32) for x in boxes.T)
    result = RESIZE(jnp.asarray(images), Boxes(*columns), size)
    assert result.shape == (shape[0], *size, shape[3]) and result.dtype == jnp.uint8
    for image, box, out in zip(images, boxes, np.asarray(result), strict=True):
        # Pillow rounds twice, in fixed-point numbers.
        difference = out.astype(int) - by_pillow(image, box, size)
        assert np.abs(difference).max() <= 1


@pytest.mark.parametrize("flip", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_crop_is_one_that_pillow_makes(key, rng, flip):
    image = rng.integers(0, 256, (8, 6, 3), dtype=np.uint8)
    images = jnp.broadcast_to(image, (400, *image.shape))
    # A quarter of 48 pixels at a ratio of 4 / 3: 3 high and 4 wide.
    result = np.asarray(
        CROP(key, images, 5, scale=(0.25, 0.25), ratio=(4 / 3, 4 / 3), flip=flip)
    )
    outcomes = []
    for top in range(6):
        for left in range(3):
            crop = by_pillow(image, (top, left, 3, 4), (5, 5)).astype(int)
            outcomes += [crop, crop[:, ::-1]] if flip else [crop]
    distance = np.abs(result[:, None].astype(int) - np.stack(outcomes)[None])
    distance = distance.max(axis=(2, 3, 4))
    found = distance.argmin(axis=1)
    assert (distance.min(axis=1) <= 1).all()
    # Chi-squared with 35 or 17 degrees of freedom; both have p < 1e-6.
    counts = np.bincount(found, minlength=len(outcomes))
    expected = 400 / len(outcomes)
    assert ((counts - expected) ** 2 / expected).sum() < 90


def drawn_boxes(images, scale, ratio, **options):
    """What is cut out, read off images that hold their own coordinates."""
    height, width = images.shape[1:3]
    rows = jnp.broadcast_to(
        jnp.arange(height, dtype=jnp.float32)[:, None], (height, width)
    )
    columns = jnp.broadcast_to(jnp.arange(width, dtype=jnp.float32), (height, width))
    grid = jnp.stack([rows, columns], axis=-1)
    grid = jnp.broadcast_to(grid, (len(images), height, width, 2))
    crops = CROP(jax.random.key(2), grid, 64, scale=scale, ratio=ratio, antialias=False)
    crops = np.asarray(crops)
    # Enlarged 64-fold or less, the ends of the box are its first and last pixels.
    top, left = crops[:, 0, 0, 0], crops[:, 0, 0, 1]
    bottom, right = crops[:, -1, -1, 0], crops[:, -1, -1, 1]
    return top, left, bottom - top + 1, right - left + 1


def test_areas_and_ratios_follow_the_ranges():
    images = np.zeros((600, 64, 64, 1), np.uint8)
    top, left, height, width = drawn_boxes(images, (0.2, 0.5), (0.5, 2.0))
    share, ratio = height * width / 64**2, width / height
    # Rounding to whole pixels moves a share and a ratio by a few percent.
    assert share.min() > 0.19 and share.max() < 0.52
    assert ratio.min() > 0.48 and ratio.max() < 2.1
    assert abs(share.mean() - 0.35) < 0.015
    assert abs(np.log(ratio).mean()) < 0.06
    assert ((top >= 0) & (left >= 0)).all()
    assert ((top + height <= 64) & (left + width <= 64)).all()
    # A place uniform in 0 to 64 - height.
    place = top / np.maximum(64 - height, 1)
    assert abs(place.mean() - 0.5) < 0.05 and place.min() < 0.05 < 0.95 < place.max()


@pytest.mark.parametrize(
    ("shape", "ratio", "box"),
    [
        ((64, 16), (1.0, 1.0), (24, 0, 16, 16)),
        pytest.param((16, 64), (1.0, 1.0), (0, 24, 16, 16), marks=pytest.mark.slow),
        pytest.param((16, 64), (4.0, 4.0), (0, 0, 16, 64), marks=pytest.mark.slow),
    ],
)
def test_where_no_draw_fits_the_centre_is_taken(shape, ratio, box):
    images = np.zeros((3, *shape, 1), np.uint8)
    found = np.stack(drawn_boxes(images, (1.0, 1.0), ratio), axis=1)
    np.testing.assert_allclose(found, [box] * 3, atol=1e-4)


def test_without_antialias_two_neighbours_are_interpolated(key):
    ramp = jnp.arange(8, dtype=jnp.float32).reshape(1, 1, 8, 1)
    ramp = jnp.broadcast_to(ramp, (1, 8, 8, 1))
    options = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}
    plain = CROP(key, ramp, 2, antialias=False, **options)[0, 0, :, 0]
    np.testing.assert_allclose(plain, [1.5, 5.5], rtol=1e-6)
    spike = jnp.zeros((1, 8, 8, 1)).at[0, :, 4].set(1.0)
    assert float(CROP(key, spike, 2, antialias=False, **options).max()) == 0
    assert float(CROP(key, spike, 2, **options).max()) > 0


def test_it_is_differentiable_in_floating_images(rng):
    images = jnp.asarray(rng.random((2, 5, 5, 1)), jnp.float32)
    boxes = Boxes(*(jnp.array(x) for x in ([0, 1], [2, 0], [5, 3], [3, 4])))
    gradient = jax.grad(lambda x: RESIZE(x, boxes, (4, 4)).sum())(images)
    # Each new pixel is an average, so the gradient sums to their number.
    assert abs(float(gradient.sum()) - 2 * 16) < 1e-3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"size": 0}, "size must be one number .*got 0"),
        ({"size": (4, 4, 4)}, r"got \(4, 4, 4\)"),
        ({"scale": (0.5, 1.5)}, r"scale must be .*<= 1, got \(0.5, 1.5\)"),
        ({"scale": (0.0, 0.5)}, "0 < low <= high"),
        ({"ratio": (2.0, 1.0)}, r"ratio must be .*got \(2.0, 1.0\)"),
        ({"ratio": (1.0, float("inf"))}, "0 < low <= high"),
    ],
)
def test_bad_arguments(key, options, words):
    options = {"size": 4} | options
    with pytest.raises(ValueError, match=words):
        random_resized_crop(key, jnp.zeros((2, 9, 9, 1), jnp.uint8), **options)
