"""Checksums beside a data file, for formats that have none of their own."""

import contextlib
import os
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxaccel.data._disk import sync
from jaxaccel.data._errors import DataCorruptionError

_BITS = 16
BLOCK = 1 << _BITS
# Names of the formats that need none; those of Parquet's pages are optional.
WITH_CHECKSUMS = ("array_record", "tfrecord")
_SUFFIX = ".crc.npz"
_VERSION = 1
# Ranges of at most so many blocks are looked up together, longer ones one by one.
_SHORT = 8


def sidecar_path(path: Path) -> Path:
    """Where the checksums of a file are."""
    return path.with_name(path.name + _SUFFIX)


def write_checksums(path: str | os.PathLike[str]) -> None:
    """Writes the checksums of a file beside it, whole or not at all.

    Args:
      path: The data file.

    Raises:
      OSError: If the file cannot be read, or its folder not be written.
    """
    path, crcs = Path(path), BlockCrcs()
    buffer = bytearray(16 * BLOCK)
    with path.open("rb") as file:
        while count := file.readinto(buffer):
            crcs.update(memoryview(buffer)[:count])
    crcs.save(path)


class BlockCrcs:
    """Checksums of the blocks of a file that is being written.

    Attributes:
      size: Bytes so far.
    """

    def __init__(self):
        self._full: list[int] = []
        self._tail, self.size = 0, 0

    def update(self, content: bytes | bytearray | memoryview) -> None:
        """Appends bytes."""
        view = memoryview(content).cast("B")
        while view:
            room = BLOCK - self.size % BLOCK
            part, view = view[:room], view[room:]
            self._tail = zlib.crc32(part, self._tail)
            self.size += len(part)
            if len(part) == room:
                self._full.append(self._tail)
                self._tail = 0

    def mark(self) -> tuple[int, int, int]:
        """Where it stands, for `back`."""
        return len(self._full), self._tail, self.size

    def back(self, mark: tuple[int, int, int]) -> None:
        """Forgets what came after a mark."""
        count, self._tail, self.size = mark
        del self._full[count:]

    def values(self) -> np.ndarray:
        """CRC-32 of each block, the last one possibly short."""
        tail = [self._tail] if self.size % BLOCK else []
        return np.array(self._full + tail, np.uint32)

    def digest(self) -> int:
        """One number that stands for all bytes so far."""
        return _digest(self.size, self.values())

    def save(self, path: Path) -> None:
        """Writes the sidecar of `path`."""
        target = sidecar_path(path)
        # Its own name in each process; the last one to finish wins.
        work = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with work.open("wb") as file:
                np.savez(
                    file, version=_VERSION, block=BLOCK, size=self.size,
                    crc32=self.values(),
                )  # fmt: skip
                sync(file)
            os.replace(work, target)
        except BaseException:
            with contextlib.suppress(OSError):
                work.unlink(missing_ok=True)
            raise


