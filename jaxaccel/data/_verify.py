"""verify: read everything once, and compare whatever has a checksum."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from jaxaccel.data import _image_folder, _open
from jaxaccel.data._bar import Bar
from jaxaccel.data._conversion import batch_rows
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import Format, OpenOptions
from jaxaccel.data._image_folder import ImageFolderStore
from jaxaccel.data._sidecar import (
    WITH_CHECKSUMS,
    Checksums,
    sidecar_path,
    write_checksums,
)
from jaxaccel.data._store import ColumnSpec


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What `verify` has read.

    Attributes:
      examples: How many.
      bytes: Size of the files.
      files: What each file was compared with: `"sidecar"`, the checksums beside it;
        `"format"`, those that its format has; `"none"`: it could be read.
      errors: The damage that was found, with `all_errors`.
    """

    examples: int
    bytes: int
    files: Mapping[Path, str]
    errors: tuple[DataCorruptionError, ...] = ()


def verify(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    columns: Mapping[str, ColumnSpec] | None = None,
    image_size: tuple[int, int] | None = None,
    image_mode: str = "RGB",
    num_threads: int | None = None,
    write_index: bool = False,
    all_errors: bool = False,
    progress: bool = True,
) -> VerifyReport:
    """Reads every example of a file, a folder or shards, with all checksums on.

    TFRecord and ArrayRecord have checksums of their own. For npy, Arrow, Parquet and
    tar they are in a sidecar, `<file>.crc.npz`; without one, damage is noticed only
    where it makes a file unreadable. `write_index=True` writes one for each file that
    has none (of folders of images: none), once it could be read completely: it
    vouches for what is there now. TFRecord gains by one, too: by itself, a file that
    was cut between two records is intact.

    Args:
      source: A path, pattern or address, as in `open_store`.
      format: Name of the format, where it should not be recognized.
      columns: As in `open_store`.
      image_size: Likewise.
      image_mode: Likewise.
      num_threads: Likewise.
      write_index: Whether to write the missing sidecars.
      all_errors: Whether to go on with the next file after damage (of a folder of
        images: with the next image), and to return what was found instead of
        raising it.
      progress: As in `convert`.

    Returns:
      What was read, and what it was compared with.

    Raises:
      DataCorruptionError: At the first damage, without `all_errors`.
      FileNotFoundError: If a file is missing.
      OSError: If a sidecar cannot be written.

    Examples:
      >>> import pathlib, tempfile
      >>> import numpy as np
      >>> from jaxaccel.data import convert, verify
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "train"
      >>> _ = convert({"x": np.zeros((100, 9), np.uint8)}, path, progress=False)
      >>> report = verify(path, progress=False)
      >>> report.examples, report.bytes, list(report.files.values())
      (100, 1028, ['sidecar'])
    """
    if format is not None and format not in _open.FORMATS:
        raise ValueError(
            f"format must be one of {sorted(_open.FORMATS)}, got {format!r}"
        )
    options = OpenOptions(
        _open.as_columns(columns), image_size, image_mode, True, num_threads
    )
    paths = _open.resolve(source, _open.FORMATS[format] if format else None)
    parts = {path: (known, _files(path, known)) for path, known in paths}
    total = sum(_size(files) for _, files in parts.values())
    errors: list[DataCorruptionError] = []
    examples, done = 0, 0
    compared: dict[Path, str] = {}
    with Bar(total, "verify", enabled=progress) as bar:
        for path, (known, files) in parts.items():
            size = _size(files)

            def show(share: float, done: int = done, size: int = size) -> None:
                bar.update(done + int(share * size))

            compared |= {file: _compared_with(file, known) for file in files}
            try:
                _check_sidecars(files)
                if all_errors and known is _image_folder.FORMAT:
                    intact, found = _read_images(path, options, show)
                    examples += intact
                    errors += found
                else:
                    examples += _read(path, known, options, show)
                if write_index and known.suffixes:
                    _write_missing(files)
            except DataCorruptionError as error:
                if not all_errors:
                    raise
                errors.append(error)
            done += size
            bar.update(done)
    return VerifyReport(examples, total, compared, tuple(errors))


def _files(path: Path, known: Format) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = path.iterdir() if known.suffixes else path.rglob("*")
    suffixes = known.suffixes or ("",)
    return sorted(f for f in files if f.is_file() and f.name.endswith(suffixes))


def _size(files: list[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def _compared_with(file: Path, known: Format) -> str:
    if sidecar_path(file).exists():
        return "sidecar"
    return "format" if known.name in WITH_CHECKSUMS else "none"


def _check_sidecars(files: list[Path]) -> None:
    for file in files:
        # Also what no example needs, such as padding.
        checksums = Checksums.load(file)
        if checksums is not None and checksums.size:
            checksums.check_all(np.memmap(file, np.uint8, "r"))


def _read(
    path: Path, known: Format, options: OpenOptions, show: Callable[[float], None]
) -> int:
    with _open.open_all([(path, known)], options) as store:
        count = 0
        for batch in store.scan(batch_rows(store)):
            count += len(next(iter(batch.values())))
            show(count / len(store))
    return count


def _read_images(
    path: Path, options: OpenOptions, show: Callable[[float], None]
) -> tuple[int, list[DataCorruptionError]]:
    errors: list[DataCorruptionError] = []
    store = ImageFolderStore(path, options, tolerant=True)
    size, length = batch_rows(store), len(store)
    for start in range(0, length, size):
        rows = np.arange(start, min(start + size, length))
        try:
            store.take(rows)
        except DataCorruptionError:
            # Which ones, and whether they are the only ones, is seen one by one.
            for row in rows:
                try:
                    store.take([row])
                except DataCorruptionError as error:
                    errors.append(error)
        show(int(rows[-1] + 1) / length)
    return length - len(errors), errors


def _write_missing(files: list[Path]) -> None:
    for file in files:
        if not sidecar_path(file).exists():
            write_checksums(file)
