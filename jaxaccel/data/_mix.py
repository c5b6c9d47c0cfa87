"""mixup and cutmix, inside jit: two images into one, and their labels."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.data._checks import as_count
from jaxaccel.data._images import (
    Boxes,
    as_share,
    check_images,
    check_key,
    is_inside,
    place,
    replicate,
    take_examples,
)
from jaxaccel.data._labels import as_labels, one_hot


def mixup(
    key: jax.Array,
    batch: Mapping[str, Any],
    *,
    num_classes: int,
    alpha: float = 0.2,
    p: float = 1.0,
    smoothing: float = 0.0,
    image: str = "image",
    label: str = "label",
) -> dict[str, Any]:
    r"""Blends each image with another one of the batch, and their labels likewise.

    $x = \lambda x_i + (1 - \lambda) x_j$ and $y = \lambda y_i + (1 - \lambda) y_j$
    with $\lambda \sim \mathrm{Beta}(\alpha, \alpha)$ drawn for each example. The
    partners are a random cycle through the batch: each image is the partner of one
    other. Padding (`mask` false) stays as it is and is nobody's partner.

    Blends of bytes would have to be rounded, so this takes floating images:
    normalize first.

    Args:
      key: PRNG key; the same key repeats the same blends.
      batch: Holds the images, `(batch, height, width, channels)`, floating, the labels
        and perhaps a `mask`. Labels are integers, `(batch,)`, or already soft:
        floating, `(batch, num_classes)`.
      num_classes: Number of classes.
      alpha: The higher, the more even the blends: 1 is uniform.
      p: Share of the examples that are blended.
      smoothing: Label smoothing of integer labels, as in `one_hot`.
      image: Name of the images' column.
      label: Name of the labels' column.

    Returns:
      The batch with both columns replaced: images in their dtype, labels
      `(batch, num_classes)` float32, as `jaxaccel.train.classification_loss`
      takes them. The other columns stay.

    Raises:
      TypeError: If the images are not floating, or the labels have no fit dtype.
      ValueError: If a column is missing, a shape does not fit, or a number is out
        of range.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxaccel.data import mixup
      >>> batch = {"image": jnp.arange(2.0).reshape(2, 1, 1, 1),
      ...          "label": jnp.array([0, 1], jnp.uint8)}
      >>> mixed = mixup(jax.random.key(0), batch, num_classes=2, alpha=1.0)
      >>> bool(jnp.allclose(mixed["image"][:, 0, 0, 0], mixed["label"][:, 1]))
      True

    References:
      Zhang et al., *mixup: Beyond Empirical Risk Minimization*, 2017,
      arXiv:1710.09412
    """
    check_key(key)
    images, targets = _read(batch, image, label, num_classes, smoothing)
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise TypeError(
            f"mixup blends floating images, got {images.dtype}; normalize first, for "
            "blends of bytes would have to be rounded"
        )
    key_pair, key_share, key_choice = jax.random.split(key, 3)
    partner = _partners(key_pair, len(images), batch.get("mask"))
    share = _shares(key_share, key_choice, len(images), alpha, p)
    mixed = _blend(images.astype(jnp.float32), partner, share)
    return {
        **batch,
        image: mixed.astype(images.dtype),
        label: _blend(targets, partner, share),
    }


def cutmix(
    key: jax.Array,
    batch: Mapping[str, Any],
    *,
    num_classes: int,
    alpha: float = 1.0,
    p: float = 1.0,
    smoothing: float = 0.0,
    image: str = "image",
    label: str = "label",
) -> dict[str, Any]:
    r"""Pastes a rectangle of another image of the batch into each image.

    The rectangle has the image's ratio of sides, a share of $1 - \lambda$ of its
    area, $\lambda \sim \mathrm{Beta}(\alpha, \alpha)$ for each example, and a
    centre uniform over the image; what lies outside is cut off. Labels are blended
    by the number of pixels that each image really has. Partners and padding are as
    in `mixup`.

    It is exact on uint8: cut before normalizing, on a quarter of the bytes.

    Args:
      key: PRNG key; the same key repeats the same rectangles.
      batch: As for `mixup`, but the images may be uint8.
      num_classes: Number of classes.
      alpha: 1 makes all areas equally likely.
      p: Share of the examples that are changed.
      smoothing: Label smoothing of integer labels, as in `one_hot`.
      image: Name of the images' column.
      label: Name of the labels' column.

    Returns:
      The batch with both columns replaced, as for `mixup`.

    Raises:
      TypeError: If the images are neither uint8 nor floating, or the labels have no
        fit dtype.
      ValueError: If a column is missing, a shape does not fit, or a number is out
        of range.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxaccel.data import cutmix
      >>> batch = {"image": jnp.zeros((2, 8, 8, 1), jnp.uint8).at[1].set(1),
      ...          "label": jnp.array([0, 1], jnp.uint8)}
      >>> mixed = cutmix(jax.random.key(0), batch, num_classes=2)
      >>> ones = mixed["image"].astype(jnp.float32).mean(axis=(1, 2, 3))
      >>> bool(jnp.allclose(ones, mixed["label"][:, 1]))
      True

    References:
      Yun et al., *CutMix: Regularization Strategy to Train Strong Classifiers with
      Localizable Features*, 2019, arXiv:1905.04899
    """
    check_key(key)
    images, targets = _read(batch, image, label, num_classes, smoothing)
    key_pair, key_share, key_choice, key_place = jax.random.split(key, 4)
    partner = _partners(key_pair, len(images), batch.get("mask"))
    share = _shares(key_share, key_choice, len(images), alpha, p)
    boxes = _cut_boxes(key_place, images, share)
    other = take_examples(images, partner)
    pixels = images.shape[1] * images.shape[2]
    kept = 1 - (boxes.height * boxes.width).astype(jnp.float32) / pixels
    return {
        **batch,
        image: jnp.where(is_inside(boxes, images), other, images),
        label: _blend(targets, partner, kept),
    }


def _read(
    batch: Mapping[str, Any], image: str, label: str, num_classes: int, smoothing: float
) -> tuple[jax.Array, jax.Array]:
    """The images and soft labels of a batch."""
    for name in (image, label):
        if name not in batch:
            raise ValueError(
                f"the batch has no {name!r}; it holds {sorted(batch)}. Name the "
                "columns with image= and label="
            )
    images, labels = jnp.asarray(batch[image]), as_labels(batch[label])
    check_images(images)
    mask = batch.get("mask")
    if mask is not None and jnp.shape(mask) != images.shape[:1]:
        raise ValueError(
            f"the batch's mask marks padding and must be (batch,), {images.shape[:1]}, "
            f"got shape {jnp.shape(mask)}; give masks of pixels another name"
        )
    classes = as_count("num_classes", num_classes, 1)
    if jnp.issubdtype(labels.dtype, jnp.floating):
        if labels.shape != (len(images), classes):
            raise ValueError(
                f"soft labels must be (batch, num_classes), {(len(images), classes)}, "
                f"got shape {labels.shape}"
            )
        if smoothing:
            raise ValueError(
                "smoothing is for integer labels; smooth soft ones where they are "
                f"made, got smoothing {smoothing}"
            )
        return images, labels.astype(jnp.float32)
    if labels.shape != images.shape[:1]:
        raise ValueError(
            f"labels must be (batch,), {images.shape[:1]}, got shape {labels.shape}"
        )
    return images, one_hot(labels, classes, smoothing=smoothing)


def _partners(key: jax.Array, batch: int, mask: Any) -> jax.Array:
    """Row of each example's partner: the next one in a random order of the batch."""
    order_by, count = jax.random.uniform(key, (batch,)), batch
    if mask is not None:
        mask = replicate(jnp.asarray(mask).astype(bool))
        order_by, count = jnp.where(mask, order_by, 2.0), mask.sum(dtype=jnp.int32)
    order = jnp.argsort(order_by)
    rank = jnp.arange(batch)
    # Padding comes last in the order; it is its own partner.
    following = jnp.where(rank < count, (rank + 1) % jnp.maximum(count, 1), rank)
    return jnp.zeros_like(order).at[order].set(order[following])


