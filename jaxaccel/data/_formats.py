"""What a file format is to the rest of the package: how to know, read and write it."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxaccel.data._chunk_cache import ChunkCache
from jaxaccel.data._store import ColumnSpec, Store

# Of files that a program has compressed as a whole, which none of the formats reads
# at random, and none writes.
PACKED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".lz4")


@dataclasses.dataclass(frozen=True)
class OpenOptions:
    """How to read a file, where the format leaves it open.

    Attributes:
      columns: Which columns to read, and as what; None takes what the file says.
      image_size: (height, width) that encoded images are resized to; None requires
        that all have one size.
      image_mode: `"RGB"` or `"L"`, the channels of encoded images.
      checksums: Whether what has a checksum is compared with it when it is read.
      num_threads: Threads that decode images; None takes one a core, 8 at most.
      cache: Chunks that were decoded, for all files that are opened with these
        options.
    """

    columns: Mapping[str, ColumnSpec] | None = None
    image_size: tuple[int, int] | None = None
    image_mode: str = "RGB"
    checksums: bool = True
    num_threads: int | None = None
    cache: ChunkCache = dataclasses.field(
        default_factory=ChunkCache, repr=False, compare=False
    )


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How to write a file.

    Attributes:
      compression: None, or one of the format's compressions.
      length: Number of examples that will be written in all.
      class_names: Names of the labels, which some formats keep.
    """

    compression: str | None
    length: int
    class_names: tuple[str, ...] | None = None


class Writer(Protocol):
    """Writes one file, or one folder; `convert` gives it its final name."""

    def write(self, batch: Mapping[str, np.ndarray]) -> None:
        """Appends examples."""
        ...

    def finish(self) -> None:
        """Completes the file, with all bytes on the disk."""
        ...

    def abort(self) -> None:
        """Closes the file without completing it; the caller deletes it."""
        ...


@dataclasses.dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
      name: As in `open_store(path, format=name)`.
      suffixes: Of its files; empty for formats that are folders.
      recognizes: Whether a file's first 64 bytes are of this format. False for all
        where content does not tell.
      open: Opens one file, or one folder.
      create: Makes a writer of a path that does not exist; None where the format is
        only read.
      compressions: What `WriteOptions.compression` may be, besides None.
    """

    name: str
    suffixes: tuple[str, ...]
    recognizes: Callable[[bytes], bool]
    open: Callable[[Path, OpenOptions], Store]
    create: Callable[[Path, Mapping[str, ColumnSpec], WriteOptions], Writer] | None
    compressions: tuple[str, ...] = ()
