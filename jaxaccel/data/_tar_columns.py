"""What the members of a tar file's samples are, as columns."""

import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxaccel.data._decode import probe_image
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import OpenOptions
from jaxaccel.data._integers import can_cast
from jaxaccel.data._store import ColumnSpec
from jaxaccel.data._tar_index import Samples

_IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")
_LABELS = ("cls", "label.txt", "cls.txt")
_INTEGERS = {np.dtype(code).name: np.dtype(code) for code in "bhilqBHILQ"}


class TarColumn(NamedTuple):
    """One column of a tar file.

    Attributes:
      kind: `"image"`, `"label"` or `"npy"`.
      starts: Where the member of each sample begins.
      sizes: Its bytes.
      spec: What the column holds.
      header: What stands before the array in the first `.npy` member; empty where
        its bytes are not in C order.
      dtype: That array's dtype, in the byte order of the file.
    """

    kind: str
    starts: np.ndarray
    sizes: np.ndarray
    spec: ColumnSpec
    header: bytes
    dtype: np.dtype


def choose_columns(
    path: Path,
    samples: Samples,
    options: OpenOptions,
    read: Callable[[int, int], bytes],
) -> dict[str, TarColumn]:
    """Decides on the columns of a tar file.

    Args:
      path: The file, for messages.
      samples: Its members.
      options: How to read it; `TarStore` says what there is without
        `options.columns`.
      read: Returns the bytes of a member of the first sample, by start and size.

    Returns:
      The columns by name.

    Raises:
      DataCorruptionError: If a member of the first sample is damaged.
      ValueError: If there is no column, or not what is asked for, or not in all
        samples.
    """
    kinds, wanted = samples.kinds, options.columns
    roles: dict[str, list[tuple[str, int]]] = {}
    for place, kind in enumerate(kinds):
        name, role = _role(kind)
        if role:
            roles.setdefault(name, []).append((role, place))
    if wanted is None:
        first = samples.starts[0] >= 0
        names = [n for n in sorted(roles) if any(first[place] for _, place in roles[n])]
    else:
        names = list(wanted)
    missing = [name for name in names if name not in roles]
    if missing or not names:
        raise ValueError(
            f"{path}: there is no column {missing or ''}; the kinds of member are "
            f"{kinds}, the columns {sorted(roles)}"
        )
    columns = {}
    for name in names:
        role, starts, sizes = _members(path, name, roles[name], samples)
        content = read(int(starts[0]), int(sizes[0]))
        where = (path, 0, int(starts[0]))
        spec, header, dtype = _look(role, name, content, where, samples.note, options)
        spec = _as_wanted(path, name, role, spec, (wanted or {}).get(name))
        columns[name] = TarColumn(role, starts, sizes, spec, header, dtype)
    return columns


def npy_header(
    content: bytes, where: tuple[Path, int, int]
) -> tuple[ColumnSpec, bytes, np.dtype]:
    """Reads what a `.npy` member says about itself.

    Args:
      content: The member.
      where: Path, record and offset, for messages.

    Returns:
      What it holds, and the last two attributes of a `TarColumn`.

    Raises:
      DataCorruptionError: If it is damaged.
      ValueError: If it does not hold numbers.
    """
    file, formats = io.BytesIO(content), np.lib.format
    try:
        old = formats.read_magic(file)[0] == 1
        parse = formats.read_array_header_1_0 if old else formats.read_array_header_2_0
        shape, fortran, dtype = parse(file)
    except Exception as error:
        # Whatever a damaged header makes of NumPy's parser.
        raise DataCorruptionError(*where, f"no .npy header: {error}") from error
    if dtype.kind not in "biuf":
        raise ValueError(
            f"{where[0]}: the array at byte offset {where[2]} has dtype {dtype}; a "
            "column holds booleans, integers and floats"
        )
    size, promised = len(content) - file.tell(), math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size != promised:
        reason = f"an array of {promised} bytes, but {size} are there"
        raise DataCorruptionError(*where, reason)
    plain = not fortran or len(shape) < 2
    header = content[: file.tell()] if plain else b""
    return ColumnSpec(tuple(shape), dtype.newbyteorder("=")), header, dtype


def _role(kind: str) -> tuple[str, str]:
    stem, _, last = kind.rpartition(".")
    if kind in _LABELS:
        return "label", "label"
    if last == "cls":
        return stem, "label"
    if last in _IMAGES:
        return stem or "image", "image"
    return (stem or "npy", "npy") if last == "npy" else ("", "")


def _members(
    path: Path, name: str, roles: list[tuple[str, int]], samples: Samples
) -> tuple[str, np.ndarray, np.ndarray]:
    # Images of several kinds may be one column, one of them in each sample.
    places = [place for _, place in roles]
    starts, sizes = samples.starts[:, places], samples.sizes[:, places]
    count = (starts >= 0).sum(axis=1)
    if (count != 1).any() or len({role for role, _ in roles}) > 1:
        bad = int(np.argmax(count != 1))
        raise ValueError(
            f"{path}: sample {bad} has {count[bad]} members for the column {name!r} "
            f"(kinds {[samples.kinds[place] for place in places]}); each needs one: "
            "leave the column out by naming the others in columns"
        )
    which = np.argmax(starts >= 0, axis=1)[:, None]
    starts = np.take_along_axis(starts, which, 1)[:, 0]
    return roles[0][0], starts, np.take_along_axis(sizes, which, 1)[:, 0]


def _look(
    role: str,
    name: str,
    content: bytes,
    where: tuple[Path, int, int],
    note: str,
    options: OpenOptions,
) -> tuple[ColumnSpec, bytes, np.dtype]:
    if role == "npy":
        return npy_header(content, where)
    if role == "label":
        dtype = _INTEGERS.get(str(_noted(note).get(name)), np.dtype(np.int32))
        return ColumnSpec((), dtype), b"", dtype
    try:
        height, width, channels = probe_image(content, options.image_mode)
    except ValueError as error:
        reason = f"the image cannot be decoded: {error}"
        raise DataCorruptionError(*where, reason) from error
    size, dtype = options.image_size or (height, width), np.dtype(np.uint8)
    return ColumnSpec((*size, channels), dtype), b"", dtype


def _as_wanted(
    path: Path, name: str, role: str, spec: ColumnSpec, wanted: ColumnSpec | None
) -> ColumnSpec:
    if wanted is None or wanted == spec:
        return spec
    if role == "label" and wanted.shape == () and wanted.dtype.kind in "iu":
        return wanted
    if role == "npy" and can_cast(spec, wanted):
        return spec
    raise ValueError(
        f"{path}: column {name!r} should be {_text(wanted)}, but the first sample has "
        f"{_text(spec)}; change columns, or image_size and image_mode"
    )


def _noted(note: str) -> Mapping[str, Any]:
    try:
        found = json.loads(note or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _text(spec: ColumnSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
