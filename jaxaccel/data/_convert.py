"""convert: any store to files of any format, whole or not at all."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxaccel.data import _open, _remote
from jaxaccel.data._checks import as_count
from jaxaccel.data._conversion import (
    Target,
    batch_rows,
    refuse_existing,
    write_store,
)
from jaxaccel.data._formats import PACKED, Format
from jaxaccel.data._partial import partial_folder, sweep
from jaxaccel.data._store import ColumnSpec, Store


def convert(
    source: Store | str | os.PathLike[str] | Mapping[str, object],
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,
    compression: str | None = None,
    shards: int | None = None,
    columns: Mapping[str, ColumnSpec] | None = None,
    image_size: tuple[int, int] | None = None,
    image_mode: str = "RGB",
    num_threads: int | None = None,
    batch_size: int | None = None,
    progress: bool = True,
    overwrite: bool = False,
) -> Store:
    """Writes a store to files of another format, decoded.

    Nothing has the final name before everything is complete and on the disk. Until
    then it is in the folder `<destination>.partial`. After an interruption (Ctrl-C,
    a killed process, a full disk), the same call goes on where it was: decoded
    examples are staged there as plain arrays, noted with checksums every few
    seconds, and a finished shard is written from them. What comes from arrays and
    memory-mapped `.npy` files is not staged, since nothing needs to be decoded
    again. Another source, or other options, start anew.

    The names of classes (`store.class_names`, of folders of images) are kept by npy
    folders, Arrow and Parquet files, and by no other format.

    The disk needs room for the result and for the staged examples of one shard (of
    everything, without `shards`), except where the result is an npy folder.

    Args:
      source: A store, or what `open_store` opens.
      destination: The file, with the format's suffix; without a suffix, a folder of
        `<column>.npy` with checksums. Its parent folder must exist.
      format: Name of the format, where the suffix should not say it.
      compression: One of the format's, such as `"zstd"`; None does not compress.
      shards: Into how many files; `train.arrow` becomes
        `train-00000-of-00008.arrow` and so on, which `open_store` opens as
        `train-*-of-00008.arrow`.
      columns: As in `open_store`, for a `source` that is no store.
      image_size: Likewise; images are resized while they are decoded.
      image_mode: Likewise.
      num_threads: Likewise.
      batch_size: Examples that are decoded at a time; None takes 16 MB.
      progress: Whether standard error shows how far it is: a bar on a terminal,
        a line every ten seconds elsewhere.
      overwrite: Whether files with the final names are replaced, once the new ones
        are complete.

    Returns:
      The store of what was written.

    Raises:
      DataCorruptionError: If the source turns out to be damaged.
      FileExistsError: If the destination exists, without `overwrite`; or another
        process converts to it.
      OSError: If the disk is full or cannot be written.
      ValueError: If the format or its compression is unknown, or the format cannot
        hold the columns.

    Examples:
      >>> import pathlib, tempfile
      >>> import numpy as np
      >>> from jaxaccel.data import convert
      >>> images = np.zeros((10, 8, 8, 3), np.uint8)
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> store = convert({"image": images}, folder / "train", progress=False)
      >>> len(store), store.spec["image"].shape, [p.name for p in folder.iterdir()]
      (10, (8, 8, 3), ['train'])
    """
    if _remote.is_remote(destination):
        raise ValueError(
            f"convert writes to a local disk, not to {destination}; convert to a path "
            "and copy the files there with the tools of that storage"
        )
    destination = Path(destination).expanduser()
    known = _choose(format, destination)
    _check(known, destination, compression, shards)
    asked = {"columns": columns, "image_size": image_size, "num_threads": num_threads}
    asked["image_mode"] = None if image_mode == "RGB" else image_mode
    names = _names(destination, shards)
    finals = [destination.with_name(name) for name in names]
    sweep(destination)
    if not partial_folder(destination).exists():
        refuse_existing(finals, overwrite)
    with _opened(source, asked) as store:
        if (shards or 1) > len(store):
            raise ValueError(
                f"shards must be at most the number of examples, {len(store)}, got "
                f"{shards}"
            )
        target = Target(destination, names, known, compression)
        size = as_count(
            "batch_size", batch_rows(store) if batch_size is None else batch_size, 1
        )
        write_store(store, target, size=size, progress=progress, overwrite=overwrite)
    paths = [(final, known) for final in finals]
    return _open.open_all(paths, _open.OpenOptions())


def _choose(format: str | None, destination: Path) -> Format:
    formats = _open.FORMATS
    writable = sorted(name for name, known in formats.items() if known.create)
    if format is not None and format not in formats:
        raise ValueError(f"format must be one of {writable}, got {format!r}")
    if destination.name.lower().endswith(PACKED):
        own = sorted(name for name in writable if formats[name].compressions)
        raise ValueError(
            f"convert does not compress a file as a whole, as the suffix of "
            f"{destination} says; leave {destination.suffix} out, or pass compression= "
            f"with a format that has one of its own: {own}"
        )
    by_suffix = [
        known for known in formats.values() if destination.name.endswith(known.suffixes)
    ]
    if format is None and not by_suffix:
        if destination.suffix:
            suffixes = sorted(
                suffix
                for name in writable
                for suffix in formats[name].suffixes
                if name != "npy" and not suffix.endswith(PACKED)
            )
            raise ValueError(
                f"no format has the suffix {destination.suffix!r} of {destination}; "
                f"use one of {suffixes}, none for an npy folder, or pass format="
            )
        return formats["npy"]
    known = formats[format] if format is not None else by_suffix[0]
    if known.create is None:
        raise ValueError(f"{known.name} is only read; format must be one of {writable}")
    if by_suffix and known not in by_suffix:
        raise ValueError(
            f"format {known.name!r} and the suffix of {destination} contradict each "
            "other; leave one of them out"
        )
    return known


def _check(
    known: Format, destination: Path, compression: str | None, shards: int | None
) -> None:
    if compression is not None and not known.compressions:
        raise ValueError(
            f"{known.name} is written without compression, got {compression!r}; leave "
            "it out, or choose another format"
        )
    if compression is not None and compression not in known.compressions:
        raise ValueError(
            f"compression of {known.name} must be None or one of "
            f"{list(known.compressions)}, got {compression!r}"
        )
    if known.name == "npy" and destination.suffix == ".npy":
        raise ValueError(
            f"the npy format is a folder of <column>.npy; leave the suffix out: "
            f"{destination.with_suffix('')}"
        )
    if shards is not None and as_count("shards", shards, 1) and known.name == "npy":
        raise ValueError(
            "an npy folder has no shards; leave shards out, or choose another format"
        )
    if not destination.parent.is_dir():
        raise FileNotFoundError(f"no folder {destination.parent}; create it first")


def _names(destination: Path, shards: int | None) -> list[str]:
    if shards is None:
        return [destination.name]
    stem, suffix = destination.stem, destination.suffix
    return [f"{stem}-{i:05d}-of-{shards:05d}{suffix}" for i in range(shards)]


@contextlib.contextmanager
def _opened(source: Any, asked: dict[str, Any]) -> Iterator[Store]:
    asked = {name: value for name, value in asked.items() if value is not None}
    if not isinstance(source, Store):
        with _open.open_store(source, **asked) as store:
            yield store
        return
    if asked:
        raise ValueError(
            f"{sorted(asked)} are for a source that convert opens; pass them to "
            "open_store, which opened this one"
        )
    yield source
