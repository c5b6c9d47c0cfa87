"""The folder of an unfinished conversion: its lock, its manifest, its last step."""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxaccel.data._disk import file_crc, sync, sync_folder

_SUFFIX = ".partial"
_MANIFEST = "manifest.json"
_COMPANIONS = (".crc.npz", ".idx.npz")


class Partial:
    """`<destination>.partial`, which holds everything until all is complete.

    Args:
      destination: What will be made.
      job: What makes it; another job's leftovers are dropped.

    Attributes:
      destination: The same.
      folder: The partial folder.
      staging: Folder for decoded examples; it may not exist.
      output: Folder of finished files, under their final names.
    """

    def __init__(self, destination: Path, job: Mapping[str, Any]):
        self.destination = destination
        self.folder = partial_folder(destination)
        self.staging = self.folder / "staging"
        self.output = self.folder / "output"
        self._place = destination.parent
        self._job = json.loads(json.dumps(job))
        self._content = self._load() or self._begin()

    @property
    def publishing(self) -> bool:
        """Whether all is finished, and the files were being given their names."""
        return self._content["publishing"]

    @property
    def is_fresh(self) -> bool:
        """Whether nothing would be lost with the folder."""
        return not self._content["finished"] and not self._content["staged"]

    def staged(self, part: str) -> tuple[int, dict[str, int]]:
        """How many examples of a part are staged, and the digests of their columns."""
        staged = self._content["staged"]
        if staged is None or staged["part"] != part:
            return 0, {}
        return staged["rows"], staged["digests"]

    def note_staged(self, part: str, rows: int, digests: Mapping[str, int]) -> None:
        """Remembers what is on the disk for sure."""
        staged = {"part": part, "rows": rows, "digests": dict(digests)}
        self._content["staged"] = staged
        self._save()

    def is_finished(self, part: str) -> bool:
        """Whether a part was finished, and its files are as they were then."""
        noted = self._content["finished"].get(part)
        return noted is not None and noted == self._crcs(part)

    def finish(self, part: str) -> None:
        """Remembers that a part in the output folder is complete."""
        sync_folder(self.output)
        self._content["finished"][part] = self._crcs(part)
        self._content["staged"] = None
        self._save()
        remove(self.staging)

    def remove_output(self, part: str) -> None:
        """Removes what an earlier attempt left of a part."""
        for path in self._files(part):
            remove(path)

    def publish(self, parts: list[str]) -> None:
        """Gives all parts their final names, replacing what had them."""
        self._content["publishing"] = True
        self._save()
        for part in parts:
            self._publish(part)
        sync_folder(self._place)
        self.discard()

    def discard(self) -> None:
        """Removes the folder, and the lock with it."""
        # Under another name first: whoever comes now makes a folder of its own.
        old = self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(4)}")
        os.rename(self.folder, old)
        while old.exists():
            # `sweep` in another process may remove the same files.
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(old)

    def _begin(self) -> dict[str, Any]:
        for path in self.folder.iterdir():
            if path.name != "lock":
                remove(path)
        self.output.mkdir()
        nothing = {"finished": {}, "staged": None, "publishing": False}
        self._content = {"job": self._job, **nothing}
        self._save()
        return self._content

    def _publish(self, part: str) -> None:
        source, target = self.output / part, self._place / part
        if source.exists():
            # The old file's checksums must not stand beside the new file.
            for suffix in _COMPANIONS:
                target.with_name(part + suffix).unlink(missing_ok=True)
            if target.is_dir() or (source.is_dir() and target.exists()):
                # A folder cannot be replaced at once.
                old = self.folder / f"replaced-{part}"
                remove(old)
                os.rename(target, old)
            os.replace(source, target)
        for path in self._files(part):
            os.replace(path, self._place / path.name)

    def _files(self, part: str) -> list[Path]:
        names = [part, *(part + suffix for suffix in _COMPANIONS)]
        return [path for name in names if (path := self.output / name).exists()]

    def _crcs(self, part: str) -> dict[str, int]:
        files = [
            file
            for path in self._files(part)
            for file in (sorted(path.iterdir()) if path.is_dir() else [path])
        ]
        return {str(file.relative_to(self.output)): file_crc(file) for file in files}

    def _load(self) -> dict[str, Any] | None:
        try:
            content = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
            return content if content["job"] == self._job else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _save(self) -> None:
        work = self.folder / f"{_MANIFEST}.new"
        with work.open("wb") as file:
            file.write(json.dumps(self._content).encode())
            sync(file)
        os.replace(work, self.folder / _MANIFEST)


def partial_folder(destination: Path) -> Path:
    """Where an unfinished destination is."""
    return destination.with_name(destination.name + _SUFFIX)


def sweep(destination: Path) -> None:
    """Removes folders that were given up by processes killed at that moment."""
    name = re.escape(partial_folder(destination).name) + r"\.[0-9a-f]{8}"
    for path in destination.parent.glob("*.partial.*"):
        if re.fullmatch(name, path.name):
            # They only take up room, perhaps where nothing may be removed.
            shutil.rmtree(path, ignore_errors=True)


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(destination: Path, *, wait: bool) -> Iterator[None]:
    """Makes sure that one process at a time works on a destination.

    Args:
      destination: What will be made.
      wait: Whether to wait for another process; False raises.

    Raises:
      FileExistsError: If another process works on it.
    """
    file = None
    while file is None:
        file = _acquire(partial_folder(destination), destination, wait)
    try:
        yield
    finally:
        file.close()


def _acquire(folder: Path, destination: Path, wait: bool) -> BinaryIO | None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    try:
        file = (folder / "lock").open("ab")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        # The one who had it may have removed the folder, and the file with it.
        if os.path.samestat(os.fstat(file.fileno()), os.stat(folder / "lock")):
            return file
    except BlockingIOError:
        file.close()
        raise FileExistsError(
            f"another process is converting to {destination}; wait for it, or choose "
            "another destination"
        ) from None
    except FileNotFoundError:
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None
