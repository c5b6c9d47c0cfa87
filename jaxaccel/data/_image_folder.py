"""Folders of images, one folder for each class."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxaccel.data._decode import decode_images, probe_image
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import Format, OpenOptions
from jaxaccel.data._integers import can_cast
from jaxaccel.data._store import ColumnSpec, Store, aligned_empty, digest

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")


class ImageFolderStore(Store):
    """The images in `<root>/<class>/`, at any depth, with their class as `label`.

    Classes are numbered in the order of their names, whether or not they hold images,
    so that folders with the same classes agree; images come class by class, in the
    order of their paths. Hidden folders and files that are not named as images are
    left out.

    Args:
      root: The folder of the classes.
      options: How to read the images.

    Attributes:
      class_names: Name of each label.

    Raises:
      DataCorruptionError: If the first image is damaged.
      ValueError: If there is no image in any sub-folder, or columns are asked for
        that this format does not have.
    """

    def __init__(self, root: Path, options: OpenOptions):
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
        self.class_names = tuple(folders)
        self._files = [os.path.relpath(file, self._root) for file, _ in files]
        dtype = np.min_scalar_type(len(folders) - 1)
        self._labels = np.array([label for _, label in files], dtype)
        super().__init__(self._chosen(dtype))

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

    def _chosen(self, dtype: np.dtype) -> dict[str, ColumnSpec]:
        wanted, options = self._options.columns, self._options
        path = self._root / self._files[0]
        try:
            shape = probe_image(path.read_bytes(), options.image_mode)
        except ValueError as error:
            reason = f"the image cannot be decoded: {error}"
            raise DataCorruptionError(path, 0, 0, reason) from error
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


class _Contents(Sequence[bytes]):
    # Each file is read in the thread that decodes it.
    def __init__(self, paths: list[Path]):
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index):
        return self._paths[index].read_bytes()


def _folders(root: Path) -> Iterator[str]:
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield entry.name


def _images(folder: Path) -> Iterator[str]:
    # Links inside are not followed: they may lead around in a circle.
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            os.path.join(parent, name)
            for name in names
            if name.lower().endswith(_SUFFIXES) and not name.startswith(".")
        ]
    return iter(sorted(found))


def _recognizes(head: bytes) -> bool:
    del head
    return False


FORMAT = Format("image_folder", (), _recognizes, ImageFolderStore, None)
