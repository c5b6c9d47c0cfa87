"""Token and time series: windows, and contiguous streams of them."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._checks import as_count
from jaxaccel.data._plan import REMAINDERS, Plan
from jaxaccel.data._store import ColumnSpec, Store, aligned_empty, digest, gather


def windows(
    tokens: np.ndarray | Store,
    length: int,
    *,
    stride: int | None = None,
    targets: bool = True,
    remainder: str = "drop",
    name: str = "tokens",
) -> "WindowStore":
    r"""Cuts one long sequence into windows, without copying it.

    Window $i$ holds the elements $is, \dots, is + \mathrm{length} - 1$ with stride
    $s$, and as targets the elements one later.

    Args:
      tokens: The sequence: an array `(time,)` or `(time, features)`, which may be
        memory-mapped, or a store with one column. Tokens are kept in their dtype;
        uint8 or uint16 is enough for most vocabularies.
      length: Elements in a window.
      stride: From the start of one window to that of the next; None takes `length`,
        so that no two overlap.
      targets: Whether there is a column `targets`.
      remainder: `"drop"` leaves out elements at the end that fill no window; `"pad"`
        adds a window that is filled up with zeros, and a column `<name>_mask`,
        `(length,)`, that is False at the padding (and where a target is missing).
      name: Name of the column of windows.

    Returns:
      A store with the columns `name` and `targets`, `(length,)` or
      `(length, features)`.

    Raises:
      TypeError: If `tokens` is neither array nor store.
      ValueError: If it has another shape or more columns than one, is too short
        for one window, or an option is out of range.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import windows
      >>> store = windows(np.arange(8, dtype=np.uint8), 3)
      >>> batch = store.take([0, 1])
      >>> batch["tokens"].tolist(), batch["targets"].tolist()
      ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    source = as_source(tokens)
    length = as_count("length", length, 1)
    stride = length if stride is None else as_count("stride", stride, 1)
    if remainder not in REMAINDERS:
        raise ValueError(f"remainder must be one of {REMAINDERS}, got {remainder!r}")
    check_names([name, *["targets"] * targets])
    usable = len(source) - targets
    if usable < (length if remainder == "drop" else 1):
        raise ValueError(
            f"{len(source)} elements hold no window of {length}"
            f"{' and its targets' if targets else ''}; use a smaller length"
        )
    return WindowStore(source, length, stride, targets, remainder == "pad", name)


