"""open_store: one call for arrays, files, folders and sharded files."""

import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxaccel.data import (
    _array_record,
    _arrow,
    _image_folder,
    _npy,
    _parquet,
    _remote,
    _tar,
    _tfrecord,
)
from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._errors import empty_file, fetched_from
from jaxaccel.data._files import is_idx
from jaxaccel.data._formats import PACKED, Format, OpenOptions
from jaxaccel.data._integers import cast_integers
from jaxaccel.data._store import ColumnSpec, ConcatStore, Store

FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    for module in (
        _npy,
        _arrow,
        _parquet,
        _tfrecord,
        _array_record,
        _tar,
        _image_folder,
    )
}
_SHARD = re.compile(r"(?P<stem>.*)-(?P<index>\d+)-of-(?P<count>\d+)(?P<suffix>.*)")
_HEAD = 64


@typing.overload
def open_store(source: Mapping[str, object]) -> ArrayStore: ...


@typing.overload
def open_store(
    source: Mapping[str, object],
    *,
    columns: Mapping[str, ColumnSpec] | None = ...,
    checksums: bool = ...,
) -> Store: ...


@typing.overload
def open_store(
    source: str | os.PathLike[str],
    *,
    format: str | None = ...,
    columns: Mapping[str, ColumnSpec] | None = ...,
    image_size: tuple[int, int] | None = ...,
    image_mode: str = ...,
    checksums: bool = ...,
    num_threads: int | None = ...,
) -> Store: ...


def open_store(
    source: str | os.PathLike[str] | Mapping[str, object],
    *,
    format: str | None = None,
    columns: Mapping[str, ColumnSpec] | None = None,
    image_size: tuple[int, int] | None = None,
    image_mode: str = "RGB",
    checksums: bool = True,
    num_threads: int | None = None,
) -> Store:
    """Opens arrays and files as one store of named columns.

    Uncompressed files are memory-mapped where the format allows. A mapped file must
    not be shortened while the store is in use: the operating system kills a process
    that reads behind the new end.

    Args:
      source: One of

        - a mapping from column name to an array or to the path or address of a
          `.npy` or IDX file (`*-ubyte`, `*-ubyte.gz`; recognized by content);
        - the path of one file; its format is recognized by content. A `.npy` file
          gives the column its own name (`image.npy`: `image`), an IDX file gives
          `image` where it has three axes or more, else `label`;
        - a pattern of sharded files, `train-*-of-00008.arrow`; none of the
          promised number may be missing;
        - an address, `https://`, `s3://`, `gs://` or another that fsspec knows, of
          any of these: fetched once into the cache folder (needs
          `jaxaccel[remote]`);
        - the path of a folder: with one `<column>.npy` for each column, with the
          files of one other format, or with a folder of images for each class.
          Where several fit, `format` says which.
      format: Name of the format, where it should not be recognized.
      columns: The columns to read and what they hold, for files that do not say.
        Integers may be asked for in another width than the file's: a value that
        does not fit is an error when it is read.
      image_size: (height, width) that encoded images are resized to; without it,
        all must have one size. A JPEG at least four times as large is shrunk while
        it is decoded, which is faster; single pixels then differ from Pillow's
        resize by up to 15 levels of 255. Arrays of another size are refused.
      image_mode: `"RGB"` or `"L"`, the channels of encoded images.
      checksums: Whether what has a checksum is compared with it when it is read.
      num_threads: Threads that decode images; None takes one a core, 8 at most.

    Returns:
      The store. Arrays are referenced, not copied; batches are always copies.

    Raises:
      DataCorruptionError: If a file is damaged.
      FileNotFoundError: If a file is missing.
      OSError: If an address does not deliver.
      TypeError: If a column is neither array nor path, or has an unsupported
        dtype.
      ValueError: If the store would be empty, the columns differ in length or hold
        something else than `columns` says, or a file is of another format.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import open_store
      >>> store = open_store({"image": np.zeros((6, 2, 2, 1), np.uint8),
      ...                     "label": np.arange(6, dtype=np.uint8)})
      >>> len(store), store.spec["image"].shape
      (6, (2, 2, 1))
      >>> store.take([4, 1])["label"].tolist()
      [4, 1]
    """
    columns = as_columns(columns)
    options = OpenOptions(columns, image_size, image_mode, checksums, num_threads)
    _check_options(options, format)
    if isinstance(source, Mapping):
        arrays = {name: _as_column(name, column) for name, column in source.items()}
        store = _npy.open_columns(arrays, columns, checksums=checksums)
        return _decoded_as_asked(store, options)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"open_store takes a path or a mapping of columns, got "
            f"{type(source).__name__}; name the columns: open_store({{'image': x}})"
        )
    chosen = FORMATS[format] if format else None
    address = str(source) if _remote.is_remote(source) else None
    try:
        store = open_all(resolve(source, chosen), options)
    except ValueError as error:
        if address is None or address in str(error):
            raise
        raise fetched_from(address, error) from error
    store._address = address
    return store


