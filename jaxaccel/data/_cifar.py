"""The binary format of CIFAR-10."""

import os
import tarfile
from pathlib import Path

import numpy as np

from jaxaccel.data._errors import DataCorruptionError

_RECORD = 1 + 3 * 32 * 32
_FOLDER = "cifar-10-batches-bin"
_MEMBERS = {
    "train": [f"{_FOLDER}/data_batch_{number}.bin" for number in range(1, 6)],
    "test": [f"{_FOLDER}/test_batch.bin"],
}


def parse_cifar10(
    content: bytes, path: str | os.PathLike[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Reads records of one label byte and 32x32 red, green and blue bytes.

    Args:
      content: Whole records.
      path: Where they came from, for the messages.

    Returns:
      Images `(n, 32, 32, 3)` and labels `(n,)`, uint8.

    Raises:
      DataCorruptionError: If the last record is cut or a label is above 9.
    """
    count, rest = divmod(len(content), _RECORD)
    if rest or not count:
        reason = (
            f"expected whole records of {_RECORD} bytes, found {len(content)} bytes"
        )
        raise DataCorruptionError(path, count, count * _RECORD, reason)
    records = np.frombuffer(content, np.uint8).reshape(count, _RECORD)
    wrong = np.flatnonzero(records[:, 0] > 9)
    if wrong.size:
        record = int(wrong[0])
        reason = f"expected a label from 0 to 9, found {records[record, 0]}"
        raise DataCorruptionError(path, record, record * _RECORD, reason)
    planes = records[:, 1:].reshape(count, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), records[:, 0].copy()


def convert_cifar10(archive: Path, folder: Path) -> None:
    """Writes an archive's images and labels as `.npy` files.

    Members are read by their exact names and never unpacked, so that no path in
    the archive can reach outside.

    Args:
      archive: `cifar-10-binary.tar.gz`, its checksum already verified.
      folder: Where `<split>-image.npy` and `<split>-label.npy` go.

    Raises:
      DataCorruptionError: If the archive or a member is damaged.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for split, names in _MEMBERS.items():
                parts = [_read_member(tar, name, archive) for name in names]
                np.save(
                    folder / f"{split}-image.npy", np.concatenate([p[0] for p in parts])
                )
                np.save(
                    folder / f"{split}-label.npy", np.concatenate([p[1] for p in parts])
                )
    except (tarfile.TarError, EOFError) as error:
        raise DataCorruptionError(archive, None, 0, f"unreadable: {error}") from None


def _read_member(
    tar: tarfile.TarFile, name: str, archive: Path
) -> tuple[np.ndarray, np.ndarray]:
    try:
        file = tar.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise DataCorruptionError(archive, None, 0, f"it has no file {name}")
    return parse_cifar10(file.read(), f"{archive}:{name}")
