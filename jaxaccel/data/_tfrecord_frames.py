"""What surrounds the records of a TFRecord file: lengths and checksums.

A record is its length (8 bytes), a checksum of that (4), its bytes, and a checksum
of those (4). The checksum is CRC-32C, rotated by 15 bits, plus a constant.
"""

import functools
import struct
import types
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxaccel.data._errors import DataCorruptionError

HEADER, FOOTER = 12, 4
_FRAME = HEADER + FOOTER
# So many equal lengths in a row, and the next ones are looked at many at a time.
_RUN = 16


class Frames(NamedTuple):
    """Records in a buffer, with what surrounds them.

    Attributes:
      path: Their file.
      data: The buffer, uint8.
      base: Offset of the buffer in the file.
      rows: Number of each record in the file.
      starts: Where each record's bytes begin in the buffer.
      lengths: Their number, from the index.
    """

    path: Path
    data: np.ndarray
    base: int
    rows: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def where(self, i: int) -> tuple[Path, int, int]:
        """Path, number and offset of the record at position `i`."""
        return self.path, int(self.rows[i]), self.base + int(self.starts[i])

    def check(self, checksums: bool) -> None:
        """Compares the lengths with the index, and all with its checksums."""
        if not len(self.rows):
            return
        found = _pieces(self.data, self.starts - HEADER, 8).view("<u8")[:, 0]
        self._demand(
            found == self.lengths.astype(np.uint64),
            "its length is another one than when the file was indexed; if it was "
            f"changed on purpose, delete {self.path.name}.idx.npz",
        )
        if checksums:
            self.check_lengths()
            self.check_data()

    def check_lengths(self) -> None:
        """Compares the lengths with their checksums."""
        if len(self.rows):
            stored = _pieces(self.data, self.starts - 4, 4).view("<u4")[:, 0]
            good = stored == _masked(_crc32c_of_lengths(self.lengths))
            self._demand(good, "its length differs from the length's checksum")

    def check_data(self) -> None:
        """Compares the records with their checksums."""
        value, data = require_crc32c("reading with checksums").value, self.data
        ends = (self.starts + self.lengths).tolist()
        crcs = [
            value(data[start:end])
            for start, end in zip(self.starts.tolist(), ends, strict=True)
        ]
        stored = _pieces(data, self.starts + self.lengths, 4).view("<u4")[:, 0]
        good = stored == _masked(np.array(crcs, np.uint32))
        self._demand(good, "the record differs from its checksum")

    def _demand(self, good: np.ndarray, reason: str) -> None:
        if not good.all():
            raise DataCorruptionError(*self.where(int(np.argmin(good))), reason)


def walk(
    data: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, tuple[int, str] | None]:
    """Finds all records of a file.

    Args:
      data: The whole file, uint8.

    Returns:
      Where each record's bytes begin, how many they are, and offset and reason
      where the file ends in the middle of a record.
    """
    at, same, parts = 0, 0, [np.empty((0, 2), np.int64)]
    found: list[tuple[int, int]] = []
    header, length, problem = b"", 0, None
    view = memoryview(data)  # pyright: ignore[reportArgumentType]
    while at < len(data):
        if at + HEADER > len(data):
            problem = at, f"{len(data) - at} bytes, too few for another record's header"
            break
        last, header = header, bytes(view[at : at + HEADER])
        same = same + 1 if header == last else 0
        (length,) = struct.unpack_from("<Q", header)
        if length > len(data) - at - _FRAME:
            left = len(data) - at - HEADER
            problem = at, f"a record of {length} bytes, but only {left} follow"
            break
        found.append((at + HEADER, length))
        at += length + _FRAME
        if same == _RUN:
            count = _count_equal(data, at, length + _FRAME, header)
            parts += [np.array(found, np.int64), _row(at + HEADER, length, count)]
            at, same, found = at + count * (length + _FRAME), 0, []
    if found:
        parts.append(np.array(found, np.int64))
    index = np.concatenate(parts)
    return index[:, 0].copy(), index[:, 1].copy(), problem


def frame(record: bytes) -> bytes:
    """A record with its length and checksums, as it stands in a file."""
    length = struct.pack("<Q", len(record))
    crcs = np.array([require_crc32c("").value(part) for part in (length, record)])
    first, second = _masked(crcs.astype(np.uint32)).tolist()
    return b"".join(
        (length, struct.pack("<I", first), record, struct.pack("<I", second))
    )


def is_header(head: bytes) -> bool:
    """Whether bytes begin with a length and its checksum."""
    if len(head) < HEADER:
        return False
    length, stored = struct.unpack_from("<QI", head)
    if length >= 2**63:
        return False
    return int(_masked(_crc32c_of_lengths(np.array([length])))[0]) == stored


def require_crc32c(purpose: str) -> types.ModuleType:
    """Imports google_crc32c, or says what needs it."""
    try:
        import google_crc32c
    except ImportError as error:
        raise ImportError(
            f"{purpose} needs google-crc32c: pip install 'jaxaccel[formats]', or pass "
            "checksums=False to read without"
        ) from error
    return google_crc32c


def _count_equal(data: np.ndarray, at: int, stride: int, header: bytes) -> int:
    # How many records from here have the same header, in ever longer strides.
    expected = np.frombuffer(header, np.uint8)
    most, count, block = (len(data) - at) // stride, 0, 64
    while count < most:
        block = min(2 * block, most - count)
        shape, offset = (block, HEADER), at + count * stride
        headers = np.ndarray(shape, np.uint8, data, offset, (stride, 1))
        same = (headers == expected).all(1)
        if not same.all():
            return count + int(np.argmin(same))
        count += block
    return count


def _row(start: int, length: int, count: int) -> np.ndarray:
    starts = start + (length + _FRAME) * np.arange(count)
    return np.stack([starts, np.full(count, length)], axis=1)


def _pieces(data: np.ndarray, starts: np.ndarray, width: int) -> np.ndarray:
    # All ranges of this width there are, of which NumPy copies some.
    shape = (len(data) - width + 1, width)
    return np.ndarray(shape, np.uint8, data, 0, (1, 1))[starts]


def _masked(crcs: np.ndarray) -> np.ndarray:
    crcs = crcs.astype(np.uint32, copy=False)
    return (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(0xA282EAD8)


def _crc32c_of_lengths(lengths: np.ndarray) -> np.ndarray:
    # Many at once, byte by byte.
    table, crcs = _table(), np.full(len(lengths), 0xFFFFFFFF, np.uint32)
    for shift in range(0, 64, 8):
        byte = (lengths >> shift & 255).astype(np.uint32)
        crcs = table[(crcs ^ byte) & np.uint32(255)] ^ crcs >> np.uint32(8)
    return ~crcs


@functools.cache
def _table() -> np.ndarray:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        carry = (table & np.uint32(1)) * np.uint32(0x82F63B78)
        table = table >> np.uint32(1) ^ carry
    return table
