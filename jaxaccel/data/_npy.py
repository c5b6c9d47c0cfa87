"""Stores of `.npy` and IDX files: a file of either, or a folder of `<column>.npy`."""

from pathlib import Path

from jaxaccel.data._arrays import ArrayStore
from jaxaccel.data._files import open_array
from jaxaccel.data._formats import Format, OpenOptions
from jaxaccel.data._store import Store


def _open(path: Path, options: OpenOptions) -> Store:
    del options
    if path.is_dir():
        return ArrayStore(
            {file.stem: open_array(file) for file in sorted(path.glob("*.npy"))}
        )
    array = open_array(path)
    name = "image" if array.ndim >= 3 else "label"
    return ArrayStore({path.stem if path.suffix == ".npy" else name: array})


def _recognizes(head: bytes) -> bool:
    return head.startswith(b"\x93NUMPY")


FORMAT = Format("npy", (".npy",), _recognizes, _open, None)
