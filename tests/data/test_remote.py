"""Files at addresses, from servers that behave and servers that do not."""

import contextlib
import http.server
import os
import pickle
import threading
import time

import numpy as np
import pytest

from jaxaccel.data import (
    BatchPlan,
    ColumnSpec,
    DataCorruptionError,
    Loader,
    _remote,
    convert,
    open_store,
)
from jaxaccel.data._store import Store

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


class Server:
    """What the test wants of the server, and what was asked of it."""

    def __init__(self):
        self.files, self.requests, self.sent = {}, [], []
        self.ranges, self.etags = True, True
        # How many bytes of each answer arrive before it breaks off or stalls.
        self.cuts, self.stall = [], None
        self.status, self.piece_seconds = {}, 0.0
        self.address, self.ended = "", threading.Event()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    control: Server

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        control, name = self.control, self.path.lstrip("/").partition("?")[0]
        asked = self.headers.get("Range")
        control.requests.append((name, asked))
        if name in control.status or name not in control.files:
            self.send_response(control.status.get(name, 404))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = control.files[name]
        start, stop, part = 0, len(content), False
        if asked and control.ranges:
            part = True
            first, last = asked.removeprefix("bytes=").split("-")
            start, stop = int(first), min(int(last) + 1 if last else stop, stop)
        if start >= stop and part:
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if part else 200)
        if control.etags:
            self.send_header("ETag", f'"{hash(content)}"')
        if part:
            whole = len(content)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{whole}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.send(content[start:stop], start)

    def send(self, content, start):
        control = self.control
        keep = control.cuts.pop(0) if control.cuts else None
        sent = content if keep is None else content[:keep]
        control.sent.append(len(sent))
        for first in range(0, len(sent), 40_000):
            time.sleep(control.piece_seconds)
            if control.stall is not None and start + first >= control.stall:
                control.ended.wait(30)
            self.wfile.write(sent[first : first + 40_000])
        if keep is not None:
            self.close_connection = True


@pytest.fixture
def server(monkeypatch, tmp_path):
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAXACCEL_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(_remote, "_PAUSE_SECONDS", 0.01)
    control = Server()
    handler = type("Bound", (Handler,), {"control": control})
    with quiet_server(handler) as port:
        control.address = f"http://127.0.0.1:{port}"
        yield control
        control.ended.set()


@contextlib.contextmanager
def quiet_server(handler):
    class Quiet(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request, client_address):
            pass  # The client closes answers that it does not want.

    with Quiet(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.02,))
        thread.start()
        yield running.server_address[1]
        running.shutdown()
        thread.join()


def npy(array, folder):
    path = folder / "made.npy"
    np.save(path, array)
    return path.read_bytes()


@pytest.fixture
def image(rng, server, tmp_path):
    array = rng.integers(0, 256, (150, 40, 40), dtype=np.uint8)
    server.files["image.npy"] = npy(array, tmp_path)
    return array


def cached(tmp_path):
    return sorted(p.name for p in (tmp_path / "cache").rglob("*") if p.is_file())


def test_a_file_is_fetched_once(server, image, tmp_path):
    for _ in range(2):
        store = open_store(f"{server.address}/image.npy")
        np.testing.assert_array_equal(store.take([7, 0])["image"], image[[7, 0]])
    # Each time the headers, once the content, before which checksums are asked for.
    names = [name for name, _ in server.requests]
    assert names == ["image.npy", "image.npy.crc.npz", "image.npy", "image.npy"]
    assert cached(tmp_path) == ["image.npy"]


def test_opening_again_asks_for_one_byte(server, image):
    address = f"{server.address}/image.npy"
    open_store(address)
    assert server.sent == [1, len(server.files["image.npy"])]
    open_store(address)
    assert server.requests[-1] == ("image.npy", "bytes=0-0")
    assert server.sent[2:] == [1]


