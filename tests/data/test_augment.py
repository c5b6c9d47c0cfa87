"""random_crop_flip against np.pad and slicing, image by image."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel.data import random_crop_flip


def all_outcomes(image, pad, mode, flip):
    """Each shift and mirroring of one image, by NumPy: outcome -> bytes."""
    height, width, _ = image.shape
    padded = np.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode=mode)
    outcomes = {}
    for dy in range(2 * pad + 1):
        for dx in range(2 * pad + 1):
            crop = padded[dy : dy + height, dx : dx + width]
            outcomes[dy, dx, False] = crop.tobytes()
            if flip:
                outcomes[dy, dx, True] = crop[:, ::-1].tobytes()
    return outcomes


AUGMENT = jax.jit(random_crop_flip, static_argnames=("pad", "mode", "flip"))


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    size=st.tuples(st.integers(1, 4), st.integers(3, 7), st.integers(3, 7)),
    channels=st.sampled_from([1, 3]),
    pad=st.integers(0, 4),
    mode=st.sampled_from(["reflect", "constant", "edge"]),
    flip=st.booleans(),
    seed=st.integers(0, 100),
)
def test_every_image_is_one_of_its_outcomes(size, channels, pad, mode, flip, seed):
    hypothesis.assume(mode != "reflect" or pad < min(size[1:]))
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (*size, channels), dtype=np.uint8)
    result = AUGMENT(
        jax.random.key(seed), jnp.asarray(images), pad=pad, mode=mode, flip=flip
    )
    assert result.dtype == jnp.uint8 and result.shape == images.shape
    for image, out in zip(images, np.asarray(result), strict=True):
        assert out.tobytes() in all_outcomes(image, pad, mode, flip).values()


@pytest.mark.parametrize("mode", ["reflect", "constant", "edge"])
def test_all_outcomes_are_equally_likely_and_independent(key, rng, mode):
    image = rng.integers(1, 256, (6, 7, 3), dtype=np.uint8)
    count = 9000
    images = jnp.broadcast_to(image, (count, *image.shape))
    result = np.asarray(AUGMENT(key, images, pad=1, mode=mode))
    names = {content: n for n, content in all_outcomes(image, 1, mode, True).items()}
    found = [names[out.tobytes()] for out in result]
    counts = np.unique(np.array(found), axis=0, return_counts=True)[1]
    # Chi-squared with 17 degrees of freedom; 60 has probability 1e-6.
    expected = count / 18
    assert len(counts) == 18
    assert ((counts - expected) ** 2 / expected).sum() < 60


def test_the_key_decides(key, rng):
    images = jnp.asarray(rng.integers(0, 256, (8, 9, 9, 1), dtype=np.uint8))
    once = random_crop_flip(key, images)
    again = AUGMENT(key, images)
    np.testing.assert_array_equal(once, again)
    other = AUGMENT(jax.random.key(1), images)
    assert (np.asarray(once) != np.asarray(other)).any()


def test_vmap_over_batches(key, rng):
    images = jnp.asarray(rng.integers(0, 256, (2, 3, 5, 5, 1), dtype=np.uint8))
    keys = jax.random.split(key, 2)
    both = jax.vmap(lambda k, x: AUGMENT(k, x, pad=2))(keys, images)
    for k, x, y in zip(keys, images, both, strict=True):
        np.testing.assert_array_equal(AUGMENT(k, x, pad=2), y)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("mode", ["reflect", "constant"])
def test_a_sharded_batch_stays_sharded(key, rng, axis_type, mode):
    images = rng.integers(0, 256, (16, 5, 5, 3), dtype=np.uint8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    augment = jax.jit(lambda k, x: random_crop_flip(k, x, pad=2, mode=mode))
    sharded = augment(key, jax.device_put(images, sharding))
    assert sharded.sharding.is_equivalent_to(sharding, 4)
    np.testing.assert_array_equal(sharded, augment(key, images))


@pytest.mark.parametrize(
    ("shape", "options", "error", "words"),
    [
        ((2, 4, 4), {}, ValueError, r"\(2, 4, 4\); gray images"),
        ((2, 4, 9, 1), {}, ValueError, r"pad 4 is too wide.*\(4, 9\); use 3 at most"),
        ((2, 9, 9, 1), {"pad": -1}, ValueError, "pad must be at least 0, got -1"),
        ((2, 9, 9, 1), {"mode": "wrap"}, ValueError, "got 'wrap'"),
    ],
)
def test_bad_arguments(key, shape, options, error, words):
    with pytest.raises(error, match=words):
        random_crop_flip(key, jnp.zeros(shape, jnp.uint8), **options)


def test_floats_are_refused(key):
    with pytest.raises(TypeError, match="uint8, got float32; augment before"):
        random_crop_flip(key, jnp.zeros((2, 9, 9, 1)))