class Checksums:
    """The checksums of one file, each block compared the first time it is needed.

    Safe to use from several threads.

    Attributes:
      path: The data file.
      size: Its size in bytes.
      crcs: CRC-32 of each block of 64 KiB.
      complete: Whether every block was compared.
    """

    def __init__(self, path: Path, size: int, crcs: np.ndarray):
        self.path, self.size, self.crcs = path, size, crcs
        self._seen = np.zeros(len(crcs), bool)
        self.complete = not len(crcs)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Checksums | None":
        """Reads the sidecar of a file.

        Args:
          path: The data file.

        Returns:
          The checksums; None where there is no sidecar.

        Raises:
          DataCorruptionError: If the file has another size than it had when the
            sidecar was written, or the sidecar is damaged.
        """
        path = Path(path)
        source = sidecar_path(path)
        try:
            file = source.open("rb")
        except FileNotFoundError:
            return None
        with file:
            size, crcs = _parse(source, file)
        found = path.stat().st_size
        if found != size:
            reason = f"{size} bytes when its checksums were written, found {found}"
            at = min(size, found)
            raise DataCorruptionError(path, None, at, reason, _remedy(source))
        return cls(path, size, crcs)

    def digest(self) -> int:
        """One number that stands for the whole file."""
        return _digest(self.size, self.crcs)

    def check(
        self,
        data: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        records: np.ndarray | None = None,
    ) -> None:
        """Compares all blocks that some byte ranges touch.

        Args:
          data: The whole file, `(size,)` uint8, memory-mapped.
          starts: First byte of each range.
          stops: The byte behind the end of each range.
          records: Index of the example in each range, for the message.

        Raises:
          DataCorruptionError: If a block differs; `offset` is where it begins.
        """
        if self.complete or not len(starts) or self._read_before(starts, stops):
            return
        full = stops > starts
        if not full.all():
            starts, stops = starts[full], stops[full]
            records = None if records is None else records[full]
        blocks = self._unseen(starts // BLOCK, (stops - 1) // BLOCK)
        if not len(blocks):
            return
        for block in blocks:
            bad = self._differs(data, int(block))
            if bad:
                hit = (starts < (block + 1) * BLOCK) & (stops > block * BLOCK)
                owner = None if records is None else int(records[hit][0])
                raise self._error(int(block), owner)
        self.complete = bool(self._seen.all())

    def check_all(self, data: np.ndarray) -> None:
        """Compares every block; see `check`."""
        self.check(data, np.array([0]), np.array([self.size]))

    def seen(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Whether all blocks of each range, none empty, were compared before."""
        first, last = starts // BLOCK, (stops - 1) // BLOCK
        result = self._seen[first]
        for step in range(1, int((last - first).max(initial=-1)) + 1):
            result &= self._seen[np.minimum(first + step, last)]
        return result

    def _read_before(self, starts: np.ndarray, stops: np.ndarray) -> bool:
        # Most batches of short examples, told at once: both ends of each are known.
        # Empty ranges, which may lie at the end of the file, are clipped.
        first, last = starts >> _BITS, (stops - 1) >> _BITS
        return bool(
            np.count_nonzero(self._seen.take(first, mode="clip")) == len(first)
            and np.count_nonzero(self._seen.take(last, mode="clip")) == len(last)
            and (last - first).max() <= 1
        )

    def _unseen(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        longest = int((last - first).max(initial=-1)) + 1
        if longest > _SHORT:
            parts = [
                start + np.flatnonzero(~self._seen[start : stop + 1])
                for start, stop in zip(first.tolist(), last.tolist(), strict=True)
            ]
        else:
            parts = []
            for step in range(longest):
                touched = np.minimum(first + step, last)
                parts.append(touched[~self._seen[touched]])
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def _differs(self, data: np.ndarray, block: int) -> bool:
        found = zlib.crc32(data[block * BLOCK : (block + 1) * BLOCK].data)
        if found != int(self.crcs[block]):
            return True
        self._seen[block] = True
        return False

    def _error(self, block: int, record: int | None) -> DataCorruptionError:
        reason = (
            f"the {BLOCK // 1024} KiB from this offset differ from their checksum in "
            f"{sidecar_path(self.path).name}"
        )
        remedy = _remedy(sidecar_path(self.path))
        return DataCorruptionError(self.path, record, block * BLOCK, reason, remedy)


def _remedy(sidecar: Path) -> str:
    return (
        f"Delete the file and fetch it again; or delete {sidecar.name}, if the file "
        "was changed on purpose."
    )


def _digest(size: int, crcs: np.ndarray) -> int:
    return zlib.crc32(crcs.tobytes(), zlib.crc32(str(size).encode()))


def _parse(source: Path, file: BinaryIO) -> tuple[int, np.ndarray]:
    try:
        with np.load(file, allow_pickle=False) as content:
            values = {name: content[name] for name in content.files}
        version, block = int(values["version"]), int(values["block"])
        size, crcs = int(values["size"]), values["crc32"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile,
            zlib.error, MemoryError, NotImplementedError) as error:  # fmt: skip
        reason = f"unreadable checksums: {error}"
        raise DataCorruptionError(source, None, 0, reason) from None
    if (version, block) != (_VERSION, BLOCK):
        raise ValueError(
            f"{source} was written by another version of jaxaccel (version {version}, "
            f"blocks of {block} bytes); delete it, then verify(path, write_index=True)"
        )
    if crcs.dtype != np.uint32 or crcs.shape != (-(-size // BLOCK),):
        reason = f"{crcs.shape} {crcs.dtype} checksums for {size} bytes"
        raise DataCorruptionError(source, None, 0, reason)
    return size, crcs
