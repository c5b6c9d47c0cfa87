"""Writing samples into a tar file."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxaccel.data._formats import WriteOptions
from jaxaccel.data._sidecar import sync
from jaxaccel.data._store import ColumnSpec
from jaxaccel.data._tar_index import BLOCK, NOTE


class TarWriter:
    """Writes `<number>.<column>.npy` members, and labels as `<number>.cls`.

    A global header, which other programs skip, says what integers the labels are.

    Args:
      path: The file.
      spec: The columns.
      options: How many examples there will be.

    Raises:
      ValueError: If a column's name cannot be part of a member's.
    """

    def __init__(
        self, path: Path, spec: Mapping[str, ColumnSpec], options: WriteOptions
    ):
        for name in spec:
            if "/" in name or name != name.lower() or name.startswith("."):
                raise ValueError(
                    f"the column {name!r} cannot be the suffix of a member's name; "
                    "rename it in lower case, without '/'"
                )
        self._spec, self._digits, self._rows = spec, len(str(options.length)), 0
        self._heads = {
            name: _npy_head(column)
            for name, column in spec.items()
            if not _is_label(name, column)
        }
        self._file = path.open("wb")
        labels = [name for name in spec if name not in self._heads]
        note = {name: spec[name].dtype.name for name in labels}
        if note:
            self._file.write(
                tarfile.TarInfo.create_pax_global_header({NOTE: json.dumps(note)})
            )

    def write(self, batch: Mapping[str, np.ndarray]) -> None:
        length = len(next(iter(batch.values())))
        for i in range(length):
            sample = f"{self._rows:0{self._digits}d}"
            self._rows += 1
            for name in self._spec:
                if name in self._heads:
                    column = self._spec[name].dtype.newbyteorder("<")
                    row = np.ascontiguousarray(batch[name][i], column)
                    self._member(f"{sample}.{name}.npy", self._heads[name], row.data)
                else:
                    text = str(int(batch[name][i])).encode()
                    self._member(f"{sample}.cls", b"", text)

    def finish(self) -> None:
        self._file.write(bytes(2 * BLOCK))
        self._file.write(bytes(-self._file.tell() % tarfile.RECORDSIZE))
        sync(self._file)
        self._file.close()

    def abort(self) -> None:
        self._file.close()

    def _member(self, name: str, head: bytes, body: bytes | memoryview) -> None:
        # Neither user nor time, so that equal data make equal files.
        info = tarfile.TarInfo(name)
        content = memoryview(body).nbytes
        info.size = len(head) + content
        self._file.write(info.tobuf(tarfile.GNU_FORMAT))
        self._file.write(head)
        self._file.write(body)
        self._file.write(bytes(-info.size % BLOCK))


def _is_label(name: str, column: ColumnSpec) -> bool:
    return name == "label" and column.shape == () and column.dtype.kind in "iu"


def _npy_head(column: ColumnSpec) -> bytes:
    file = io.BytesIO()
    descr = column.dtype.newbyteorder("<").str
    header = {"shape": column.shape, "fortran_order": False, "descr": descr}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()
