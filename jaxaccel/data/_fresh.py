"""What a store has read, compared with what its columns promise."""

from typing import Any

import numpy as np


def checked_copy(store: Any, batch: Any, count: int) -> dict[str, np.ndarray]:
    """Checks and copies what `_read` or `_scan` of a user's store returned.

    Args:
      store: The store; its columns are what is expected.
      batch: What it returned.
      count: Examples that were asked for.

    Returns:
      The batch, of arrays that nothing else refers to.

    Raises:
      TypeError: If it is no dict of NumPy arrays.
      ValueError: If a column is missing or unknown, or has another shape or dtype.
    """
    spec = store.spec
    if not isinstance(batch, dict):
        raise TypeError(_message(store, "a dict of arrays", type(batch).__name__))
    if batch.keys() != spec.keys():
        raise ValueError(_message(store, f"the columns {[*spec]}", str([*batch])))
    for name, (shape, dtype) in spec.items():
        array = batch[name]
        if not isinstance(array, np.ndarray) or isinstance(array, np.ma.MaskedArray):
            found = type(array).__name__
            raise TypeError(_message(store, f"a NumPy array as {name!r}", found))
        if array.shape != (count, *shape) or array.dtype != dtype:
            wanted = f"{name!r} as {np.dtype(dtype)}{[count, *shape]}"
            found = f"{array.dtype}{[*array.shape]}"
            raise ValueError(_message(store, wanted, found))
    return {name: np.array(array) for name, array in batch.items()}


def _message(store: Any, wanted: str, found: str) -> str:
    return (
        f"{type(store).__name__} must read {wanted}, one row for each that was asked "
        f"for, got {found}; correct its _read, or the columns that it passes to "
        "Store.__init__"
    )
