"""Files at an address, fetched whole into the cache folder."""

import concurrent.futures
import contextlib
import errno
import importlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxaccel._fetch import data_root
from jaxaccel.data._disk import require_space, sync, writable
from jaxaccel.data._sidecar import sidecar_path
from jaxaccel.data._store import digest

_CONNECT_SECONDS = 4.0
# A server that sends nothing for so long has stalled; it is asked a second time
# where something had come before.
_STALL_SECONDS = 4.5
_CONNECTIONS = 8
_PAUSE_SECONDS = 0.2
# Attempts in a row that bring nothing.
_ATTEMPTS = 3
_CHUNK = 4 << 20
_ZIP = b"PK\x03\x04"
_PATTERN = re.compile(r"(?P<stem>.*)\*-of-(?P<count>\d+)(?P<suffix>.*)")
_MOST_SHARDS = 100_000
# What different servers call what changes with the content.
_VERSIONS = (
    "ETag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "mtime",
    "updated", "generation", "created",
)  # fmt: skip


def is_remote(source: str | os.PathLike[str]) -> bool:
    """Whether a source is an address rather than a path."""
    return isinstance(source, str) and "://" in source


def fetch(address: str) -> list[Path]:
    """Fetches files into the cache folder, unless they are there.

    What is in the cache is used as long as the server says the same size, ETag and
    time of modification. A file's checksums, `<file>.crc.npz`, come along where the
    server has them.

    Args:
      address: Of one file, of a pattern of shards, or of a folder, where the
        protocol can list one.

    Returns:
      The local files, in order, or the one local folder.

    Raises:
      FileNotFoundError: If there is no such file.
      ImportError: If fsspec, or its part for the protocol, is not installed.
      OSError: If the server does not deliver.
      ValueError: If the pattern does not say how many files there are, or the
        server answers with a web page.
    """
    system = _filesystem(address)
    addresses, is_folder = _expand(system, address)
    remotes = _all(lambda each, stop: _describe(system, each), addresses)
    if is_folder:
        place = _folder(remotes)
        paths = [place / remote.name for remote in remotes]
    else:
        paths = [_folder([remote]) / remote.name for remote in remotes]
    missing = [
        (remote, path)
        for remote, path in zip(remotes, paths, strict=True)
        if not path.exists()
    ]

    def work(each: tuple[_Remote, Path], stop: threading.Event) -> None:
        if not is_folder:
            # First, so that the file is never there without it.
            _fetch_checksums(system, *each, stop)
        _fetch_file(system, *each, stop)

    _all(work, missing)
    if is_folder:
        return [paths[0].parent]
    for remote, path in zip(remotes, paths, strict=True):
        _refuse_page(remote.address, path)
    return paths


def _refuse_page(address: str, path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(64).lstrip().lower()
    if head.startswith((b"<!doctype html", b"<html")):
        path.unlink(missing_ok=True)
        raise ValueError(
            f"{address} is a web page, not a data file; pass the address of a file (a "
            "folder cannot be listed by a web server), without a login"
        )


def _folder(remotes: list["_Remote"]) -> Path:
    key = digest([[r.address, r.size, r.version] for r in remotes])
    folder = data_root() / "remote" / key
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


class _Remote(NamedTuple):
    address: str
    name: str
    size: int | None
    version: dict[str, str]


def _filesystem(address: str) -> Any:
    protocol = address.partition("://")[0]
    try:
        fsspec = importlib.import_module("fsspec")
        return fsspec.filesystem(protocol, **_options(protocol))
    except ImportError as error:
        raise ImportError(
            f"{address} needs fsspec with its part for {protocol}: "
            "pip install 'jaxaccel[remote]'"
        ) from error
    except ValueError as error:
        raise ValueError(f"{address}: {error}; use https://, s3:// or gs://") from None


def _options(protocol: str) -> dict[str, Any]:
    # The clients' own time-outs are minutes, or none.
    if protocol in ("http", "https"):
        aiohttp = importlib.import_module("aiohttp")
        limits = aiohttp.ClientTimeout(
            total=None, connect=_CONNECT_SECONDS, sock_read=_STALL_SECONDS
        )
        return {"client_kwargs": {"timeout": limits, "trust_env": True}}
    if protocol in ("s3", "s3a"):
        limits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _STALL_SECONDS}
        return {"config_kwargs": {**limits, "retries": {"max_attempts": 1}}}
    if protocol in ("gs", "gcs"):
        return {"timeout": _STALL_SECONDS}
    return {}