def resolve(
    source: str | os.PathLike[str], chosen: Format | None
) -> list[tuple[Path, Format]]:
    """Returns the files that make up a data set, remote ones after fetching them.

    Args:
      source: A path, a pattern or an address; see `open_store`.
      chosen: Their format; None recognizes it.

    Returns:
      Each file, or the folder, of which a format makes one store.
    """
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"expected the path of a file or folder, got {type(source).__name__}; "
            "arrays and stores have no files"
        )
    if _remote.is_remote(source):
        paths = _remote.fetch(str(source))
    elif "*" in Path(source).name:
        paths = shards(Path(source).expanduser())
    else:
        paths = [Path(source).expanduser()]
    if not paths[0].exists():
        raise FileNotFoundError(f"no data file or folder at {paths[0]}; check the path")
    if paths[0].is_dir():
        return _resolve_folder(paths[0], chosen)
    return [(path, chosen or detect(path)) for path in paths]


def shards(pattern: Path) -> list[Path]:
    """Returns the files of a pattern, in order, all that their names promise.

    Args:
      pattern: A path with `*` in its last part.

    Raises:
      FileNotFoundError: If no file matches, or a shard is missing.
      ValueError: If the files belong to several sharded sets.
    """
    files = sorted(
        file
        for file in pattern.parent.glob(pattern.name)
        if file.is_file() and not _is_companion(file)
    )
    if not files:
        raise FileNotFoundError(f"no file matches {pattern}; check the path")
    return complete(files)


def complete(files: list[Path]) -> list[Path]:
    """Checks that no shard of a sharded set is missing; returns them in order."""
    found = {file: _SHARD.fullmatch(file.name) for file in files}
    matches = [match for match in found.values() if match]
    if not matches:
        return sorted(files, key=_by_number)
    sets = {(m["stem"], m["count"], m["suffix"]) for m in matches}
    if len(sets) > 1 or len(matches) < len(files):
        names = ", ".join(sorted(file.name for file in files)[:6])
        raise ValueError(
            f"the files belong to more than one set of shards: {names}; give a pattern "
            "that matches one set"
        )
    by_index = {int(match["index"]): file for file, match in found.items() if match}
    count = int(matches[0]["count"])
    missing = sorted(set(range(count)) - set(by_index))
    if missing or len(by_index) > count:
        raise FileNotFoundError(
            f"{files[0].parent}: {count} shards are promised by names such as "
            f"{files[0].name}, but those with the numbers {missing[:10]} are missing; "
            "fetch them again"
        )
    return [by_index[index] for index in range(count)]


def _by_number(file: Path) -> list[tuple[int, str]]:
    # x2 before x10.
    parts = re.split(r"(\d+)", file.name)
    return [(int(part) if part.isdecimal() else 0, part) for part in parts]


