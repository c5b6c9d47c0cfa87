"""mixup and cutmix: pairs, shares and labels, read off telling images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.data import cutmix, mixup, one_hot
from jaxaccel.train import classification_loss, masked_mean

STATIC = ("num_classes", "alpha", "p", "smoothing", "image", "label")
MIXUP = jax.jit(mixup, static_argnames=STATIC)
CUTMIX = jax.jit(cutmix, static_argnames=STATIC)


def marked(batch, mask=None):
    """Image i is 1 in channel i and 0 in the others; its class is i."""
    image = np.broadcast_to(
        np.eye(batch, dtype=np.float32)[:, None, None], (batch, 6, 5, batch)
    )
    columns = {"image": jnp.asarray(image), "label": jnp.arange(batch, dtype=jnp.uint8)}
    columns["id"] = jnp.arange(batch)
    return columns if mask is None else columns | {"mask": jnp.asarray(mask)}


def pairs(shares):
    """Partner of each example, from the `(batch, batch)` shares of a mixture."""
    others = np.array(shares)
    np.fill_diagonal(others, 0)
    assert ((others > 0).sum(axis=1) <= 1).all()
    return others.argmax(axis=1)


@pytest.mark.parametrize("mix", [MIXUP, CUTMIX])
def test_images_and_labels_are_mixed_alike_along_one_cycle(key, mix):
    batch = marked(12)
    mixed = mix(key, batch, num_classes=12, alpha=1.0)
    assert sorted(mixed) == ["id", "image", "label"]
    np.testing.assert_array_equal(mixed["id"], batch["id"])
    shares = np.asarray(mixed["image"]).mean(axis=(1, 2))
    np.testing.assert_allclose(mixed["label"], shares, atol=1e-6)
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-6)
    # Different for each example, and some of both.
    assert len(np.unique(np.diag(shares).round(4))) > 4
    if mix is CUTMIX:
        assert set(np.unique(mixed["image"]).tolist()) == {0, 1}
    else:
        partner, seen, at = pairs(shares), [], 0
        for _ in range(12):
            at = int(partner[at])
            seen.append(at)
        assert sorted(seen) == list(range(12))


def test_cutmix_pastes_one_rectangle_of_the_other_image(key, rng):
    images = rng.integers(0, 256, (64, 9, 7, 3), dtype=np.uint8)
    batch = {"image": jnp.asarray(images), "label": jnp.arange(64) % 50}
    mixed = CUTMIX(key, batch, num_classes=50)
    assert mixed["image"].dtype == jnp.uint8
    target = np.asarray(mixed["label"])
    assert target.dtype == np.float32
    changed = 0
    for i, out in enumerate(np.asarray(mixed["image"])):
        foreign = (out != images[i]).any(axis=-1)
        if not foreign.any():
            continue
        changed += 1
        rows, columns = (np.flatnonzero(foreign.any(axis=a)) for a in (1, 0))
        box = (slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1))
        sources = [j for j in range(64) if (images[j][box] == out[box]).all()]
        assert len(sources) == 1 and foreign[box].all()
        share = foreign.mean()
        expected = (1 - share) * np.eye(50)[i % 50] + share * np.eye(50)[
            sources[0] % 50
        ]
        np.testing.assert_allclose(target[i], expected, atol=1e-6)
    assert changed > 40


@pytest.mark.parametrize("alpha", [0.3, pytest.param(1.0, marks=pytest.mark.slow)])
def test_shares_follow_the_beta_law(key, alpha):
    images = jnp.zeros((4000, 1, 1, 1)).at[::2].set(1.0)
    mixed = MIXUP(
        key,
        {"image": images, "label": jnp.zeros((4000, 1))},
        num_classes=1,
        alpha=alpha,
    )
    share = np.asarray(mixed["image"])[::2, 0, 0, 0]
    share = share[share < 1]  # Those whose partner is a 0.
    assert abs(share.mean() - 0.5) < 0.06
    assert abs(share.var() - 1 / (4 * (2 * alpha + 1))) < 0.015


def test_a_share_of_the_examples_stays(key):
    batch = marked(100)
    mixed = MIXUP(key, batch, num_classes=100, alpha=1.0, p=0.3)
    stayed = (np.asarray(mixed["image"]) == np.asarray(batch["image"])).all(
        axis=(1, 2, 3)
    )
    assert 0.5 < stayed.mean() < 0.85
    hard = one_hot(batch["label"], 100)
    np.testing.assert_array_equal(mixed["label"][stayed], hard[stayed])


@pytest.mark.parametrize("mix", [MIXUP, CUTMIX])
@pytest.mark.parametrize("real", [0, 1, 5])
def test_padding_stays_and_is_nobodys_partner(mix, real):
    mask = np.arange(8) < real
    batch = marked(8, mask)
    for seed in range(4):
        mixed = mix(jax.random.key(seed), batch, num_classes=8, alpha=1.0)
        shares = np.asarray(mixed["label"])
        np.testing.assert_array_equal(mixed["mask"], mask)
        np.testing.assert_array_equal(mixed["image"][real:], batch["image"][real:])
        assert (shares[:real, real:] == 0).all()
        np.testing.assert_allclose(
            shares, np.asarray(mixed["image"]).mean(axis=(1, 2)), atol=1e-6
        )


@pytest.mark.parametrize("mix", [MIXUP, CUTMIX])
def test_what_is_not_blended_is_not_touched(key, mix):
    batch = marked(6)
    batch["image"] = batch["image"].at[2].set(jnp.inf)
    batch["label"] = batch["label"].astype(jnp.int32).at[4].set(-1)
    mixed = mix(key, batch, num_classes=6, p=0.0)
    np.testing.assert_array_equal(mixed["image"], batch["image"])
    np.testing.assert_array_equal(mixed["label"], one_hot(batch["label"], 6))


@pytest.mark.parametrize("mix", [mixup, cutmix])
def test_padding_stays_to_the_last_bit_without_jit(rng, mix):
    images = jnp.asarray(rng.standard_normal((32, 2, 2, 1)).astype(np.float32))
    labels = jnp.asarray(rng.random((32, 3)).astype(np.float32))
    batch = {"image": images, "label": labels, "mask": jnp.arange(32) < 3}
    mixed = mix(jax.random.key(1), batch, num_classes=3, alpha=1.0)
    np.testing.assert_array_equal(mixed["image"][3:], images[3:])
    np.testing.assert_array_equal(mixed["label"][3:], labels[3:])


def test_wide_labels_of_the_host_are_no_other_class(key):
    image = jnp.zeros((2, 3, 3, 1), jnp.uint8)
    batch = {"image": image, "label": np.array([2**32, 3 * 2**32 + 2])}
    assert np.isnan(cutmix(key, batch, num_classes=3)["label"]).all()


def test_one_after_the_other_and_smoothing(key):
    batch = marked(6)
    cut = CUTMIX(key, batch, num_classes=6, smoothing=0.3)
    both = MIXUP(jax.random.key(1), cut, num_classes=6, alpha=1.0)
    plain = np.asarray(both["image"]).mean(axis=(1, 2))
    np.testing.assert_allclose(both["label"], 0.7 * plain + 0.3 / 6, atol=1e-6)


def test_the_losses_take_the_labels(key):
    batch = marked(8, np.arange(8) < 4)
    mixed = MIXUP(key, batch, num_classes=8, alpha=1.0)

    def loss(image):
        logits = image.mean(axis=(1, 2))
        losses, metrics = classification_loss(logits, mixed)
        return masked_mean(losses, mixed), metrics["accuracy"]

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, accuracy), gradient = step(mixed["image"])
    assert np.isfinite(value) and (np.asarray(accuracy)[:4] == 1).all()
    assert np.isfinite(gradient).all() and (np.asarray(gradient)[4:] == 0).all()


def test_it_is_differentiable_in_the_images(key):
    batch = marked(4)

    def total(image):
        mixed = MIXUP(key, batch | {"image": image}, num_classes=4, alpha=1.0)
        return mixed["image"].sum()

    # A cycle of blends: what one image gives away another one gets.
    gradient = np.asarray(jax.grad(total)(batch["image"]))
    assert abs(gradient.sum() - batch["image"].size) < 1e-2


@pytest.mark.parametrize(
    ("change", "options", "error", "words"),
    [
        (
            {"image": jnp.zeros((2, 3, 3, 1), jnp.uint8)},
            {},
            TypeError,
            "normalize first",
        ),
        ({}, {"alpha": 0.0}, ValueError, "alpha must be positive"),
        ({}, {"p": 1.1}, ValueError, "p must be in 0 to 1"),
        ({}, {"num_classes": 0}, ValueError, "num_classes must be at least 1"),
        ({}, {"label": "y"}, ValueError, r"no 'y'; it holds \['image', 'label'\]"),
        ({"label": jnp.zeros((2, 4))}, {}, ValueError, r"\(2, 3\), got shape \(2, 4\)"),
        (
            {"label": jnp.zeros((2, 3))},
            {"smoothing": 0.1},
            ValueError,
            "smoothing is for integer labels",
        ),
        ({"label": jnp.zeros(3, int)}, {}, ValueError, r"\(2,\), got shape \(3,\)"),
        ({"label": jnp.zeros(2, bool)}, {}, TypeError, "integer dtype, got bool"),
        (
            {"mask": jnp.ones((2, 3, 3), bool)},
            {},
            ValueError,
            r"mask marks padding and must be \(batch,\).*another name",
        ),
        ({"image": jnp.zeros((2, 3, 3))}, {}, ValueError, r"got shape \(2, 3, 3\)"),
    ],
)
def test_bad_arguments(key, change, options, error, words):
    batch = {"image": jnp.zeros((2, 3, 3, 1)), "label": jnp.zeros(2, jnp.uint8)}
    with pytest.raises(error, match=words):
        mixup(key, batch | change, **({"num_classes": 3} | options))
