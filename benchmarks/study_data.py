"""The two data sets of the transformations' study, in three splits each.

Validation images choose the learning rates, test images are looked at once, at the
end of a run. No pixel is in two splits.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxaccel.data import ArrayStore, load_dataset

CLASSES = 10
SEED = 2026

# Real photographs that ship inside two packages; a class each.
PHOTOS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}
BLOCK, PATCH = 64, 32
TEST_SHARE, VALIDATION_SHARE = 0.25, 0.15

Parts = tuple[ArrayStore, ArrayStore, ArrayStore]


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set; every store has the columns `image` and `label`, both uint8."""

    name: str
    train: ArrayStore
    validation: ArrayStore
    test: ArrayStore
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load(name: str, train: int, validation: int, test: int) -> Splits:
    """Returns the data set with so many images in its splits."""
    parts = LOADERS[name](train, validation, test)
    pixels = parts[0].columns["image"].astype(np.float64) / 255
    axes = tuple(range(pixels.ndim - 1))
    mean, std = pixels.mean(axis=axes), pixels.std(axis=axes)
    return Splits(name, *parts, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def fashion_mnist(train: int, validation: int, test: int) -> Parts:
    """Rows of Fashion-MNIST in a fixed random order, validation after training."""
    dataset = load_dataset("fashion_mnist")
    if train + validation > len(dataset.train) or test > len(dataset.test):
        raise ValueError(
            f"Fashion-MNIST has {len(dataset.train)} training and {len(dataset.test)} "
            f"test images; {train} for training and {validation} for validation, and "
            f"{test} for testing, are more. Ask for fewer"
        )
    rows = np.random.default_rng(SEED).permutation(len(dataset.train))
    return (
        ArrayStore(dataset.train.take(np.sort(rows[:train]))),
        ArrayStore(dataset.train.take(np.sort(rows[train : train + validation]))),
        ArrayStore(dataset.test.take(np.arange(test))),
    )


def photo_patches(train: int, validation: int, test: int) -> Parts:
    """PhotoPatch-10: which photograph is a patch of 32x32 pixels from?

    A photograph is cut into blocks of 64x64 pixels, and each block belongs to one
    split. A patch lies within one block, so that no pixel is in two splits.
    """
    stores = [([], []) for _ in range(3)]
    for label, photo in enumerate(PHOTOS):
        pixels = read_photo(photo)
        rng = np.random.default_rng([SEED, label])
        for store, blocks, size in zip(
            stores,
            split_blocks(pixels.shape, rng),
            (train, validation, test),
            strict=True,
        ):
            # The first classes take what does not divide evenly.
            count = size // CLASSES + (label < size % CLASSES)
            store[0].append(cut(pixels, blocks, count, rng))
            store[1].append(np.full(count, label, np.uint8))
    first, second, third = (
        ArrayStore({"image": np.concatenate(images), "label": np.concatenate(labels)})
        for images, labels in stores
    )
    return first, second, third


def split_blocks(shape: tuple[int, ...], rng: np.random.Generator) -> list[np.ndarray]:
    """Corners of the blocks of each split: training, validation, test."""
    rows, columns = shape[0] // BLOCK, shape[1] // BLOCK
    corners = BLOCK * np.indices((rows, columns)).reshape(2, -1).T
    corners = rng.permutation(corners)
    test = round(TEST_SHARE * len(corners))
    validation = test + round(VALIDATION_SHARE * len(corners))
    return [corners[validation:], corners[test:validation], corners[:test]]


def cut(
    pixels: np.ndarray, blocks: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Cuts distinct patches at random places within the blocks."""
    offsets = BLOCK - PATCH + 1
    places = len(blocks) * offsets**2
    if count > places:
        raise ValueError(
            f"{count} patches of a photograph were asked for, but its blocks of this "
            f"split hold only {places}; ask for at most {places * CLASSES} images"
        )
    chosen = rng.choice(places, count, replace=False)
    block, row, column = np.unravel_index(chosen, (len(blocks), offsets, offsets))
    corners = blocks[block] + np.stack([row, column], axis=-1)
    windows = np.lib.stride_tricks.sliding_window_view(pixels, (PATCH, PATCH, 3))
    return windows[corners[:, 0], corners[:, 1], 0]


def read_photo(name: str) -> np.ndarray:
    """Reads the RGB pixels of one of `PHOTOS`."""
    package, path = PHOTOS[name]
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None or importlib.util.find_spec("PIL") is None:
        raise ImportError(
            "PhotoPatch-10 is cut from photographs that ship with scikit-image and "
            "scikit-learn: pip install 'jaxaccel[study]'"
        )
    from PIL import Image

    with Image.open(Path(found.origin).parent / path) as image:
        return np.asarray(image.convert("RGB"))


LOADERS: dict[str, Callable[[int, int, int], Parts]] = {
    "fashion_mnist": fashion_mnist,
    "photo_patches": photo_patches,
}