@pytest.mark.parametrize("ranges", [True, False])
def test_an_empty_file_is_named(server, ranges):
    server.files["empty.npy"], server.ranges = b"", ranges
    with pytest.raises(DataCorruptionError, match="the file is empty.*http://"):
        open_store(f"{server.address}/empty.npy")


@pytest.mark.parametrize("suffix", [".arrow", ".tfrecord", ".npy"])
def test_damage_found_while_reading_names_the_address(server, rng, tmp_path, suffix):
    array = rng.integers(0, 9, (40, 5000), dtype=np.uint8)
    made = tmp_path / ("x" if suffix == ".npy" else f"x{suffix}")
    convert({"x": array}, made, progress=False).close()
    if suffix == ".npy":
        made = made / "x.npy"
    content = bytearray(made.read_bytes())
    content[150_000] ^= 1
    server.files[made.name] = bytes(content)
    sidecar = made.with_name(f"{made.name}.crc.npz")
    server.files[sidecar.name] = sidecar.read_bytes()
    address = f"{server.address}/{made.name}"
    store = open_store(address)
    for each in (store, pickle.loads(pickle.dumps(store)), store[1:]):
        with pytest.raises(DataCorruptionError) as caught:
            for start in range(len(each)):
                each.take([start])
        assert str(caught.value).count(address) == 1
        assert caught.value.record is not None
    with pytest.raises(DataCorruptionError, match=address):
        list(store.scan(5))
    with pytest.raises(DataCorruptionError, match=address):
        with Loader(store, BatchPlan(len(store), 8, epochs=1)) as loader:
            list(loader)


@pytest.mark.parametrize("etags", [True, False])
def test_a_changed_file_is_fetched_again(server, image, tmp_path, etags):
    server.etags = etags
    open_store(f"{server.address}/image.npy")
    changed = image[:-1] ^ 1
    server.files["image.npy"] = npy(changed, tmp_path)
    assert len(open_store(f"{server.address}/image.npy?version=2")) == 149
    store = open_store(f"{server.address}/image.npy")
    np.testing.assert_array_equal(store.take([7])["image"], changed[[7]])


def test_a_slow_server_is_waited_for(server, image):
    server.piece_seconds = 0.05
    store = open_store(f"{server.address}/image.npy")
    np.testing.assert_array_equal(store.take([149])["image"], image[[149]])


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("cuts", [[None, 100_000], [None, 0], [None, 9, 0, 150_000, 1]])
def test_a_broken_connection_is_continued(server, image, cuts, ranges):
    server.cuts, server.ranges = list(cuts), ranges
    store = open_store(f"{server.address}/image.npy")
    np.testing.assert_array_equal(store.take([149, 3])["image"], image[[149, 3]])
    assert not server.cuts


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("start", [1, 100_000])
def test_only_the_rest_is_asked_for(server, image, tmp_path, ranges, start):
    server.ranges = ranges
    content, address = server.files["image.npy"], f"{server.address}/image.npy"
    system = _remote._filesystem(address)
    remote = _remote._describe(system, address)
    with (tmp_path / "part").open("w+b") as file:
        file.write(content[:start])
        _remote._receive(system, remote, file, threading.Event())
        file.seek(0)
        assert file.read() == content
    assert server.requests[1:] == [("image.npy", f"bytes={start}-")]


def test_one_missing_file_ends_the_transfer_of_the_others(server, rng, tmp_path):
    server.piece_seconds = 0.1
    for number in (0, 2):
        server.files[f"x-0{number}-of-03.npy"] = rng.bytes(2_000_000)
    server.files["x-01-of-03.npy"] = b"x"
    describe = _remote._describe

    def vanish(system, address):
        remote = describe(system, address)
        if "x-01" in address:
            server.files.pop("x-01-of-03.npy", None)
        return remote

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_remote, "_describe", vanish)
        with pytest.raises(FileNotFoundError, match="x-01"):
            open_store(f"{server.address}/x-*-of-03.npy")
    assert cached(tmp_path) == []


