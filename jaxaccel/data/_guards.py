"""Warnings of pipelines that cost a multiple of what they could, with the multiple."""

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxaccel.data._store import ColumnSpec, Store, gather

_SAMPLE = 16
_MANY_BYTES = 64 << 20
# What a Loader allows by default.
_MAX_AHEAD = 256 << 20
# A per-item map that costs less than this many gathers is let pass.
_LEAST_FACTOR = 3.0
_GATHERED = 256
_MAPS = tuple(
    f"{kind}{of}Dataset"
    for kind in ("Map", "RandomMap", "MapWithIndex")
    for of in ("Map", "Iter")
)


class DataWarning(UserWarning):
    """The data takes more bytes or time than it must; the message says how much."""


def check_store(store: Store, batch_size: int, *, stacklevel: int) -> None:
    """Warns of columns in a wider dtype than their values need.

    Float images of whole numbers from 0 to 255, and 64-bit labels that are small
    whole numbers. Looks at a few examples, and only where the dtype is suspicious.

    Args:
      store: The store.
      batch_size: Examples in a batch, for the figures.
      stacklevel: Frames up to the caller to point at.
    """
    suspects = [name for name, spec in store.spec.items() if _suspicious(spec)]
    if not suspects:
        return
    rows = np.unique(np.linspace(0, len(store) - 1, _SAMPLE).astype(np.int64))
    sample = store.take(rows)
    for name in suspects:
        narrow = _narrowest(sample[name], store.spec[name])
        if narrow is not None:
            message = _too_wide(name, store.spec[name], narrow, batch_size, len(rows))
            warnings.warn(message, DataWarning, stacklevel=stacklevel)


def check_sent(sent_bytes: int, workers: int, *, stacklevel: int) -> None:
    """Warns where every worker process gets a copy of data in memory.

    Args:
      sent_bytes: Size of what each was sent.
      workers: How many there are.
      stacklevel: Frames up to the caller to point at.
    """
    if sent_bytes > _MANY_BYTES:
        warnings.warn(
            f"each of {workers} workers gets a copy of {_in_bytes(sent_bytes)} that "
            f"this process holds in memory, {workers + 1}x the memory in all; keep "
            "the data in files, which workers share: convert() them, open_store(path)",
            DataWarning,
            stacklevel=stacklevel,
        )


def check_pipeline(dataset: Any) -> list[str]:
    """Warns of what makes a Grain pipeline slow or large, having measured it.

    Finds functions that are mapped over single examples of data in memory, and
    compares their time with gathering the same examples at once; and buffers of
    hundreds of batches, as Grain's default `ReadOptions` have them. Reads a few
    elements of the pipeline to do so.

    Args:
      dataset: A `grain.MapDataset` or `grain.IterDataset`.

    Returns:
      What it found, the messages of the warnings.

    Raises:
      TypeError: If `dataset` is no Grain data set.

    Warns:
      DataWarning: For each finding.

    Examples:
      >>> import warnings
      >>> import grain
      >>> import numpy as np
      >>> from jaxaccel.data import check_pipeline
      >>> images = np.zeros((64, 8, 8, 3), np.uint8)
      >>> dataset = grain.MapDataset.source(images).map(lambda x: x / 255).batch(16)
      >>> with warnings.catch_warnings():
      ...     warnings.simplefilter("ignore")
      ...     found = check_pipeline(dataset)
      >>> found[0].split(":")[0]
      'a function is mapped over single examples of data in memory'
    """
    import grain

    if not isinstance(dataset, (grain.MapDataset, grain.IterDataset)):
        raise TypeError(
            "check_pipeline takes a grain.MapDataset or grain.IterDataset, got "
            f"{type(dataset).__name__}"
        )
    nodes = list(_ancestors(dataset))
    found = [*_item_maps(nodes), *_large_buffers(nodes)]
    for message in found:
        warnings.warn(message, DataWarning, stacklevel=2)
    return found


def _suspicious(spec: ColumnSpec) -> bool:
    if spec.shape:
        return spec.dtype.kind == "f" and spec.dtype.itemsize >= 4
    return spec.dtype.itemsize == 8 and spec.dtype.kind in "iuf"


