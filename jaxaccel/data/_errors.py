"""The one exception that callers of `jaxaccel.data` may want to catch by name."""

import os


class DataCorruptionError(ValueError):
    """A data file does not hold what its own header promises.

    Args:
      path: The damaged file.
      record: Index of the first damaged example, or None where the damage lies
        in the header or cannot be tied to an example.
      offset: Byte offset in the file (in the decompressed content, where the
        message says so) at which the damage was noticed.
      reason: What was expected and what was found.
      remedy: What to do, where fetching the file again may not help.

    Examples:
      >>> from jaxaccel.data import DataCorruptionError
      >>> print(DataCorruptionError("a.npy", 3, 152, "expected 160 bytes, found 152"))
      a.npy: expected 160 bytes, found 152 (record 3, byte offset 152). Delete the \
file and fetch it again.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        record: int | None,
        offset: int,
        reason: str,
        remedy: str = "Delete the file and fetch it again.",
    ):
        # All of them as `args`, so that the exception survives pickling.
        super().__init__(os.fspath(path), record, offset, reason, remedy)
        self.path = os.fspath(path)
        self.record = record
        self.offset = offset
        self.reason = reason
        self.remedy = remedy

    def __str__(self) -> str:
        where = f"byte offset {self.offset}"
        if self.record is not None:
            where = f"record {self.record}, {where}"
        return f"{self.path}: {self.reason} ({where}). {self.remedy}"


def fetched_from(address: str, error: ValueError) -> ValueError:
    """The error for a fetched file, of which the path in the cache says little.

    Args:
      address: Where it came from.
      error: What is wrong with it.
    """
    if isinstance(error, DataCorruptionError):
        reason = f"{error.reason}, as fetched from {address}"
        named: ValueError = DataCorruptionError(
            error.path, error.record, error.offset, reason, error.remedy
        )
    else:
        named = ValueError(f"{address}: {error}")
    for note in getattr(error, "__notes__", ()):
        named.add_note(note)
    return named


def empty_file(path: str | os.PathLike[str]) -> DataCorruptionError:
    """The error for a file of no bytes, or of no records."""
    return DataCorruptionError(
        path,
        None,
        0,
        "the file is empty",
        "Fetch it again; or leave it out, if it should be empty: a store needs at "
        "least one example.",
    )
