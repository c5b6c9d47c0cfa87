"""Decoded chunks of all parts of a store, within one bound."""

import collections
import threading
from typing import Any

CACHE_BYTES = 256 << 20
# Examples decoded again for each one read, from which on the reads are called random.
_WASTE = 8


class ChunkCache:
    """Keeps what was decoded last; safe to use from several threads.

    A pickled copy is empty, and the parts that were pickled together share it.

    Args:
      max_bytes: Bound on all that is kept; the newest chunk is kept in any case.
    """

    def __init__(self, max_bytes: int | None = None):
        self.max_bytes = CACHE_BYTES if max_bytes is None else max_bytes
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[tuple[object, int], tuple[Any, int]] = (
            collections.OrderedDict()
        )
        self._bytes = 0
        self._sizes: dict[object, int] = {}
        self._dropped: set[tuple[object, int]] = set()
        self._read = self._again = 0
        self._said = False

    def __reduce__(self):
        return ChunkCache, (self.max_bytes,)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Size of what is kept."""
        return self._bytes

    def join(self, part: object, decoded_bytes: int) -> None:
        """Notes that a part will use the cache, and its size if all were decoded."""
        with self._lock:
            self._sizes[part] = decoded_bytes

    def leave(self, part: object) -> None:
        """Forgets a part and its chunks."""
        with self._lock:
            self._sizes.pop(part, None)
            for key in [key for key in self._kept if key[0] is part]:
                self._drop(key)
            self._dropped = {key for key in self._dropped if key[0] is not part}

    def get(self, part: object, chunk: int, rows: int) -> Any:
        """Returns a chunk, to read rows of it; None where it is not kept."""
        with self._lock:
            self._read += rows
            if (part, chunk) not in self._kept:
                return None
            self._kept.move_to_end((part, chunk))
            return self._kept[part, chunk][0]

    def put(
        self, part: object, chunk: int, content: Any, *, nbytes: int, rows: int
    ) -> None:
        """Keeps a chunk of so many rows, dropping those used longest ago."""
        with self._lock:
            self._again += rows * ((part, chunk) in self._dropped)
            self._kept[part, chunk] = content, nbytes
            self._bytes += nbytes
            while len(self._kept) > 1 and self._bytes > self.max_bytes:
                oldest = next(iter(self._kept))
                self._drop(oldest)
                self._dropped.add(oldest)

    @property
    def is_wasted(self) -> bool:
        """Whether far more was decoded again than was read."""
        return self._again > _WASTE * self._read

    def is_too_small(self) -> bool:
        """Whether not all parts fit; says so once."""
        with self._lock:
            small = not self._said and sum(self._sizes.values()) > self.max_bytes
            self._said = self._said or small
            return small

    def _drop(self, key: tuple[object, int]) -> None:
        self._bytes -= self._kept.pop(key)[1]
