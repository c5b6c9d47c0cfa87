"""Folders of images, one folder for each class."""

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._decode import decode_images, probe_image
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import Format, OpenOptions
from jaxaccel.data._integers import can_cast
from jaxaccel.data._store import ColumnSpec, Store, aligned_empty, digest, encoded_name

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
# Folders of these names, with folders of images in them, are no classes.
_SPLITS = {"dev", "test", "testing", "train", "training", "val", "valid", "validation"}


class ImageFolderStore(Store):
    """The images in `<root>/<class>/`, at any depth, with their class as `label`.

    Classes are numbered in the order of their names, whether or not they hold images,
    so that folders with the same classes agree; images come class by class, in the
    order of their paths. Hidden folders and files that are not named as images are
    left out.

    Args:
      root: The folder of the classes.
      options: How to read the images.
      tolerant: Whether the first image may be damaged; the first one that is not
        then says which size they have.

    Attributes:
      class_names: Name of each label.

    Raises:
      DataCorruptionError: If the first image is damaged.
      FileNotFoundError: If there is a link to something that is not there.
      ValueError: If there is no image in any sub-folder, or columns are asked for
        that this format does not have; or if the folders are `train`, `test` and so
        on, with the classes inside.
    """

    _sampled = "spread"

    def __init__(self, root: Path, options: OpenOptions, *, tolerant: bool = False):
        self._root, self._options = root.absolute(), options
        folders = sorted(_folders(self._root))
        files = [(file, i) for i, name in enumerate(folders) for file in
                 _images(self._root / name)]  # fmt: skip
        if not files:
            raise ValueError(
                f"the folder {root} holds no <column>.npy file, no file of another "
                f"format, and no sub-folder with images (*{', *'.join(_SUFFIXES)}); "
                f"images are expected as {root}/<class>/<image>.jpg"
            )
        self._refuse_splits(folders, [file for file, _ in files])
        self.class_names = tuple(folders)
        self._files = [os.path.relpath(file, self._root) for file, _ in files]
        dtype = np.min_scalar_type(len(folders) - 1)
        self._labels = np.array([label for _, label in files], dtype)
        super().__init__(self._chosen(dtype, tolerant))

    def __len__(self) -> int:
        return len(self._files)

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        options, found = self._options, []
        for name in self._files:
            status = (self._root / name).stat()
            found.append([name, status.st_size, status.st_mtime_ns])
        spec = repr(dict(self.spec))
        classes = list(self.class_names or ())
        return digest([found, classes, spec, options.image_size, options.image_mode])

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        out = {
            name: aligned_empty((len(rows), *spec.shape), spec.dtype)
            for name, spec in self.spec.items()
        }
        if "label" in out:
            out["label"][...] = self._labels[rows]
        if "image" in out:
            paths = [self._root / self._files[row] for row in rows.tolist()]
            decode_images(
                _Contents(paths),
                out["image"],
                mode=self._options.image_mode,
                image_size=self._options.image_size,
                num_threads=self._options.num_threads,
                where=lambda i: (paths[i], int(rows[i]), 0),
            )
        return out

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        sample: dict[str, Any] = {}
        if "label" in self.spec:
            sample["label"] = self._labels[rows].astype(self.spec["label"].dtype)
        if "image" in self.spec:
            paths = [self._root / self._files[row] for row in rows.tolist()]
            contents = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
            sample[encoded_name("image")] = contents
        return sample

    def _refuse_splits(self, folders: list[str], files: list[str]) -> None:
        direct = any(os.path.relpath(f, self._root).count(os.sep) < 2 for f in files)
        if direct or not _SPLITS.issuperset(name.lower() for name in folders):
            return
        raise ValueError(
            f"the folder {self._root} holds {folders}, which look like splits of a "
            f"data set rather than its classes; open one: {self._root / folders[0]}"
        )

    def _chosen(self, dtype: np.dtype, tolerant: bool) -> dict[str, ColumnSpec]:
        wanted, options = self._options.columns, self._options
        shape = self._probed(tolerant)
        shape = (*(options.image_size or shape[:2]), shape[2])
        found = {
            "image": ColumnSpec(shape, np.dtype(np.uint8)),
            "label": ColumnSpec((), dtype),
        }
        wrong = {
            name: spec
            for name, spec in (wanted or {}).items()
            if found.get(name) != spec
            and not (name == "label" and can_cast(found["label"], spec))
        }
        if wrong:
            raise ValueError(
                f"{self._root} cannot be read with columns={wrong}; it holds {found}: "
                "change columns, or image_size and image_mode"
            )
        return found if wanted is None else {name: found[name] for name in wanted}

    def _probed(self, tolerant: bool) -> tuple[int, int, int]:
        first = None
        for record, name in enumerate(self._files):
            path = self._root / name
            try:
                return probe_image(path.read_bytes(), self._options.image_mode)
            except ValueError as error:
                reason = f"the image cannot be decoded: {error}"
                first = first or DataCorruptionError(path, record, 0, reason)
                if not tolerant:
                    raise first from error
        assert first is not None
        raise first


class _Contents(Sequence[bytes]):
    # Each file is read in the thread that decodes it.
    def __init__(self, paths: list[Path]):
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index):
        return self._paths[index].read_bytes()


def first_image(root: Path) -> Path | None:
    """An image that lies in a sub-folder of a folder, though no deeper."""
    for name in sorted(_folders(root)):
        for entry in _entries(root / name):
            if _is_image(entry):
                return Path(entry.path)
    return None


def _folders(root: Path) -> Iterator[str]:
    return (entry.name for entry in _entries(root) if entry.is_dir())


def _images(folder: Path) -> list[str]:
    found, rest = [], [os.fspath(folder)]
    while rest:
        for entry in _entries(rest.pop()):
            # Links to folders are not followed: they may lead around in a circle.
            if entry.is_dir(follow_symlinks=False):
                rest.append(entry.path)
            elif _is_image(entry):
                found.append(entry.path)
    return sorted(found)


def _is_image(entry: os.DirEntry[str]) -> bool:
    if not entry.name.lower().endswith(_SUFFIXES):
        return False
    if entry.is_symlink() and not os.path.exists(entry.path):
        raise FileNotFoundError(
            errno.ENOENT, "a link to an image that is not there", entry.path
        )
    return entry.is_file()


def _entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith("."):
                yield entry


def _recognizes(head: bytes) -> bool:
    del head
    return False


FORMAT = Format("image_folder", (), _recognizes, ImageFolderStore, None)
