"""Cached, verified downloads of small public data sets."""

import contextlib
import dataclasses
import hashlib
import http.client
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_CONNECT_SECONDS = 5.0
_DIGESTS = "sha256.txt"
_CHUNK = 1 << 18


class DatasetUnavailableError(OSError):
    """No source could deliver a data set."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One place that may have the files.

    Args:
      name: What to call it in messages.
      fetch: Writes the files into the folder it is given, under their own names;
        raises OSError or ValueError, with the reason, where it cannot.
    """

    name: str
    fetch: Callable[[Path], None]


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """Returns the folder that holds all cached data sets.

    Args:
      root: The folder; None takes `JAXACCEL_DATA` from the environment, or
        `jaxaccel` in the user's cache folder.

    Returns:
      Its path; it may not exist.
    """
    if root is not None:
        return Path(root).expanduser()
    if chosen := os.environ.get("JAXACCEL_DATA"):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "jaxaccel"


def fetch_files(
    folder: Path,
    files: Mapping[str, str | None],
    sources: Sequence[Source],
    *,
    published: Sequence[str] = (),
    check: Callable[[Path], None] | None = None,
) -> str:
    """Makes sure that a folder holds files with known content.

    Files appear under their final names only when all of them are complete and
    verified, so several processes may do this at once.

    Args:
      folder: Where they belong; created when something has to be fetched.
      files: SHA-256 of each file by name; None where only its source can check it:
        then its digest is noted when it is fetched, and compared from then on.
      sources: Where to get them, tried in this order.
      published: Names that the files are published under, for the message; by
        default the files' own names with and without `.gz`.
      check: Further check of a folder with the files; raises ValueError.

    Returns:
      The name of the source they came from, now or earlier.

    Raises:
      DatasetUnavailableError: If no source has them; its message lists the reasons
        and the remedies.
    """
    try:
        _verify(folder, files, check)
        return _read_origin(folder)
    except (OSError, ValueError) as error:
        failures = [f"cache: {error}"]
    if sources:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as work:
                origin = _try_sources(
                    Path(work), folder, files, sources, failures, check
                )
        except OSError as error:
            failures.append(f"cannot write to {folder}: {error}")
        else:
            if origin is not None:
                return origin
    tried = "\n".join(f"  - {failure}" for failure in failures)
    wanted = ", ".join(published or (f"{name}[.gz]" for name in files))
    raise DatasetUnavailableError(
        f"could not get {folder.name}. Tried:\n{tried}\n"
        f"Remedies: put {wanted} into {folder}; or set JAXACCEL_DATA to a writable "
        f"folder that holds them in {folder.name}/; or connect this machine once; or "
        "use the digits data set, which needs no download (--dataset digits)"
    )


def _try_sources(
    work: Path,
    folder: Path,
    files: Mapping[str, str | None],
    sources: Sequence[Source],
    failures: list[str],
    check: Callable[[Path], None] | None,
) -> str | None:
    for number, source in enumerate(sources):
        place = work / str(number)
        place.mkdir()
        try:
            source.fetch(place)
            _verify(place, files, check)
        except (OSError, ValueError) as error:
            failures.append(f"{source.name}: {error}")
            continue
        _publish(place, folder, files, source.name)
        return source.name
    return None


def _verify(
    folder: Path,
    files: Mapping[str, str | None],
    check: Callable[[Path], None] | None,
) -> None:
    noted = _read_digests(folder)
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(f"no {name} in {folder}")
        expected = expected or noted.get(name)
        if expected is None:
            continue
        found = file_digest(path)
        if found != expected:
            raise ValueError(f"{name} has SHA-256 {found}, expected {expected}")
    if check is not None:
        check(folder)


def _publish(
    work: Path, folder: Path, files: Mapping[str, str | None], origin: str
) -> None:
    (work / "source.txt").write_text(origin + "\n", encoding="utf-8")
    names = ["source.txt", *files]
    if noted := [name for name, digest in files.items() if digest is None]:
        # In the form that sha256sum reads.
        lines = [f"{file_digest(work / name)}  {name}\n" for name in noted]
        (work / _DIGESTS).write_text("".join(lines), encoding="utf-8")
        # Old digests beside new files would refuse them.
        (folder / _DIGESTS).unlink(missing_ok=True)
        names.append(_DIGESTS)
    for name in names:
        os.replace(work / name, folder / name)