def detect(path: Path) -> Format:
    """Returns the format of a file, by its content first, then by its name."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    for known in FORMATS.values():
        if head and known.recognizes(head):
            return known
    for known in FORMATS.values():
        if path.name.endswith(known.suffixes):
            if not head:
                raise empty_file(path)
            return known
    if is_idx(path, head):
        return _npy.FORMAT
    if not head:
        raise empty_file(path)
    suffixes = (s for known in FORMATS.values() for s in known.suffixes)
    raise ValueError(
        f"{path} is of no known format: it starts with {head[:8]!r}. Name the format "
        f"with format=, one of {sorted(FORMATS)}, or pass a file of one of them (named "
        f"{', '.join(s for s in suffixes if not s.endswith(PACKED))} or *-ubyte)"
    )


def as_columns(
    columns: Mapping[str, ColumnSpec] | None,
) -> dict[str, ColumnSpec] | None:
    """Brings what users write as columns into one form."""
    if columns is None:
        return None
    if not isinstance(columns, Mapping):
        raise TypeError(
            "columns maps names to what they hold, {'label': ColumnSpec(shape, "
            f"dtype)}}, got {columns!r}"
        )
    if not columns:
        raise ValueError("columns names no column; leave it out to read all")
    for name, spec in columns.items():
        if not isinstance(spec, ColumnSpec):
            raise TypeError(
                f"columns says of {name!r} what it holds: ColumnSpec((28, 28), "
                f"np.dtype(np.uint8)), got {spec!r}"
            )
    return {
        name: ColumnSpec(tuple(spec.shape), np.dtype(spec.dtype).newbyteorder("="))
        for name, spec in columns.items()
    }


def open_all(files: list[tuple[Path, Format]], options: OpenOptions) -> Store:
    """Opens what `resolve` returned as one store."""
    stores: list[Store] = []
    try:
        for path, known in files:
            if path.is_file():
                _check_content(path, known)
            stores.append(
                cast_integers(known.open(path, options), options.columns, path)
            )
        store = stores[0] if len(stores) == 1 else ConcatStore(stores)
        return _decoded_as_asked(store, options)
    except BaseException:
        for store in stores:
            store.close()
        raise


def _check_content(path: Path, chosen: Format) -> None:
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if not head or chosen.recognizes(head):
        return
    for known in FORMATS.values():
        if known.recognizes(head):
            raise ValueError(
                f"{path} is of the format {known.name}, as its content says, not "
                f"{chosen.name}; pass format={known.name!r}, or leave it out"
            )


def _decoded_as_asked(store: Store, options: OpenOptions) -> Store:
    shapes = [spec.shape for spec in store.spec.values()]
    image_size = options.image_size
    gray = options.image_mode == "L"
    if gray and not any(len(shape) == 3 and shape[2] == 1 for shape in shapes):
        store.close()
        raise ValueError(
            "image_mode 'L' decodes images to one channel, but the source holds arrays "
            f"of {shapes}; convert them before, or leave image_mode out"
        )
    if image_size and not any(shape[:2] == tuple(image_size) for shape in shapes):
        store.close()
        raise ValueError(
            f"image_size {image_size} resizes images while they are decoded, but the "
            f"source holds arrays of {shapes}; resize them before"
        )
    return store


def _resolve_folder(path: Path, chosen: Format | None) -> list[tuple[Path, Format]]:
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    found: dict[str, list[Path]] = {}
    for known in [chosen] if chosen else FORMATS.values():
        if known.suffixes:
            found[known.name] = [f for f in files if f.name.endswith(known.suffixes)]
        else:
            image = path if chosen else _image_folder.first_image(path)
            found[known.name] = [image] if image else []
    found = {name: mine for name, mine in found.items() if mine}
    if len(found) > 1:
        examples = [f"{mine[0].relative_to(path)} ({n})" for n, mine in found.items()]
        raise ValueError(
            f"the folder {path} holds data of several formats: {', '.join(examples)}; "
            f"choose one: format={next(iter(found))!r}"
        )
    for name, mine in found.items():
        if FORMATS[name].suffixes and name != "npy":
            return [(file, FORMATS[name]) for file in complete(mine)]
        return [(path, FORMATS[name])]
    if chosen is None:
        # Images further down, or the error that says what is expected.
        return [(path, _image_folder.FORMAT)]
    raise ValueError(
        f"the folder {path} holds no file of the format {chosen.name} "
        f"({', '.join(chosen.suffixes)}); pass the path of a file for other names"
    )


def _is_companion(file: Path) -> bool:
    # Checksums and indices, which lie beside the data.
    return file.name.endswith((".crc.npz", ".idx.npz"))


def _as_column(name: str, column: Any) -> Any:
    if isinstance(column, jax.Array):
        return np.asarray(column)
    if isinstance(column, str) and _remote.is_remote(column):
        files = _remote.fetch(column)
        if len(files) != 1 or files[0].is_dir():
            raise ValueError(f"column {name!r} must be one file, got {column}")
        return files[0]
    return Path(column).expanduser() if isinstance(column, (str, Path)) else column


def _check_options(options: OpenOptions, format: str | None) -> None:
    if format is not None and format not in FORMATS:
        raise ValueError(f"format must be one of {sorted(FORMATS)}, got {format!r}")
    if options.image_mode not in ("RGB", "L"):
        raise ValueError(f"image_mode must be 'RGB' or 'L', got {options.image_mode!r}")
    size: Any = options.image_size
    if size is not None:
        positive = isinstance(size, (tuple, list)) and all(
            isinstance(x, (int, np.integer)) and x >= 1 for x in size
        )
        if not positive or len(size) != 2:
            raise ValueError(
                f"image_size must be (height, width), both positive, got {size!r}"
            )
    if options.num_threads is not None and options.num_threads < 1:
        raise ValueError(f"num_threads must be at least 1, got {options.num_threads}")