def _shares(
    key: jax.Array, key_choice: jax.Array, batch: int, alpha: float, p: float
) -> jax.Array:
    """Share of itself that each example keeps."""
    if not 0 < alpha < float("inf"):
        raise ValueError(f"alpha must be positive and finite, got {alpha}")
    p = as_share("p", p)
    if alpha == 1:
        share = jax.random.uniform(key, (batch,))
    else:
        share = jax.random.beta(key, alpha, alpha, (batch,))
    if p < 1:
        share = jnp.where(jax.random.bernoulli(key_choice, p, (batch,)), share, 1.0)
    return share


def _cut_boxes(key: jax.Array, images: jax.Array, share: jax.Array) -> Boxes:
    def cut(draws: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        length = jnp.floor(size * jnp.sqrt(1 - share)).astype(jnp.int32)
        start = place(draws, size) - length // 2
        stop = jnp.minimum(start + length, size)
        start = jnp.maximum(start, 0)
        return start, stop - start

    draws = jax.random.uniform(key, (2, len(images)))
    top, height = cut(draws[0], images.shape[1])
    left, width = cut(draws[1], images.shape[2])
    return Boxes(top, left, height, width)


def _blend(array: jax.Array, partner: jax.Array, share: jax.Array) -> jax.Array:
    """What each example keeps of itself, and the rest of its partner."""
    other = take_examples(array, partner)
    # Padding is its own partner.
    share = jnp.where(partner == jnp.arange(len(partner)), 1.0, share)
    share = share.reshape(-1, *[1] * (array.ndim - 1))
    mixed = share * array + (1 - share) * other
    # Nothing of the other one: not a rounding error, nor 0 times its infinity.
    mixed = jnp.where(share < 1, mixed, array)
    return jnp.where(share > 0, mixed, other)
