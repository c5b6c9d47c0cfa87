"""Readers of `.npy` and IDX files that notice damage before it becomes a pixel."""

import math
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxaccel.data._errors import DataCorruptionError, empty_file

_NPY_MAGIC = b"\x93NUMPY"
_GZIP_MAGIC = b"\x1f\x8b"
# Third byte of an IDX file. Everything wider than a byte is big-endian.
_IDX_DTYPES = {
    0x08: np.dtype(np.uint8),
    0x09: np.dtype(np.int8),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
# No deflate stream grows by more than this, so a longer promise is a lie.
_MAX_RANK = 64
_MAX_DEFLATE_RATIO = 1032
_CHUNK = 1 << 18


def open_array(path: str | os.PathLike[str]) -> np.ndarray:
    """Opens a `.npy` or IDX file as a read-only array.

    The format is detected by content. Uncompressed files are memory-mapped;
    gzip-compressed IDX files are decompressed into memory.

    Args:
      path: The file.

    Returns:
      The array, with the shape and dtype of the file.

    Raises:
      FileNotFoundError: If there is no such file.
      DataCorruptionError: If the file is damaged.
      ValueError: If it is of another format.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no data file at {path}; check the path")
    with path.open("rb") as file:
        magic = file.read(6)
        file.seek(0)
        if magic == _NPY_MAGIC:
            return _open_npy(path, file)
        if magic[:2] == _GZIP_MAGIC:
            return _open_idx_gz(path, file)
        if len(magic) >= 4 and magic[:2] == b"\0\0" and magic[2] in _IDX_DTYPES:
            return _open_idx(path, file)
    if not magic:
        raise empty_file(path)
    reason = (
        f"not a .npy or IDX file: it starts with {magic!r}, expected {_NPY_MAGIC!r}, "
        "or two zero bytes and an IDX type code"
    )
    if path.suffix == ".npy" or _is_named_idx(path):
        raise DataCorruptionError(path, None, 0, reason)
    raise ValueError(
        f"{path}: {reason}. A column is one of these; files of other formats hold all "
        "columns: open_store(path)"
    )


def is_idx(path: Path, head: bytes) -> bool:
    """Whether a file is an IDX file, or is named like one.

    Args:
      path: The file.
      head: Its first bytes.
    """
    known = head[:2] == b"\0\0" and len(head) >= 4 and head[2] in _IDX_DTYPES
    return known or head.startswith(_GZIP_MAGIC) or _is_named_idx(path)


def _is_named_idx(path: Path) -> bool:
    return path.suffix == ".gz" or path.name.endswith("ubyte")


def _open_npy(path: Path, file: BinaryIO) -> np.ndarray:
    formats = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        if version not in formats:
            raise ValueError(
                f"version {version} of the format is for named fields, which a "
                "column cannot have"
            )
        shape, fortran, dtype = formats[version](file)
    except ValueError as error:
        reason = f"unreadable .npy header: {error}"
        raise DataCorruptionError(path, None, file.tell(), reason) from None
    if dtype.hasobject:
        raise ValueError(
            f"{path} holds pickled Python objects (dtype {dtype}), which are never "
            "loaded. Save a numeric array: np.save(path, np.asarray(x, np.uint8))"
        )
    header = file.tell()
    _check_size(path, header, shape, dtype.itemsize, path.stat().st_size)
    order = "F" if fortran else "C"
    return _map(path, header, shape, dtype, order)


def _open_idx(path: Path, file: BinaryIO) -> np.ndarray:
    size = path.stat().st_size
    dtype, shape, header = _parse_idx_header(path, file.read(4 + 4 * 255))
    _check_size(path, header, shape, dtype.itemsize, size)
    return _map(path, header, shape, dtype, "C")


def _open_idx_gz(path: Path, file: BinaryIO) -> np.ndarray:
    content = gunzip(path, file)
    dtype, shape, header = _parse_idx_header(path, bytes(content[: 4 + 4 * 255]))
    note = " (decompressed)"
    _check_size(path, header, shape, dtype.itemsize, len(content), note)
    array = np.frombuffer(content, dtype, offset=header).reshape(shape)
    array.flags.writeable = False
    return array


def _parse_idx_header(path: Path, head: bytes) -> tuple[np.dtype, tuple[int, ...], int]:
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _IDX_DTYPES:
        reason = f"not IDX content: it starts with {head[:4]!r}"
        raise DataCorruptionError(path, None, 0, reason)
    if head[3] > _MAX_RANK:
        reason = f"the IDX header claims {head[3]} axes, NumPy has {_MAX_RANK} at most"
        raise DataCorruptionError(path, None, 3, reason)
    header = 4 + 4 * head[3]
    if len(head) < header:
        reason = f"the IDX header needs {header} bytes, found {len(head)}"
        raise DataCorruptionError(path, None, len(head), reason)
    shape = tuple(int(n) for n in np.frombuffer(head[4:header], ">u4"))
    return _IDX_DTYPES[head[2]], shape, header


def _check_size(
    path: Path,
    header: int,
    shape: tuple[int, ...],
    itemsize: int,
    size: int,
    note: str = "",
) -> None:
    # Python integers: absurd lengths neither overflow nor allocate.
    expected = header + math.prod(shape) * itemsize
    if size == expected:
        return
    record_bytes = math.prod(shape[1:]) * itemsize
    record = (min(size, expected) - header) // record_bytes if record_bytes else None
    what = "truncated" if size < expected else "bytes after the data"
    reason = f"{what}: shape {shape} needs {expected} bytes, found {size}{note}"
    raise DataCorruptionError(path, record, min(size, expected), reason)


def _map(
    path: Path, header: int, shape: tuple[int, ...], dtype: np.dtype, order: str
) -> np.ndarray:
    if 0 in shape or not shape:
        # Nothing to map; the store refuses both with the column's name.
        return np.empty(shape, dtype)
    mapped = np.memmap(
        path,
        dtype,
        mode="r",
        offset=header,
        shape=shape,
        order=order,  # type: ignore
    )
    return mapped.view(np.ndarray)


def gunzip(path: Path, file: BinaryIO) -> bytearray:
    """Decompresses a gzip file that holds IDX content, trusting none of it.

    Args:
      path: Its name, for the messages.
      file: The open file.

    Returns:
      The decompressed content.

    Raises:
      DataCorruptionError: If it is truncated, fails its checksum, is followed by
        anything else, or promises more than it can hold.
    """
    content, limit = bytearray(), None
    decoder, at_member_start = zlib.decompressobj(wbits=31), False
    while chunk := file.read(_CHUNK):
        while chunk:
            if at_member_start:
                decoder, at_member_start = zlib.decompressobj(wbits=31), False
            try:
                content += decoder.decompress(chunk)
            except zlib.error as error:
                reason = f"damaged gzip data: {error}"
                raise DataCorruptionError(path, None, file.tell(), reason) from None
            chunk, at_member_start = decoder.unused_data, decoder.eof
        if limit is None and len(content) >= 4:
            limit = _promised_size(path, bytes(content[: 4 + 4 * 255]))
        if limit is not None and len(content) > limit:
            reason = (
                f"bytes after the data: expected {limit} (decompressed), found more"
            )
            raise DataCorruptionError(path, None, limit, reason)
    if not decoder.eof:
        reason = f"truncated gzip data after {len(content)} decompressed bytes"
        raise DataCorruptionError(path, None, file.tell(), reason)
    return content


def _promised_size(path: Path, head: bytes) -> int:
    dtype, shape, header = _parse_idx_header(path, head)
    promised = header + math.prod(shape) * dtype.itemsize
    most = path.stat().st_size * _MAX_DEFLATE_RATIO
    if promised > most:
        reason = (
            f"shape {shape} needs {promised} bytes, but a gzip file of this size "
            f"holds {most} at most"
        )
        raise DataCorruptionError(path, None, 4, reason)
    return promised