def _expand(system: Any, address: str) -> tuple[list[str], bool]:
    parent, _, name = address.rpartition("/")
    if "*" in name:
        return [f"{parent}/{each}" for each in _shard_names(address, name)], False
    if _is_http(system):
        return [address], False
    with _explained(address):
        if not system.isdir(address):
            return [address], False
        found = system.ls(address, detail=True)
    protocol = address.partition("://")[0]
    files = sorted(each["name"] for each in found if each["type"] == "file")
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no files in the folder", address)
    return [f"{protocol}://{each.partition('://')[2] or each}" for each in files], True


def _shard_names(address: str, name: str) -> list[str]:
    match = _PATTERN.fullmatch(name)
    if match is None or "*" in match["stem"] or not int(match["count"]):
        raise ValueError(
            f"{address}: a server cannot be asked which files match; give a pattern "
            "that says how many there are, such as train-*-of-00008.tfrecord"
        )
    count, width = int(match["count"]), len(match["count"])
    if count > _MOST_SHARDS:
        raise ValueError(f"{address} promises {count} files; {_MOST_SHARDS} at most")
    return [
        f"{match['stem']}{index:0{width}d}-of-{match['count']}{match['suffix']}"
        for index in range(count)
    ]


def _describe(system: Any, address: str) -> _Remote:
    name = address.partition("?")[0].rstrip("/").rpartition("/")[2]
    if _is_http(system):
        info = _http_info(system, address)
    else:
        with _explained(address):
            info = system.info(address)
    version = {tag: str(info[tag]) for tag in _VERSIONS if info.get(tag)}
    return _Remote(address, name, info.get("size"), version)


def _http_info(system: Any, address: str) -> dict[str, Any]:
    # A signed address may allow nothing but GET. Of the content, one byte is enough.
    try:
        with _explained(address):
            stream = _stream(system, address, {"Range": "bytes=0-0"})
    except OSError as error:
        # An empty file has no first byte.
        if getattr(error.__cause__, "status", None) != 416:
            raise
        with _explained(address):
            stream = _stream(system, address, {})
    with stream:
        found, part = stream.r.headers, stream.r.status == 206
        if part:
            # Then the connection can be used again.
            with _explained(address):
                stream.read(1)
    size = found.get("Content-Length")
    if part:
        size = found.get("Content-Range", "").rpartition("/")[2]
    known = size and size.isdecimal() and "Content-Encoding" not in found
    # The checksum may be that of the part.
    tags = [tag for tag in _VERSIONS if not (part and tag == "Content-MD5")]
    return {"size": int(size) if known else None} | {
        tag: found[tag] for tag in tags if tag in found
    }


def _all(work: Callable[[Any, threading.Event], Any], items: list[Any]) -> list[Any]:
    """Does the work for all items, some at a time; the first failure ends it."""
    stop = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(_CONNECTIONS) as pool:
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            concurrent.futures.wait(
                futures, return_when=concurrent.futures.FIRST_EXCEPTION
            )
        finally:
            # Transfers that still run look at it, so that nobody waits for them.
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
    failures = [f.exception() for f in futures if f.done() and not f.cancelled()]
    for error in failures:
        if error is not None and not isinstance(error, InterruptedError):
            raise error
    return [future.result() for future in futures]


def _fetch_file(
    system: Any,
    remote: _Remote,
    path: Path,
    stop: threading.Event,
    head: bytes = b"",
) -> None:
    # What begins in another way is dropped.
    if remote.size is not None:
        require_space(path.parent, remote.size, remote.address)
    # A name of its own: two processes may fetch the same file at once.
    work = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with work.open("x+b") as file:
            _receive(system, remote, file, stop)
            sync(file)
            file.seek(0)
            wanted = file.read(len(head)) == head
        if wanted:
            os.replace(work, path)
        else:
            work.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            work.unlink()
        raise