def _read_digests(folder: Path) -> dict[str, str]:
    try:
        lines = (folder / _DIGESTS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    pairs = (line.split(maxsplit=1) for line in lines)
    return {pair[1]: pair[0] for pair in pairs if len(pair) == 2}


def _read_origin(folder: Path) -> str:
    try:
        return (folder / "source.txt").read_text(encoding="utf-8").strip()
    except OSError:
        return f"files in {folder}"


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Returns the hexadecimal digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(
            file, lambda: hashlib.new(algorithm, usedforsecurity=False)
        ).hexdigest()


def download(url: str, path: Path, *, max_bytes: int, seconds: float = 600.0) -> None:
    """Downloads a file, giving up early where there is no network.

    Args:
      url: Its address.
      path: Where to write it.
      max_bytes: Longest answer to accept.
      seconds: Longest time for the whole transfer; the connection alone must
        stand within 5 seconds.

    Raises:
      OSError: If it fails, with the reason.
    """
    deadline = time.monotonic() + seconds
    with contextlib.closing(_connect(url)) as response, path.open("wb") as file:
        announced = response.headers.get("Content-Length")
        received = 0
        while chunk := _read(response):
            received += len(chunk)
            if received > max_bytes:
                raise OSError(f"the answer is longer than {max_bytes} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"took longer than {seconds:.0f} s")
            file.write(chunk)
    if announced is not None and received != int(announced):
        raise OSError(f"ended after {received} of {announced} bytes")


def _read(response: Any) -> bytes:
    try:
        return response.read(_CHUNK)
    except http.client.HTTPException as error:
        raise OSError(f"the answer broke off: {error!r}") from None


def _connect(url: str) -> Any:
    # In a thread, because the look-up of a host name obeys no time-out.
    lock, outcome, abandoned = threading.Lock(), [], threading.Event()

    def connect() -> None:
        request = urllib.request.Request(url, headers={"User-Agent": "jaxaccel"})
        try:
            response = urllib.request.urlopen(request, timeout=_CONNECT_SECONDS)
        except Exception as error:
            outcome.append(error)
            return
        with lock:
            if abandoned.is_set():
                response.close()
            outcome.append(response)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CONNECT_SECONDS)
    with lock:
        if not outcome:
            abandoned.set()
            raise TimeoutError(f"no answer within {_CONNECT_SECONDS:.0f} s")
    if not isinstance(outcome[0], Exception):
        return outcome[0]
    raise OSError(_reason(outcome[0])) from None


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return f"HTTP status {error.code}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


# Hooks of the system's package manager must not run for a private look-up.
_APT_CONFIG = """\
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "0";
Acquire::http::Timeout "5";
Acquire::https::Timeout "5";
"""


def unpack_debian_package(package: str, folder: Path) -> Path:
    """Downloads a Debian package and unpacks it, without installing it.

    The package manager verifies its signature. It works on state of its own in
    `folder`, so that it needs neither root nor the system's package lists.

    Args:
      package: Its name.
      folder: An empty folder to work in.

    Returns:
      The folder that holds its files.

    Raises:
      OSError: If this is no Debian system or a command fails.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FileNotFoundError(f"this is no Debian system: it has no {tool}")
    config = folder / "apt.conf"
    config.write_text(_APT_CONFIG, encoding="utf-8")
    options = ["-q", "-c", str(config)]
    for name, lists in (("State", "lists/partial"), ("Cache", "archives/partial")):
        (folder / name / lists).mkdir(parents=True)
        options += ["-o", f"Dir::{name}={folder / name}"]
    options += ["-o", "Dir::State::status=/var/lib/dpkg/status"]
    # One broken entry in the system's list of sources must not matter here.
    _run(["apt-get", *options, "update"], folder, seconds=90.0, check=False)
    _run(["apt-get", *options, "download", package], folder, seconds=300.0)
    archives = list(folder.glob(f"{package}_*.deb"))
    if len(archives) != 1:
        raise OSError(f"apt-get download left {len(archives)} archives of {package}")
    content = folder / "content"
    _run(["dpkg-deb", "-x", str(archives[0]), str(content)], folder, seconds=60.0)
    return content


def _run(
    command: list[str], folder: Path, *, seconds: float, check: bool = True
) -> None:
    what = " ".join(word for word in command if word.isalpha() or word == command[0])
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{what} took longer than {seconds:.0f} s") from None
    if check and done.returncode:
        raise OSError(f"{what} failed with status {done.returncode}")
