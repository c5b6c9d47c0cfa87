"""Data sets by name: fetched once, verified, memory-mapped from then on."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel import _fetch
from jaxaccel._fetch import Source
from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._cifar import convert_cifar10
from jaxaccel.data._files import gunzip, open_array
from jaxaccel.data._open import open_store


@dataclasses.dataclass(frozen=True)
class NamedDataset:
    """A data set with its train and test split.

    Attributes:
      name: The name it was loaded by.
      train: Store with the columns `image` (uint8, NHWC without the batch axis:
        height, width, channels) and `label` (uint8).
      test: The same for the test split.
      classes: Name of each class; labels index it.
      mean: Mean of the training pixels on the scale 0 to 1, for each channel.
      std: Their standard deviation, likewise.
      source: Where the files came from.
    """

    name: str
    train: ArrayStore
    test: ArrayStore
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    source: str


def load_dataset(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    download: bool = True,
) -> NamedDataset:
    """Loads a data set by name.

    - `"fashion_mnist"`: 60,000 + 10,000 gray images of 28x28, 10 classes.
    - `"digits"`: 1,437 + 360 gray images of 8x8, 10 classes, from scikit-learn;
      needs no download. Every fifth image, from the first on, is a test image;
      the values 0 to 16 are scaled to 0 to 255 and rounded.
    - `"cifar10"`: 50,000 + 10,000 colour images of 32x32, 10 classes.

    Files are looked for in the cache, then at the data set's official address,
    then (Fashion-MNIST) in Debian's package `dataset-fashion-mnist`. Everything
    fetched is verified by checksum before it gets its final name.

    Args:
      name: One of the names above.
      root: Cache folder; the files are in its sub-folder `name`. None takes the
        environment variable `JAXACCEL_DATA`, else `jaxaccel` in the user's cache.
      download: False uses only files that are already in the cache folder (for
        the archives as they are published, too).

    Returns:
      The data set.

    Raises:
      DatasetUnavailableError: If no source has it (an OSError); the message lists
        what was tried and the remedies.
      ImportError: If the digits are asked for without scikit-learn.
      ValueError: If the name is unknown.

    Examples:
      >>> from jaxaccel.data import load_dataset
      >>> digits = load_dataset("digits")
      >>> len(digits.train), len(digits.test), digits.train.spec["image"].shape
      (1437, 360, (8, 8, 1))

    References:
      Xiao, Rasul, Vollgraf: [Fashion-MNIST: a Novel Image Dataset for Benchmarking
      Machine Learning Algorithms](https://arxiv.org/abs/1708.07747), 2017.
      Krizhevsky: [Learning Multiple Layers of Features from Tiny Images](
      https://www.cs.toronto.edu/~kriz/learning-features-2009-TR.pdf), 2009.
    """
    if name not in _LOADERS:
        names = ", ".join(repr(known) for known in sorted(_LOADERS))
        raise ValueError(f"unknown data set {name!r}; choose one of {names}")
    return _LOADERS[name](_fetch.data_root(root) / name, download)


_FASHION_ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_FASHION_PACKAGE = "dataset-fashion-mnist"
_FASHION_INSTALLED = Path("/usr/share/datasets/fashion-mnist")
# SHA-256 of the decompressed files: the published and the packaged .gz differ.
_FASHION_FILES: dict[str, str | None] = {
    "train-images-idx3-ubyte": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
    ),
    "train-labels-idx1-ubyte": (
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
    ),
    "t10k-images-idx3-ubyte": (
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
    ),
    "t10k-labels-idx1-ubyte": (
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
    ),
}


_CIFAR_ADDRESS = "https://www.cs.toronto.edu/~kriz/"
_CIFAR_ARCHIVE = "cifar-10-binary.tar.gz"
_CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d13530"
_CIFAR_EXAMPLES = {"train": 50_000, "test": 10_000}
_CIFAR_FILES: dict[str, str | None] = {
    f"{split}-{column}.npy": None
    for split in ("train", "test")
    for column in ("image", "label")
}


def _load_fashion_mnist(folder: Path, online: bool) -> NamedDataset:
    sources = []
    if any(_archive(folder, name).is_file() for name in _FASHION_FILES):
        local = functools.partial(_gunzip_fashion, folder)
        sources.append(Source("archives in the cache folder", local))
    if online:
        sources += [
            Source(f"official address {_FASHION_ADDRESS}", _download_fashion),
            Source(f"Debian package {_FASHION_PACKAGE}", _unpack_fashion),
        ]
    origin = _fetch.fetch_files(folder, _FASHION_FILES, sources)
    return NamedDataset(
        name="fashion_mnist",
        train=_open_idx_pair(folder, "train"),
        test=_open_idx_pair(folder, "t10k"),
        classes=(
            "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
            "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
        ),
        mean=(0.2860405969887955,),
        std=(0.35302424451492254,),
        source=origin,
    )  # fmt: skip


def _open_idx_pair(folder: Path, split: str) -> ArrayStore:
    images = open_array(folder / f"{split}-images-idx3-ubyte")
    labels = open_array(folder / f"{split}-labels-idx1-ubyte")
    return ArrayStore({"image": images[..., None], "label": labels})


def _download_fashion(work: Path) -> None:
    for name in _FASHION_FILES:
        address = f"{_FASHION_ADDRESS}{name}.gz"
        _fetch.download(address, _archive(work, name), max_bytes=64 << 20)
    _gunzip_fashion(work, work)


def _unpack_fashion(work: Path) -> None:
    folder = _FASHION_INSTALLED
    if not folder.is_dir():
        content = _fetch.unpack_debian_package(_FASHION_PACKAGE, work)
        folder = content / folder.relative_to("/")
    _gunzip_fashion(folder, work)


def _gunzip_fashion(archives: Path, work: Path) -> None:
    for name in _FASHION_FILES:
        archive = _archive(archives, name)
        with archive.open("rb") as file:
            (work / name).write_bytes(gunzip(archive, file))


def _archive(folder: Path, name: str) -> Path:
    return folder / f"{name}.gz"


def _load_cifar10(folder: Path, online: bool) -> NamedDataset:
    sources = []
    if (folder / _CIFAR_ARCHIVE).is_file():
        local = functools.partial(_convert_cifar, folder / _CIFAR_ARCHIVE)
        sources.append(Source("archive in the cache folder", local))
    if online:
        official = f"official address {_CIFAR_ADDRESS}{_CIFAR_ARCHIVE}"
        sources.append(Source(official, _download_cifar))
    origin = _fetch.fetch_files(
        folder,
        _CIFAR_FILES,
        sources,
        published=[_CIFAR_ARCHIVE],
        check=_check_cifar,
    )
    train, test = (_open_cifar(folder, split) for split in ("train", "test"))
    return NamedDataset(
        name="cifar10",
        train=train,
        test=test,
        classes=(
            "airplane", "automobile", "bird", "cat", "deer",
            "dog", "frog", "horse", "ship", "truck",
        ),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        source=origin,
    )  # fmt: skip


def _open_cifar(folder: Path, split: str) -> ArrayStore:
    return open_store(
        {column: folder / f"{split}-{column}.npy" for column in ("image", "label")}
    )


def _check_cifar(folder: Path) -> None:
    for split, examples in _CIFAR_EXAMPLES.items():
        store = _open_cifar(folder, split)
        wanted = {"image": ((32, 32, 3), np.uint8), "label": ((), np.uint8)}
        if len(store) != examples or dict(store.spec) != wanted:
            raise ValueError(
                f"the {split} files hold {store}; CIFAR-10 has {examples} images "
                "uint8[32, 32, 3] and labels uint8[]"
            )
        if (largest := store.columns["label"].max()) > 9:
            raise ValueError(f"the {split} labels go up to {largest}, not 9")


def _download_cifar(work: Path) -> None:
    archive = work / _CIFAR_ARCHIVE
    _fetch.download(_CIFAR_ADDRESS + _CIFAR_ARCHIVE, archive, max_bytes=200 << 20)
    _convert_cifar(archive, work)


def _convert_cifar(archive: Path, work: Path) -> None:
    found = _fetch.file_digest(archive, "md5")
    if found != _CIFAR_MD5:
        raise ValueError(f"{archive.name} has MD5 {found}, expected {_CIFAR_MD5}")
    convert_cifar10(archive, work)


def _load_digits(folder: Path, online: bool) -> NamedDataset:
    del folder, online
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError(
            "the digits data set ships in scikit-learn: "
            "pip install 'jaxaccel[examples]'"
        ) from None
    digits: Any = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., None]
    labels = digits.target.astype(np.uint8)
    # The images of one writer stand together: a stride shares writers out to
    # both splits, without a generator whose stream might change.
    is_test = np.arange(len(labels)) % 5 == 0
    pixels = images[~is_test] / 255.0
    return NamedDataset(
        name="digits",
        train=ArrayStore({"image": images[~is_test], "label": labels[~is_test]}),
        test=ArrayStore({"image": images[is_test], "label": labels[is_test]}),
        classes=tuple("0123456789"),
        mean=(float(pixels.mean()),),
        std=(float(pixels.std()),),
        source="scikit-learn",
    )


_LOADERS: dict[str, Callable[[Path, bool], NamedDataset]] = {
    "cifar10": _load_cifar10,
    "digits": _load_digits,
    "fashion_mnist": _load_fashion_mnist,
}
