"""Tar files of samples, as WebDataset uses them, read at random without unpacking."""

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxaccel.data._decode import decode_images
from jaxaccel.data._errors import DataCorruptionError
from jaxaccel.data._formats import Format, OpenOptions
from jaxaccel.data._record_index import MappedFile, cached_index
from jaxaccel.data._sidecar import Checksums
from jaxaccel.data._store import Store, aligned_empty, digest, encoded_name
from jaxaccel.data._tar_columns import TarColumn, choose_columns, npy_header
from jaxaccel.data._tar_index import BLOCK, Samples, find_samples
from jaxaccel.data._tar_writer import TarWriter
from jaxaccel.data._tf_example import Records

_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
# Of gzip, bzip2, xz, zstd and lz4.
_MAGICS = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18")
# No 64-bit integer needs more characters.
_MOST_DIGITS = 24
_NO_NUMBER = (
    "Write the numbers of classes, not their names; if the file should hold numbers, "
    "fetch it again."
)


class TarStore(Store):
    """The samples of one tar file.

    Members with the same path up to the first dot of the file's name are a sample;
    what follows that dot says what they are:

    - `jpg`, `jpeg`, `png`, `webp`, `gif` and `bmp` are the column `image`,
      `<name>.jpg` and so on the column `<name>`;
    - `cls`, `cls.txt` and `label.txt`, a decimal number, are the column `label`,
      int32 unless `options.columns` or this library's writer say otherwise;
    - `<name>.npy` is the column `<name>`, and `npy` the column `npy`.

    Other members are left out. The first sample says which columns there are, and
    all others must have them. A link stands for the member that it refers to.
    """

    _sampled = "spread"

    def __init__(self, path: Path, options: OpenOptions):
        self._file, self._options = MappedFile(path), options
        head = bytes(self._file.data[:6])
        if path.name.endswith(_PACKED) or head.startswith(_MAGICS):
            raise ValueError(
                f"{path} is compressed as a whole, so its samples cannot be found "
                "without reading all of it; decompress it: gunzip, unzstd or unxz"
            )
        self._sums = Checksums.load(path) if options.checksums else None
        index = cached_index(self._file, self._index, self._fits)
        samples = _samples(index)
        self._columns = choose_columns(path, samples, options, self._first)
        super().__init__({name: c.spec for name, c in self._columns.items()})

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())).starts)

    def fingerprint(self) -> str:
        """See `Store.fingerprint`."""
        file, options = self._file, self._options
        what = [repr(dict(self.spec)), options.image_size, options.image_mode]
        return digest([file.path.name, file.size, file.mtime_ns, what])

    def close(self) -> None:
        """See `Store.close`."""
        self._file.close()

    def _read(
        self, rows: np.ndarray, names: Iterable[str] | None = None
    ) -> dict[str, np.ndarray]:
        readers = {"image": self._images, "label": self._labels, "npy": self._arrays}
        out = {}
        for name in self._columns if names is None else names:
            column = self._columns[name]
            starts, sizes = column.starts[rows], column.sizes[rows]
            self._check(starts, starts + sizes, rows)
            shape = (len(rows), *column.spec.shape)
            out[name] = aligned_empty(shape, column.spec.dtype)
            readers[column.kind](column, rows, out[name])
        return out

    def _sample(self, rows: np.ndarray) -> dict[str, Any]:
        images = {n: c for n, c in self._columns.items() if c.kind == "image"}
        out: dict[str, Any] = self._read(rows, [*self._columns.keys() - images])
        for name, column in images.items():
            starts = column.starts[rows]
            self._check(starts, starts + column.sizes[rows], rows)
            contents = [self._content(column, row) for row in rows.tolist()]
            out[encoded_name(name)] = contents
        return out

    def _images(self, column: TarColumn, rows: np.ndarray, out: np.ndarray) -> None:
        options = self._options
        decode_images(
            [self._content(column, row) for row in rows.tolist()],
            out,
            mode=options.image_mode,
            image_size=options.image_size,
            num_threads=options.num_threads,
            where=lambda i: self._where(column, int(rows[i])),
        )

    def _labels(self, column: TarColumn, rows: np.ndarray, out: np.ndarray) -> None:
        info = np.iinfo(out.dtype)
        for i, row in enumerate(rows.tolist()):
            text = bytes(self._content(column, row)[: _MOST_DIGITS + 1])
            path, number, offset = self._where(column, row)
            try:
                value = int(text) if len(text) <= _MOST_DIGITS else None
            except ValueError:
                value = None
            if value is None:
                reason = f"the label {text!r} is no whole number"
                raise DataCorruptionError(path, number, offset, reason, _NO_NUMBER)
            if not info.min <= value <= info.max:
                raise ValueError(
                    f"{path}: the label of record {number} (byte offset {offset}) is "
                    f"{value}, outside {out.dtype}; pass columns={{'label': "
                    "ColumnSpec((), dtype), ...} with a wider dtype"
                )
            out[i] = value

    def _arrays(self, column: TarColumn, rows: np.ndarray, out: np.ndarray) -> None:
        header = np.frombuffer(column.header, np.uint8)
        size = len(header) + out[:1].nbytes
        if len(header) and (column.sizes[rows] == size).all():
            members = Records(self._file.data, column.starts[rows], size)
            # Members that begin as the first one does are read all at once.
            if (members.bytes(0, len(header)) == header).all():
                raw = np.ascontiguousarray(members.bytes(len(header), size))
                if column.dtype.kind == "b":
                    out[...] = (raw != 0).reshape(out.shape)
                else:
                    out[...] = raw.view(column.dtype).reshape(out.shape)
                return
        for i, row in enumerate(rows.tolist()):
            out[i] = self._array(column, row)

    def _array(self, column: TarColumn, row: int) -> np.ndarray:
        content, where = bytes(self._content(column, row)), self._where(column, row)
        spec = npy_header(content, where)[0]
        if spec != column.spec:
            raise ValueError(
                f"{where[0]}: the array of record {row} (byte offset {where[2]}) is "
                f"{spec.dtype}{list(spec.shape)}, where others are "
                f"{column.spec.dtype}{list(column.spec.shape)}; a column has one shape "
                "and dtype"
            )
        return np.load(io.BytesIO(content), allow_pickle=False)

    def _first(self, start: int, size: int) -> bytes:
        ranges = np.array([start]), np.array([start + size])
        self._check(*ranges, np.zeros(1, np.int64))
        return bytes(self._file.data[start : start + size])

    def _check(self, starts: np.ndarray, stops: np.ndarray, rows: np.ndarray) -> None:
        if self._sums is not None:
            # From the header on, which said how long the member is.
            self._sums.check(self._file.data, starts - BLOCK, stops, rows)

    def _content(self, column: TarColumn, row: int) -> np.ndarray:
        start = int(column.starts[row])
        return self._file.data[start : start + int(column.sizes[row])]

    def _where(self, column: TarColumn, row: int) -> tuple[Path, int, int]:
        return self._file.path, row, int(column.starts[row])

    def _index(self) -> dict[str, np.ndarray]:
        data, sums = self._file.data, self._sums
        check = sums and (lambda starts, stops: sums.check(data, starts, stops))
        found = find_samples(self._file.path, data, check)
        text = json.dumps([found.kinds, found.note]).encode()
        words = np.frombuffer(text, np.uint8)
        return {"words": words, "starts": found.starts, "sizes": found.sizes}

    def _fits(self, index: dict[str, np.ndarray]) -> bool:
        if index.keys() != {"words", "starts", "sizes"}:
            return False
        starts, sizes = index["starts"], index["sizes"]
        kinds = _samples(index).kinds
        if {starts.dtype, sizes.dtype} != {np.dtype(np.int64)} or not starts.size:
            return False
        if starts.shape != sizes.shape or starts.shape[1:] != (len(kinds),):
            return False
        inside = (starts >= BLOCK) & (sizes >= 0) & (starts <= self._file.size - sizes)
        return bool((inside | (starts == -1)).all())


def _samples(index: dict[str, np.ndarray]) -> Samples:
    words: Any = index["words"].tobytes()
    kinds, note = json.loads(words)
    return Samples(kinds, index["starts"], index["sizes"], note)


def _recognizes(head: bytes) -> bool:
    # What marks a tar file lies behind the first bytes.
    del head
    return False


FORMAT = Format("tar", (".tar", *_PACKED), _recognizes, TarStore, TarWriter)