def test_a_server_that_always_breaks_off_is_given_up(server, image, tmp_path):
    server.cuts = [None, 5000] + [0] * 20
    with pytest.raises(ConnectionError, match="image.npy") as caught:
        open_store(f"{server.address}/image.npy")
    assert not isinstance(caught.value, FileNotFoundError)
    assert cached(tmp_path) == []


@pytest.mark.parametrize("stall", [0, 80_000])
def test_a_stalled_server_is_an_error_not_a_hang(
    server, image, tmp_path, monkeypatch, stall
):
    monkeypatch.setattr(_remote, "_STALL_SECONDS", 0.3)
    server.stall = stall
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="did not answer"):
        open_store(f"{server.address}/image.npy")
    assert time.monotonic() - start < 8
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(404, FileNotFoundError), (403, PermissionError), (500, ConnectionError)],
)
def test_refusals_say_what_the_server_said(server, image, status, kind):
    server.status["image.npy"] = status
    with pytest.raises(kind, match="image.npy") as caught:
        open_store(f"{server.address}/image.npy")
    assert status == 404 or str(status) in str(caught.value)


def test_no_server_at_all_is_an_error(server, monkeypatch):
    with pytest.raises(ConnectionError, match="server failed"):
        open_store("http://127.0.0.1:9/image.npy")


def test_shards_are_counted_by_their_pattern(server, rng, tmp_path):
    array = rng.integers(0, 9, (11, 3), dtype=np.uint8)
    made = tmp_path / "made"
    made.mkdir()
    convert({"x": array}, made / "x.tfrecord", shards=3, progress=False).close()
    names = [f"x-{number:05d}-of-00003.tfrecord" for number in range(3)]
    for name in names:
        server.files[f"d/{name}"] = (made / name).read_bytes()
    pattern = f"{server.address}/d/x-*-of-00003.tfrecord"
    with open_store(pattern) as store:
        np.testing.assert_array_equal(store.take(np.arange(11))["x"], array)
    assert [name for name in cached(tmp_path) if name.endswith("record")] == names
    del server.files[f"d/{names[1]}"]
    with pytest.raises(FileNotFoundError, match="x-00001-of-00003"):
        open_store(pattern)


def test_checksums_come_along(server, rng, tmp_path):
    array = rng.integers(0, 9, (40, 5000), dtype=np.uint8)
    made = tmp_path / "made"
    made.mkdir()
    convert({"x": array}, made / "x.arrow", shards=2, progress=False).close()
    for path in made.iterdir():
        server.files[path.name] = path.read_bytes()
    with open_store(f"{server.address}/x-*-of-00002.arrow?key=1") as store:
        np.testing.assert_array_equal(store.take([39])["x"], array[[39]])
    assert cached(tmp_path) == sorted(path.name for path in made.iterdir())
    content = bytearray(server.files["x-00001-of-00002.arrow"])
    content[70_000] ^= 1
    server.files["x-00001-of-00002.arrow"] = bytes(content)
    with pytest.raises(DataCorruptionError, match="x-00001-of-00002.arrow.*checksum"):
        open_store(f"{server.address}/x-*-of-00002.arrow").take(np.arange(40))


@pytest.mark.parametrize("answer", [404, 403, "a page"])
def test_a_server_without_checksums_is_fine(server, image, tmp_path, answer):
    sidecar = "image.npy.crc.npz"
    if isinstance(answer, int):
        server.status[sidecar] = answer
    else:
        server.files[sidecar] = answer.encode()
    store = open_store(f"{server.address}/image.npy")
    np.testing.assert_array_equal(store.take([7])["image"], image[[7]])
    assert cached(tmp_path) == ["image.npy"]
    server.status[sidecar] = 500
    # What is in the cache is not asked about again.
    open_store(f"{server.address}/image.npy")