def _narrowest(values: np.ndarray, spec: ColumnSpec) -> np.dtype | None:
    low, high = values.min(), values.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        return None
    if spec.dtype.kind == "f" and (values != np.round(values)).any():
        return None
    if spec.shape:
        # Only 0 and 1 may be a mask or one-hot code, which says nothing of images.
        return np.dtype(np.uint8) if low >= 0 and 1 < high <= 255 else None
    for dtype in (np.uint8, np.int8, np.uint16, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    return None


def _too_wide(
    name: str, spec: ColumnSpec, narrow: np.dtype, batch_size: int, looked_at: int
) -> str:
    size = batch_size * int(np.prod(spec.shape, dtype=np.int64))
    wide, slim = size * spec.dtype.itemsize, size * narrow.itemsize
    fix = f"if all of them are so, store x.astype(np.{narrow})"
    if spec.shape:
        fix += " and normalize inside the jitted step (make_normalizer)"
    values = "whole numbers from 0 to 255" if spec.shape else f"fit {narrow}"
    return (
        f"column {name!r} is {spec.dtype}, but the values of the {looked_at} examples "
        f"looked at {'are ' if spec.shape else ''}{values}: {_in_bytes(wide)} a batch "
        f"instead of {_in_bytes(slim)}, {wide / slim:g}x the bytes to gather and to "
        f"ship; {fix}"
    )


def _ancestors(dataset: Any) -> Iterator[Any]:
    # The whole tree, the last step first.
    yield dataset
    for parent in dataset.parents:
        yield from _ancestors(parent)


def _item_maps(nodes: list[Any]) -> Iterator[str]:
    for node in nodes:
        below = list(_ancestors(node))[1:]
        if type(node).__name__ not in _MAPS or any(_is_batch(n) for n in below):
            continue
        columns = _arrays(_first(node))
        if columns and any(_in_memory(n) for n in below):
            item, whole = _seconds_an_element(node), _gather_seconds(columns)
            if item > _LEAST_FACTOR * whole:
                yield (
                    "a function is mapped over single examples of data in memory: "
                    f"{1e6 * item:.1f} us an example, {item / whole:.0f}x the "
                    f"{1e6 * whole:.2f} us of gathering {_GATHERED} at once; use a "
                    "Loader, whose transform gets whole batches, or augment inside "
                    "the jitted step"
                )
        # The maps below this one were measured with it.
        return


def _large_buffers(nodes: list[Any]) -> Iterator[str]:
    for node in nodes:
        options = getattr(node, "_read_options", None)
        if options is None or not any(_is_batch(n) for n in _ancestors(node)):
            continue
        size = sum(array.nbytes for array in _arrays(_first(node.parents[0])))
        ahead = options.prefetch_buffer_size
        if ahead * size > _MAX_AHEAD:
            few = max(1, min(4, _MAX_AHEAD // size))
            yield (
                f"{ahead} batches of {_in_bytes(size)} are prepared ahead, "
                f"{_in_bytes(ahead * size)} in all, {ahead * size / _MAX_AHEAD:.1f}x "
                f"what a Loader allows; pass to_iter_dataset(grain.ReadOptions("
                f"num_threads=2, prefetch_buffer_size={few}))"
            )


def _is_batch(node: Any) -> bool:
    return type(node).__name__ in ("BatchMapDataset", "BatchIterDataset")


def _in_memory(node: Any) -> bool:
    source = getattr(node, "_source", None)
    if isinstance(source, (np.ndarray, list, tuple, range)):
        return not isinstance(source, np.memmap)
    return type(node).__name__ == "RangeMapDataset"


def _first(node: Any) -> Any:
    if hasattr(node, "__getitem__"):
        return node[0]
    with contextlib.closing(iter(node)) as elements:
        return next(elements)


def _seconds_an_element(node: Any, count: int = 20) -> float:
    if hasattr(node, "__getitem__"):
        return _median(lambda i: node[i % len(node)], count)
    with contextlib.closing(iter(node)) as elements:
        next(elements)
        return _median(lambda _: next(elements, None), count)


def _gather_seconds(columns: list[np.ndarray]) -> float:
    batches = [np.repeat(array[None], _GATHERED, axis=0) for array in columns]
    rows = np.random.default_rng(0).permutation(_GATHERED)
    return _median(lambda _: [gather(b, rows) for b in batches], 5) / _GATHERED


def _median(call: Callable[[int], object], count: int) -> float:
    seconds = []
    for number in range(count):
        start = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _arrays(element: Any) -> list[np.ndarray]:
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(element)]
    return [leaf for leaf in leaves if leaf.dtype.kind in "biufc"]


def _in_bytes(size: int) -> str:
    if size < 1e6:
        return f"{size / 1e3:.3g} kB"
    return f"{size / 1e6:,.0f} MB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
