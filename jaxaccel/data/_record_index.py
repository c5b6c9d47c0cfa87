"""Memory-mapped files, and where their records are, kept beside them."""

import contextlib
import io
import mmap
import os
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._errors import DataCorruptionError, empty_file

_SUFFIX = ".idx.npz"
_VERSION = 2


class MappedFile:
    """A file mapped into memory; it travels to other processes by its path.

    Args:
      path: The file.

    Attributes:
      path: The same.
      size: Its bytes.
      mtime_ns: When it was last modified.

    Raises:
      DataCorruptionError: If it is empty.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.size, self.mtime_ns = status.st_size, status.st_mtime_ns
            if not self.size:
                raise empty_file(path)
            mapping: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._data: np.ndarray | None = np.frombuffer(mapping, np.uint8)

    @property
    def data(self) -> np.ndarray:
        """The whole file, uint8, read-only."""
        if self._data is None:
            raise ValueError(f"the store of {self.path} is closed; open it again")
        return self._data

    def close(self) -> None:
        """Gives the mapping up, as soon as no array refers to it."""
        self._data = None

    def __getstate__(self) -> dict[str, Any]:
        key = (self.size, self.mtime_ns)
        return {"path": self.path.absolute(), "key": key, "closed": self._data is None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])
        if (self.size, self.mtime_ns) != state["key"]:
            reason = (
                f"the file changed after the store was pickled: then "
                f"{state['key'][0]} bytes, now {self.size}"
            )
            raise DataCorruptionError(self.path, None, 0, reason)
        if state["closed"]:
            self.close()


def cached_index(
    file: MappedFile,
    build: Callable[[], dict[str, np.ndarray]],
    fits: Callable[[dict[str, np.ndarray]], bool],
) -> dict[str, np.ndarray]:
    """Returns an index of a file, from beside it where that is up to date.

    It is kept in `<file>.idx.npz`, with the file's size and modification time. Where
    the folder is read-only it is built each time.

    Args:
      file: The file.
      build: Makes the index's arrays by name.
      fits: Whether arrays that were found are such an index, inside the file.

    Returns:
      The arrays. They may be those of another file that took this one's place within
      the resolution of modification times: compare what they point to when reading.
    """
    target = file.path.with_name(file.path.name + _SUFFIX)
    key = np.array([_VERSION, file.size, file.mtime_ns], np.int64)
    found = _load(target)
    if found and np.array_equal(found.pop("key", key[:0]), key) and fits(found):
        return found
    index = build()
    # It only saves time.
    with contextlib.suppress(OSError):
        _save(target, {"key": key, **index})
    return index


def _load(path: Path) -> dict[str, np.ndarray] | None:
    try:
        # Each member whole first, which compares its checksum, then as an array.
        with zipfile.ZipFile(path) as file:
            members = {name: file.read(name) for name in file.namelist()}
        return {
            name.removesuffix(".npy"): np.lib.format.read_array(io.BytesIO(content))
            for name, content in members.items()
        }
    except Exception:
        # Missing or damaged in whatever way: it is made anew.
        return None


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    # Its own name in each process and thread; the last one to finish wins.
    work = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with work.open("xb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
        os.replace(work, path)
    finally:
        work.unlink(missing_ok=True)
