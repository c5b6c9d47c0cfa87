"""Stores that decode once: into files, or into memory."""

import os
import threading
from typing import Any

import numpy as np

from jaxaccel._fetch import data_root
from jaxaccel.data import _open
from jaxaccel.data._checks import as_count
from jaxaccel.data._conversion import Target, batch_rows, row_bytes, write_store
from jaxaccel.data._disk import size_text, writable
from jaxaccel.data._partial import sweep
from jaxaccel.data._store import (
    Store,
    aligned_empty,
    check_store,
    closed_error,
    digest,
    gather,
)


def disk_cache(
    store: Store,
    folder: str | os.PathLike[str] | None = None,
    *,
    max_bytes: int | None = None,
    progress: bool = True,
) -> Store:
    """Decodes a store once into memory-mapped files, and reads those from then on.

    The entry's name is made of the store's fingerprint and columns: changed sources
    get an entry of their own, and other entries are left alone (delete the folder to
    be rid of them). Several processes may ask at once: one decodes, the others wait.
    An interrupted attempt is continued, as by `convert`.

    Args:
      store: What is slow to read.
      folder: Where entries are kept; None takes `stores` in the folder that the
        environment variable `JAXACCEL_DATA` names, else `jaxaccel` in the user's
        cache.
      max_bytes: Largest entry that may be made; None means what the disk holds.
      progress: As in `convert`.

    Returns:
      A store of the same examples, memory-mapped and checked by checksums, with the
      same `class_names`.

    Raises:
      OSError: If the folder cannot be written, or the disk is too small.
      TypeError: If it is no store.
      ValueError: If the entry would be larger than `max_bytes`.

    Examples:
      >>> import tempfile
      >>> import numpy as np
      >>> from jaxaccel.data import disk_cache, open_store
      >>> slow = open_store({"label": np.arange(5, dtype=np.uint8)})
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     cached = disk_cache(slow, folder, progress=False)
      ...     cached.take([3, 1])["label"].tolist()
      [3, 1]
    """
    check_store("disk_cache", store)
    root = data_root(folder) if folder is not None else data_root() / "stores"
    columns = {name: [str(s.dtype), s.shape] for name, s in store.spec.items()}
    parts = [store.fingerprint(), columns]
    if store.class_names is not None:
        parts.append(store.class_names)
    entry = root / digest(parts)
    known = _open.FORMATS["npy"]
    sweep(entry)
    if not entry.is_dir():
        needed = len(store) * row_bytes(store)
        if max_bytes is not None and needed > as_count("max_bytes", max_bytes, 0):
            raise ValueError(
                f"{store!r} takes {size_text(needed)} decoded, more than max_bytes "
                f"({size_text(max_bytes)}); raise it, or use memory_cache, which "
                "keeps a part"
            )
        with writable(root):
            root.mkdir(parents=True, exist_ok=True)
            write_store(
                store,
                Target(entry, [entry.name], known),
                size=batch_rows(store),
                progress=progress,
                wait=True,
            )
    return known.open(entry, _open.OpenOptions())


def memory_cache(store: Store, *, max_bytes: int) -> "MemoryCache":
    """Keeps in memory what was read once, as much as fits.

    What is kept stays: with a random order, throwing out the oldest examples would
    leave none of the next ones. Each worker process keeps a part of its own.

    Args:
      store: What is slow to read.
      max_bytes: Most memory to use, index included. It is taken as it fills.

    Returns:
      A store of the same examples. `held` says how many it keeps.

    Raises:
      TypeError: If it is no store.
      ValueError: If not even one example fits.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import memory_cache, open_store
      >>> slow = open_store({"image": np.zeros((10, 28, 28), np.uint8)})
      >>> cached = memory_cache(slow, max_bytes=4000)
      >>> for batch in cached.scan(3):
      ...     pass
      >>> cached.held
      5
    """
    check_store("memory_cache", store)
    return MemoryCache(store, as_count("max_bytes", max_bytes, 0))


class MemoryCache(Store):
    """See `memory_cache`."""

    def __init__(self, store: Store, max_bytes: int):
        super().__init__(store.spec)
        self._store, self._max_bytes = store, max_bytes
        self.class_names, self._words = store.class_names, store._words
        self._sampled = store._sampled
        self._start()

    def _start(self) -> None:
        # Slot 0 means that a row is not held.
        index_bytes = len(self._store) * 8
        room = self._max_bytes - index_bytes
        rows = room // max(1, row_bytes(self._store))
        if rows < 1:
            raise ValueError(
                f"max_bytes is {self._max_bytes}, but {len(self._store)} examples of "
                f"{row_bytes(self._store)} bytes need {index_bytes} for the index and "
                "room for one at least; raise it"
            )
        self._capacity = min(rows, len(self._store))
        self._slots = np.zeros(len(self._store), np.int64)
        # Pages of memory are taken when they are written.
        self._kept = {
            name: np.empty((self._capacity, *spec.shape), spec.dtype)
            for name, spec in self.spec.items()
        }
        self._held, self._lock, self._closed = 0, threading.Lock(), False

    def __len__(self) -> int:
        return len(self._store)

    @property
    def held(self) -> int:
        """How many examples are in memory."""
        return self._held

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        return self._store.fingerprint()

    def close(self) -> None:
        """See `Store.close`."""
        self._store.close()
        self._kept, self._closed = {}, True

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self._store, "max_bytes": self._max_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        MemoryCache.__init__(self, state["store"], state["max_bytes"])

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        return self._store._sample(rows)

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        if self._closed:
            raise closed_error("what memory_cache kept")
        slots = self._slots[rows] - 1
        if (slots >= 0).all():
            return {name: gather(kept, slots) for name, kept in self._kept.items()}
        missing = np.unique(rows[slots < 0])
        fresh = self._store._checked_read(missing)
        self._keep(missing, fresh)
        held = slots >= 0
        if not held.any() and len(missing) == len(rows) and (missing == rows).all():
            return fresh
        places = np.searchsorted(missing, rows[~held])
        batch = {}
        for name, kept in self._kept.items():
            array = aligned_empty((len(rows), *kept.shape[1:]), kept.dtype)
            array[held] = kept[slots[held]]
            array[~held] = fresh[name][places]
            batch[name] = array
        return batch

    def _keep(self, rows: np.ndarray, fresh: dict[str, np.ndarray]) -> None:
        if self._held == self._capacity:
            return
        with self._lock:
            # Another thread may have brought some of them meanwhile.
            new = np.flatnonzero(self._slots[rows] == 0)[: self._capacity - self._held]
            stop = self._held + len(new)
            for name, kept in self._kept.items():
                kept[self._held : stop] = fresh[name][new]
            # Only now: whoever sees a slot reads without the lock.
            self._slots[rows[new]] = np.arange(self._held, stop) + 1
            self._held = stop
