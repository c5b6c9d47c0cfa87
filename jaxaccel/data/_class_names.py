"""The names of classes as text in files."""

import json
from collections.abc import Sequence
from pathlib import Path

from jaxaccel.data._errors import DataCorruptionError

# Beside the columns of an npy folder.
FILE = "class_names.json"
# In the schema of Arrow and Parquet files.
KEY = b"jaxaccel.class_names"


def write_names(names: Sequence[str]) -> bytes:
    """Returns names as JSON."""
    return json.dumps(list(names)).encode()


def read_names(path: Path, content: bytes) -> tuple[str, ...]:
    """Reads what `write_names` returned.

    Args:
      path: Where it was, for messages.
      content: The JSON.

    Raises:
      DataCorruptionError: If it is no list of texts.
    """
    try:
        names = json.loads(content)
    except ValueError as error:
        reason = f"unreadable class names: {error}"
        raise DataCorruptionError(path, None, 0, reason) from None
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise DataCorruptionError(path, None, 0, "the class names are no list of texts")
    return tuple(names)