def _fetch_checksums(
    system: Any, remote: _Remote, path: Path, stop: threading.Event
) -> None:
    target = sidecar_path(path)
    suffix = target.name.removeprefix(path.name)
    if path.name.endswith(suffix):
        return
    place, mark, query = remote.address.partition("?")
    address = place + suffix + mark + query
    try:
        sidecar = _describe(system, address)
    except (FileNotFoundError, PermissionError):
        # Some servers say the latter of what they do not have.
        return
    # Some show a page in place of all that they do not have.
    _fetch_file(system, sidecar, target, stop, _ZIP)


def _receive(
    system: Any, remote: _Remote, file: BinaryIO, stop: threading.Event
) -> None:
    failures = 0
    while True:
        before = file.tell()
        try:
            pieces = _http_pieces if _is_http(system) else _pieces
            for piece in pieces(system, remote, file):
                file.write(piece)
                if stop.is_set():
                    raise InterruptedError(remote.address)
            _check_size(remote, file.tell())
            return
        except (ConnectionError, TimeoutError) as error:
            progress = file.tell() > before
            failures = 1 if progress else failures + 1
            stalled = isinstance(error, TimeoutError) and not progress
            if failures >= _ATTEMPTS or stalled:
                raise
        time.sleep(_PAUSE_SECONDS * failures)


def _pieces(system: Any, remote: _Remote, file: BinaryIO) -> Iterator[bytes]:
    while remote.size is None or file.tell() < remote.size:
        start = file.tell()
        with _explained(remote.address):
            piece = system.cat_file(remote.address, start=start, end=start + _CHUNK)
        yield piece
        if not piece or (remote.size is None and len(piece) < _CHUNK):
            return


def _http_pieces(system: Any, remote: _Remote, file: BinaryIO) -> Iterator[bytes]:
    start, headers = file.tell(), {}
    if start:
        headers["Range"] = f"bytes={start}-"
    with _explained(remote.address):
        stream = _stream(system, remote.address, headers)
    with stream:
        if start and stream.r.status != 206:
            # The server cannot continue, and begins again.
            file.seek(0)
            file.truncate()
        for tag in set(remote.version) & set(stream.r.headers):
            if stream.r.headers[tag] != remote.version[tag]:
                raise OSError(
                    errno.EIO, f"the file changed ({tag}) while it was fetched; open "
                    "it again", remote.address,
                )  # fmt: skip
        while True:
            with _explained(remote.address):
                piece = stream.read(_CHUNK)
            if not piece:
                return
            yield piece


def _stream(system: Any, address: str, headers: dict[str, str]) -> Any:
    # With a size, fsspec does not ask for one; with block_size=0 it makes one
    # request and reads its answer in order.
    headers = {"Accept-Encoding": "identity", **headers}
    return system.open(address, "rb", block_size=0, size=1, headers=headers)


def _is_http(system: Any) -> bool:
    return "http" in system.protocol


def _check_size(remote: _Remote, received: int) -> None:
    if remote.size is not None and received != remote.size:
        raise ConnectionError(
            errno.EIO, f"the answer ended after {received} of {remote.size} bytes",
            remote.address,
        )  # fmt: skip


@contextlib.contextmanager
def _explained(address: str) -> Iterator[None]:
    # Each protocol's client has exceptions of its own.
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(
            errno.ENOENT, "the server has no such file", address
        ) from error
    except TimeoutError as error:
        message = f"the server did not answer for {_STALL_SECONDS:.0f} s"
        raise TimeoutError(errno.ETIMEDOUT, message, address) from error
    except Exception as error:
        status = getattr(error, "status", None)
        kind = ConnectionError
        if isinstance(error, PermissionError) or status in (401, 403):
            message = "the server denies access"
            if status:
                message += f" (HTTP status {status})"
            message += "; check the address, and whether it needs credentials"
            raise PermissionError(errno.EACCES, message, address) from error
        elif isinstance(status, int) and 400 <= status < 500:
            kind = OSError
        what = f"HTTP status {status}" if status else f"{type(error).__name__}: {error}"
        raise kind(errno.EIO, f"the server failed: {what}", address) from error
