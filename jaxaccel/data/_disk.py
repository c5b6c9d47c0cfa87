"""Files that are complete on the disk, and disks that are full."""

import contextlib
import errno
import os
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
_CHUNK = 1 << 20


def sync(file: BinaryIO) -> None:
    """Brings all that was written to a file onto the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Brings the names in a folder onto the disk, where the system can."""
    with contextlib.suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Checks that a disk has room before anything is written.

    Args:
      folder: An existing folder on that disk.
      needed: Bytes that will be written.
      what: What they are, for the message.

    Raises:
      OSError: If it has not, with `errno.ENOSPC`.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"{what} needs {size_text(needed)}, but the disk has {size_text(free)} "
            "free; make room, or choose another disk",
            str(folder),
        )


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Says what to do where the cache cannot be written."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or folder)
        ours = place.is_relative_to(folder) or folder.is_relative_to(place)
        if error.errno not in _READ_ONLY or not ours:
            raise
        message = (
            f"cannot write the cache folder {folder} ({error.strerror}); set "
            "JAXACCEL_DATA to a writable folder, or make this one writable"
        )
        raise OSError(error.errno, message, error.filename) from error


def is_full(error: OSError) -> bool:
    """Whether an error says that a disk, a quota or a limit is exhausted."""
    # Some libraries hand on the text without the number.
    return error.errno in _FULL or os.strerror(errno.ENOSPC) in str(error)


def size_text(count: int) -> str:
    """A number of bytes, for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.3f} MB"


def file_crc(path: Path) -> int:
    """CRC-32 of a whole file."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
