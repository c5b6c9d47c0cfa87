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
