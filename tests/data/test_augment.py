"""random_crop_flip against NumPy, and what all augmentations have in common."""

from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    Loader,
    color_jitter,
    cutmix,
    cutout,
    make_normalizer,
    mixup,
    random_crop_flip,
    random_erasing,
    random_resized_crop,
    to_device,
)
from jaxaccel.train import TrainState, make_train_step, masked_mean


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


@hypothesis.settings(max_examples=5)
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


@pytest.mark.parametrize(
    ("axis_type", "mode"),
    [(AxisType.Auto, "constant"), (AxisType.Explicit, "reflect")],
)
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


SIZES = {"size": (4, 5), "scale": (0.3, 1.0)}
FUNCTIONS: dict[str, Callable[..., dict]] = {
    "crop_flip": lambda k, b: b | {"image": random_crop_flip(k, b["image"], pad=2)},
    "resized": lambda k, b: (
        b | {"image": random_resized_crop(k, b["image"], flip=True, **SIZES)}
    ),
    "jitter": lambda k, b: (
        b | {"image": color_jitter(k, b["image"], contrast=0.4, hue=0.1, p=0.8)}
    ),
    "cutout": lambda k, b: b | {"image": cutout(k, b["image"], 3)},
    "erasing": lambda k, b: b | {"image": random_erasing(k, b["image"])},
    "mixup": lambda k, b: mixup(
        k, b | {"image": normalize(b["image"])}, num_classes=10, alpha=1.0
    ),
    "cutmix": lambda k, b: cutmix(k, b, num_classes=10),
}
normalize = make_normalizer(0.5, 0.25)


def padded_batch(rng):
    return {
        "image": rng.integers(0, 256, (16, 5, 5, 3), dtype=np.uint8),
        "label": rng.integers(0, 10, 16).astype(np.uint8),
        "mask": np.arange(16) < 13,
    }


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_augmentation_in_jit(key, rng, name):
    """Decided by the key alone, of one shape, sharded as it came, and vmapped."""
    traces = []

    @jax.jit
    def augment(key, batch):
        traces.append(1)
        return FUNCTIONS[name](key, batch)

    batch = jax.tree.map(jnp.asarray, padded_batch(rng))
    once, again = augment(key, batch), augment(key, batch)
    other = augment(jax.random.key(1), batch)
    assert len(traces) == 1
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert (np.asarray(once["image"]) != np.asarray(other["image"])).any()
    np.testing.assert_array_equal(once["mask"], batch["mask"])
    if name != "mixup":
        assert once["image"].dtype == jnp.uint8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    sharded = augment(key, jax.device_put(batch, sharding))
    assert sharded["image"].sharding.is_equivalent_to(sharding, 4)
    # Sums may be taken in another order: one level, or float32's rounding.
    for x, y in zip(jax.tree.leaves(sharded), jax.tree.leaves(once), strict=True):
        difference = np.abs(np.asarray(x, np.float32) - np.asarray(y, np.float32))
        assert difference.max() <= (1 if x.dtype == jnp.uint8 else 1e-5)


@pytest.mark.parametrize("name", ["resized", "mixup", "cutmix"])
def test_on_an_explicit_mesh(key, rng, name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.device_put(padded_batch(rng), sharding)
    augmented = jax.jit(FUNCTIONS[name])(key, batch)
    assert augmented["image"].sharding.is_equivalent_to(sharding, 4)


@pytest.mark.parametrize("name", ["resized", "jitter", "cutout", "erasing", "cutmix"])
def test_types_other_than_images_are_refused(key, name):
    batch = {"image": jnp.zeros((2, 5, 5, 3), jnp.int32), "label": jnp.zeros(2, int)}
    with pytest.raises(TypeError, match="uint8 or floating, got int32"):
        FUNCTIONS[name](key, batch)


def test_a_resumed_run_repeats_the_augmentation(rng):
    store = ArrayStore(
        {
            "image": rng.integers(0, 256, (12, 6, 6, 3), dtype=np.uint8),
            "label": rng.integers(0, 10, 12).astype(np.uint8),
        }
    )
    plan = BatchPlan(12, 4, seed=3, epochs=2)

    def preprocess(batch, key):
        keys = jax.random.split(key)
        image = random_crop_flip(keys[0], batch["image"], pad=1)
        image = cutout(keys[1], image, 2)
        return {**batch, "image": normalize(image)}

    def loss_fn(params, model_state, batch, key):
        seen = masked_mean(batch["image"], batch)
        weights = jnp.arange(4.0) + 1
        print_of = (batch["image"].mean(axis=(1, 2, 3)) * weights).sum()
        return params * seen, (model_state, {"print": print_of})

    tx = optax.sgd(0.1)
    step = make_train_step(loss_fn, tx, preprocess=preprocess, donate=False)

    def run(state, position, count):
        states, prints = [], []
        with to_device(Loader(store, plan)) as batches:
            if position is not None:
                batches.set_state(position)
            for _ in range(count):
                state, metrics = step(state, next(batches))
                states.append((state, batches.get_state()))
                prints.append(float(metrics["print"]))
        return states, prints

    first = TrainState.create(jnp.array(1.0), tx, key=jax.random.key(0))
    states, prints = run(first, None, 6)
    assert len(set(prints)) == 6
    state, position = states[2]
    resumed, rest = run(state, position, 3)
    assert rest == prints[3:]
    assert float(resumed[-1][0].params) == float(states[-1][0].params)