def test_a_server_that_fails_at_checksums_is_an_error(server, image, tmp_path):
    server.status["image.npy.crc.npz"] = 500
    with pytest.raises(ConnectionError, match="image.npy.crc.npz"):
        open_store(f"{server.address}/image.npy")
    assert cached(tmp_path) == []


@pytest.mark.parametrize("name", ["*.npy", "x-*.npy", "*-*-of-00003.npy", "x-*-of-0.a"])
def test_patterns_without_a_count_are_refused(server, name):
    with pytest.raises(ValueError, match="how many"):
        open_store(f"{server.address}/{name}")
    assert not server.requests


def test_damage_on_the_way_is_named_with_the_cached_file(server, image):
    server.files["image.npy"] = server.files["image.npy"][:-5]
    with pytest.raises(DataCorruptionError, match="image.npy") as caught:
        open_store(f"{server.address}/image.npy")
    assert os.path.exists(caught.value.path)


def test_other_protocols_are_read_in_chunks(server, rng, tmp_path, monkeypatch):
    monkeypatch.setattr(_remote, "_CHUNK", 1000)
    array = rng.integers(0, 256, (50, 99), dtype=np.uint8)
    memory = fsspec.filesystem("memory")
    folder = "/" + tmp_path.name
    memory.pipe(f"{folder}/image.npy", npy(array, tmp_path))
    memory.pipe(f"{folder}/label.npy", npy(np.arange(50), tmp_path))
    try:
        one = open_store(f"memory:/{folder}/image.npy")
        np.testing.assert_array_equal(one.take([49])["image"], array[[49]])
        assert "image.npy.crc.npz" not in cached(tmp_path)
        whole = open_store(f"memory:/{folder}")
        assert isinstance(whole, Store)
        assert dict(whole.spec) == {
            "image": ColumnSpec((99,), np.dtype(np.uint8)),
            "label": ColumnSpec((), np.dtype(np.int64)),
        }
        np.testing.assert_array_equal(whole.take([3])["image"], array[[3]])
        with pytest.raises(FileNotFoundError, match="nothing"):
            open_store(f"memory:/{folder}/nothing.npy")
    finally:
        memory.rm(folder, recursive=True)


def test_a_cache_that_cannot_be_written_says_so(server, image, tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    with pytest.raises(OSError, match="JAXACCEL_DATA"):
        open_store(f"{server.address}/image.npy")


def test_a_full_disk_is_noticed_before_the_transfer(server, image, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match=r"image.npy needs 0.240 MB"):
        open_store(f"{server.address}/image.npy")
    assert [name for name, _ in server.requests].count("image.npy") == 1


def test_unknown_protocols_and_missing_packages_name_the_remedy(monkeypatch):
    with pytest.raises(ValueError, match="https://"):
        open_store("gopher2://x/y.npy")
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"jaxaccel\[remote\]"):
        open_store("https://x/y.npy")


def test_a_column_at_an_address(server, image):
    store = open_store({"x": f"{server.address}/image.npy", "y": np.arange(len(image))})
    np.testing.assert_array_equal(store.take([1])["x"], image[[1]])


def test_a_page_is_no_data_file(server):
    server.files["z.parquet"] = b"\n<!DOCTYPE html><title>Log in</title>"
    for _ in range(2):
        with pytest.raises(ValueError, match="z.parquet is a web page") as caught:
            open_store(f"{server.address}/z.parquet")
        assert server.address in str(caught.value)


@pytest.mark.parametrize("content", [b"PAR1 and no more", b"something else"])
def test_errors_in_remote_files_name_the_address(server, content):
    name = "z.parquet" if content.startswith(b"PAR1") else "z.xyz"
    server.files[name] = content
    with pytest.raises(ValueError, match=f"{server.address}/{name}"):
        open_store(f"{server.address}/{name}")


def test_refused_access_has_a_remedy(server, image):
    server.status["image.npy"] = 403
    with pytest.raises(PermissionError, match="HTTP status 403.*credentials"):
        open_store(f"{server.address}/image.npy")