class WindowStore(Store):
    """Windows of one sequence; `windows` makes one."""

    def __init__(
        self,
        source: Store,
        length: int,
        stride: int,
        targets: bool,
        pad: bool,
        name: str,
    ):
        self._source, self._length, self._stride = source, length, stride
        self._pad, self._name = pad, name
        ((self._column, inner),) = source.spec.items()
        spec = ColumnSpec((length, *inner.shape), inner.dtype)
        self._shifts = {name: 0, "targets": 1} if targets else {name: 0}
        # Where a window must end, for its last target to exist.
        self._usable = len(source) - targets
        spec = dict.fromkeys(self._shifts, spec)
        if pad:
            spec[f"{name}_mask"] = ColumnSpec((length,), np.dtype(bool))
        super().__init__(spec)
        self._sampled = source._sampled

    def __len__(self) -> int:
        over = self._usable - self._length
        if not self._pad:
            return over // self._stride + 1
        # Windows until all is covered, but none that would be empty.
        needed = max(-(-over // self._stride), 0) + 1
        return min(needed, -(-self._usable // self._stride))

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        options = [self._length, self._stride, self._pad, list(self._shifts)]
        return digest([self._source.fingerprint(), options])

    def close(self) -> None:
        """See `Store.close`."""
        self._source.close()

    def _read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        starts = rows * self._stride
        if self._pad:
            return self._read_padded(starts)
        if isinstance(self._source, ArrayStore):
            column = self._source.columns[self._column]
            # All windows as a view, of which only the wanted ones are copied.
            view = np.lib.stride_tricks.sliding_window_view(column, self._length, 0)
            view = np.moveaxis(view, -1, 1)
            return {name: gather(view, starts + n) for name, n in self._shifts.items()}
        # One read for both columns, which differ in their ends only.
        places = starts[:, None] + np.arange(self._length + len(self._shifts) - 1)
        flat = self._source._checked_read(places.ravel())[self._column]
        whole = flat.reshape(*places.shape, *flat.shape[1:])
        out = {
            name: aligned_empty((len(rows), *self.spec[name].shape), flat.dtype)
            for name in self._shifts
        }
        for name, shift in self._shifts.items():
            out[name][...] = whole[:, shift : shift + self._length]
        return out

    def _read_padded(self, starts: np.ndarray) -> dict[str, np.ndarray]:
        places = starts[:, None] + np.arange(self._length)
        mask = places < self._usable
        out = {}
        for name, shift in self._shifts.items():
            there = places + shift < len(self._source)
            out[name] = fill_places(self._source, self._column, places + shift, there)
        return {**out, f"{self._name}_mask": mask}


@dataclasses.dataclass(frozen=True, eq=False)
class StreamPlan(Plan):
    r"""Row $b$ of every batch continues row $b$ of the batch before.

    For truncated backpropagation through time: the examples, windows that do not
    overlap, are divided into `batch_size` streams, each contiguous; a recurrent
    state, or a cache of keys and values, is carried from step to step. The plan adds
    a column `is_first` to every batch, True in the first step of an epoch, where the
    carried state must be reset.

    Args:
      num_examples: Windows in the store, as of `windows(tokens, length)`.
      batch_size: Streams, over all processes.
      seed: The order does not depend on it; a loader's transform does.
      epochs: Passes over the data; None never ends.
      remainder: Where `batch_size` does not divide `num_examples`: `"drop"` leaves
        out the last windows, the same in every epoch; `"pad"` gives some streams one
        window more, and marks the last row of the others in `mask`.
      process_index: This process, from 0.
      process_count: Number of processes.

    Raises:
      TypeError: If a number is not an integer.
      ValueError: If a value is out of range, there are fewer examples than streams,
        or the processes cannot share them evenly.

    Examples:
      >>> from jaxaccel.data import StreamPlan
      >>> plan = StreamPlan(6, 2)
      >>> [plan.indices(step).tolist() for step in range(4)]
      [[0, 3], [1, 4], [2, 5], [0, 3]]
      >>> [plan.is_first(step).tolist() for step in range(2)]
      [[True, True], [False, False]]
    """

    num_examples: int
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: int = 0
    epochs: int | None = None
    remainder: str = "drop"
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remainder not in REMAINDERS:
            raise ValueError(
                f"remainder must be one of {REMAINDERS}, got {self.remainder!r}"
            )
        if self.batch_size > self.num_examples:
            raise ValueError(
                f"batch_size {self.batch_size} streams need a window each, but there "
                f"are {self.num_examples}; use a smaller batch_size or shorter windows"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Windows in a stream."""
        full, rest = divmod(self.num_examples, self.batch_size)
        return full + (1 if rest and self.remainder == "pad" else 0)

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of the columns that the plan adds to every batch."""
        return (*super().extra_columns, "is_first")

    def is_first(self, step: int) -> np.ndarray:
        """True for each row of this process whose stream begins at this step."""
        first = self._checked(step) % self.steps_per_epoch == 0
        return np.full(self.local_batch_size, first)

    def extras(self, step: int) -> dict[str, np.ndarray]:
        """See `Plan.extras`: `is_first`, and `mask` if there is padding."""
        return {**super().extras(step), "is_first": self.is_first(step)}

    def _rows(self, step: int, rows: np.ndarray) -> np.ndarray:
        # A stream that has ended repeats its last window, as padding.
        place = np.minimum(step % self.steps_per_epoch, self._lengths(rows) - 1)
        return self._starts(rows) + place

    def _mask(self, step: int, rows: np.ndarray) -> np.ndarray:
        return step % self.steps_per_epoch < self._lengths(rows)

    def _starts(self, rows: np.ndarray) -> np.ndarray:
        full, rest = divmod(self.num_examples, self.batch_size)
        longer = rest if self.remainder == "pad" else 0
        return rows * full + np.minimum(rows, longer)

    def _lengths(self, rows: np.ndarray) -> np.ndarray:
        return self._starts(rows + 1) - self._starts(rows)

    def _order(self) -> dict[str, Any]:
        return {}


def as_source(tokens: np.ndarray | Store) -> Store:
    """Returns a sequence as a store with one column."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim not in (1, 2):
            raise ValueError(
                "a sequence has the shape (time,) or (time, features), got "
                f"{tokens.shape}"
            )
        return ArrayStore({"tokens": tokens})
    if not isinstance(tokens, Store):
        remedy = "convert it: np.asarray(tokens, dtype=np.uint16)"
        if isinstance(tokens, (str, os.PathLike, Mapping)):
            remedy = "open it: open_store(tokens)"
        raise TypeError(
            f"tokens must be an array or a store, got {type(tokens).__name__}; {remedy}"
        )
    if len(tokens.spec) != 1:
        raise ValueError(
            f"tokens must be a store with one column, got {tokens!r}; open only that "
            "column"
        )
    return tokens


def check_names(names: list[str]) -> None:
    """Checks a column's name, which comes first, beside those of the others."""
    if not isinstance(names[0], str) or not names[0]:
        raise ValueError(f"name must be a non-empty string, got {names[0]!r}")
    if len(set(names)) < len(names):
        raise ValueError(
            f"name must differ from the other columns, got {names}; choose another"
        )


def fill_places(
    source: Store, column: str, places: np.ndarray, there: np.ndarray
) -> np.ndarray:
    """Reads the elements of a sequence where there are any; zeros elsewhere."""
    spec = source.spec[column]
    out = aligned_empty((*places.shape, *spec.shape), spec.dtype)
    out[~there] = 0
    out[there] = source._checked_read(places[there])[column]
    return out
