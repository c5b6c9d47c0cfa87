"""Named data sets and their fetching, without a network."""

import gzip
import hashlib
import http.server
import io
import sys
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxaccel import _fetch
from jaxaccel.data import (
    DataCorruptionError,
    DatasetUnavailableError,
    _cifar,
    _named,
    load_dataset,
)

FILES = {
    "train-images-idx3-ubyte": (12, 28, 28),
    "train-labels-idx1-ubyte": (12,),
    "t10k-images-idx3-ubyte": (5, 28, 28),
    "t10k-labels-idx1-ubyte": (5,),
}


def idx(array):
    sizes = b"".join(n.to_bytes(4, "big") for n in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@pytest.fixture
def contents(rng, monkeypatch):
    """A small stand-in for Fashion-MNIST, with digests to match."""
    contents = {
        name: idx(rng.integers(0, 10, shape, dtype=np.uint8))
        for name, shape in FILES.items()
    }
    digests = {name: hashlib.sha256(c).hexdigest() for name, c in contents.items()}
    monkeypatch.setattr(_named, "_FASHION_FILES", digests)
    monkeypatch.setattr(_named, "_FASHION_ADDRESS", "http://127.0.0.1:9/")
    monkeypatch.setattr(_named._fetch, "unpack_debian_package", no_debian)
    monkeypatch.setattr(_named, "_FASHION_INSTALLED", _named.Path("/nonexistent/x"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return contents


def no_debian(package, folder):
    raise FileNotFoundError("this is no Debian system: it has no apt-get")


@pytest.fixture
def serve():
    """Serves a dict of bodies on this machine; a callable answers by itself."""
    servers = []

    def start(bodies):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                requests.append(self.path)
                body = bodies.get(self.path.lstrip("/"))
                if callable(body):
                    body(self)
                elif body is None:
                    self.send_error(404)
                else:
                    self.send_response(200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *args):
                pass

        requests = []
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}/", requests

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def archives(contents):
    return {f"{name}.gz": gzip.compress(c) for name, c in contents.items()}


def assert_loaded(dataset, contents):
    images = np.frombuffer(contents["train-images-idx3-ubyte"], np.uint8)[16:]
    batch = dataset.train.take(np.arange(12))
    np.testing.assert_array_equal(batch["image"], images.reshape(12, 28, 28, 1))
    assert len(dataset.test) == 5 and dataset.test.spec["label"].shape == ()
    assert len(dataset.classes) == 10


def test_official_address_then_cache(contents, serve, tmp_path, monkeypatch):
    address, requests = serve(archives(contents))
    monkeypatch.setattr(_named, "_FASHION_ADDRESS", address)
    monkeypatch.setenv("JAXACCEL_DATA", str(tmp_path))
    dataset = load_dataset("fashion_mnist")
    assert_loaded(dataset, contents)
    assert dataset.source == f"official address {address}"
    assert len(requests) == 4
    again = load_dataset("fashion_mnist", download=False)
    assert_loaded(again, contents)
    assert again.source == dataset.source and len(requests) == 4
    assert sorted(p.name for p in (tmp_path / "fashion_mnist").iterdir()) == sorted(
        [*FILES, "source.txt"]
    )


def test_a_wrong_answer_moves_on_to_the_package(contents, serve, tmp_path, monkeypatch):
    wrong = {**contents, "t10k-labels-idx1-ubyte": idx(np.zeros(5, np.uint8))}
    address, _ = serve(archives(wrong))
    monkeypatch.setattr(_named, "_FASHION_ADDRESS", address)
    with pytest.raises(OSError, match="t10k-labels.* has SHA-256 [0-9a-f]{64}, expec"):
        load_dataset("fashion_mnist", root=tmp_path)
    assert not list((tmp_path / "fashion_mnist").iterdir())

    def package(name, folder):
        place = folder / "content/nonexistent/x"
        place.mkdir(parents=True)
        for file, content in archives(contents).items():
            (place / file).write_bytes(content)
        return folder / "content"

    monkeypatch.setattr(_fetch, "unpack_debian_package", package)
    dataset = load_dataset("fashion_mnist", root=tmp_path)
    assert_loaded(dataset, contents)
    assert dataset.source == "Debian package dataset-fashion-mnist"


def test_archives_put_there_by_hand(contents, tmp_path):
    folder = tmp_path / "fashion_mnist"
    folder.mkdir()
    for name, content in archives(contents).items():
        (folder / name).write_bytes(content)
    dataset = load_dataset("fashion_mnist", root=tmp_path, download=False)
    assert_loaded(dataset, contents)
    assert dataset.source == "archives in the cache folder"


def test_a_flipped_bit_in_the_cache_is_noticed_and_mended(
    contents, serve, tmp_path, monkeypatch
):
    address, _ = serve(archives(contents))
    monkeypatch.setattr(_named, "_FASHION_ADDRESS", address)
    load_dataset("fashion_mnist", root=tmp_path)
    path = tmp_path / "fashion_mnist" / "train-images-idx3-ubyte"
    damaged = bytearray(contents[path.name])
    damaged[500] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(DatasetUnavailableError, match="cache: train-images.*SHA-256"):
        load_dataset("fashion_mnist", root=tmp_path, download=False)
    assert_loaded(load_dataset("fashion_mnist", root=tmp_path), contents)


def test_several_at_once(contents, serve, tmp_path, monkeypatch):
    address, _ = serve(archives(contents))
    monkeypatch.setattr(_named, "_FASHION_ADDRESS", address)
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(load_dataset, "fashion_mnist", root=tmp_path) for _ in range(4)
        ]
    for future in futures:
        assert_loaded(future.result(), contents)
    assert len(list((tmp_path / "fashion_mnist").iterdir())) == 5


def test_nothing_works(contents, tmp_path):
    with pytest.raises(DatasetUnavailableError) as caught:
        load_dataset("fashion_mnist", root=tmp_path)
    message = str(caught.value)
    for words in (
        "cache: no train-images-idx3-ubyte",
        "official address http://127.0.0.1:9/: [Errno 111]",
        "Debian package dataset-fashion-mnist: this is no Debian system",
        "JAXACCEL_DATA",
        "--dataset digits",
    ):
        assert words in message
    assert not list((tmp_path / "fashion_mnist").iterdir())


def test_offline_and_unwritable(contents, tmp_path):
    with pytest.raises(DatasetUnavailableError, match="cache: no train"):
        load_dataset("fashion_mnist", root=tmp_path / "new", download=False)
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DatasetUnavailableError, match="cannot write to .*file"):
        load_dataset("fashion_mnist", root=tmp_path / "file")


def cut(handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b"x" * 40)


def cut_chunk(handler):
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"40\r\nabc")
    handler.close_connection = True


def test_downloads_that_go_wrong(serve, tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(_fetch, "_CONNECT_SECONDS", 0.2)
    released = threading.Event()
    address, _ = serve(
        {
            "cut": cut,
            "chunk": cut_chunk,
            "long": b"x" * 200,
            "slow": lambda handler: released.wait(5),
        }
    )
    path = tmp_path / "x"
    try:
        for name, words in [
            ("gone", "HTTP status 404"),
            ("cut", "ended after 40 of 100 bytes"),
            ("chunk", "the answer broke off"),
            ("long", "longer than 150 bytes"),
            ("slow", "no answer within 0 s|timed out"),
        ]:
            with pytest.raises(OSError, match=words):
                _fetch.download(address + name, path, max_bytes=150)
    finally:
        released.set()
    with pytest.raises(TimeoutError, match="took longer than -1 s"):
        _fetch.download(address + "long", path, max_bytes=500, seconds=-1.0)
    _fetch.download(address + "long", path, max_bytes=200)
    assert path.read_bytes() == b"x" * 200


def test_a_name_server_that_hangs_does_not_hold_us(monkeypatch, tmp_path):
    released, closed = threading.Event(), threading.Event()

    class Answer:
        def close(self):
            closed.set()

    def urlopen(*args, **options):
        released.wait(5)
        return Answer()

    monkeypatch.setattr(_fetch, "_CONNECT_SECONDS", 0.1)
    monkeypatch.setattr(_fetch.urllib.request, "urlopen", urlopen)
    with pytest.raises(TimeoutError, match="no answer"):
        _fetch.download("http://127.0.0.1:9/", tmp_path / "x", max_bytes=1)
    released.set()
    # An answer that comes too late is not left open.
    assert closed.wait(5)


def test_debian_commands(monkeypatch, tmp_path):
    calls = []

    def run(command, **options):
        calls.append(command)
        if "download" in command:
            (tmp_path / "demo_1_all.deb").write_bytes(b"")
        return _fetch.subprocess.CompletedProcess(command, 100 if failing else 0)

    monkeypatch.setattr(_fetch.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(_fetch.subprocess, "run", run)
    failing = False
    assert _fetch.unpack_debian_package("demo", tmp_path) == tmp_path / "content"
    assert [c[0] for c in calls] == ["apt-get", "apt-get", "dpkg-deb"]
    assert f"Dir::State={tmp_path / 'State'}" in calls[0]
    failing = True
    (tmp_path / "again").mkdir()
    with pytest.raises(OSError, match="apt-get download demo failed with status 100"):
        _fetch.unpack_debian_package("demo", tmp_path / "again")
    monkeypatch.setattr(_fetch.shutil, "which", lambda tool: None)
    with pytest.raises(OSError, match="no Debian system: it has no apt-get"):
        _fetch.unpack_debian_package("demo", tmp_path)


def test_data_root(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXACCEL_DATA", str(tmp_path / "a"))
    assert _fetch.data_root() == tmp_path / "a"
    assert _fetch.data_root(tmp_path) == tmp_path
    monkeypatch.delenv("JAXACCEL_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert _fetch.data_root() == tmp_path / "b" / "jaxaccel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _fetch.data_root() == tmp_path / ".cache" / "jaxaccel"


def cifar_records(rng, count):
    labels = rng.integers(0, 10, count, dtype=np.uint8)
    images = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    records = b"".join(
        bytes([label]) + image.transpose(2, 0, 1).tobytes()
        for label, image in zip(labels, images, strict=True)
    )
    return labels, images, records


def write_cifar(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture
def cifar(rng, tmp_path, monkeypatch):
    """A small archive of the published layout in its place, and its content."""
    folder = tmp_path / "cifar10"
    folder.mkdir()
    parts = [cifar_records(rng, 4) for _ in range(6)]
    names = [*_cifar._MEMBERS["train"], *_cifar._MEMBERS["test"]]
    members = {n: records for n, (_, _, records) in zip(names, parts, strict=True)}
    path = folder / "cifar-10-binary.tar.gz"
    # An entry that leads outside is never looked at.
    write_cifar(path, {"../outside.bin": b"x", **members})
    digest = hashlib.md5(path.read_bytes()).hexdigest()
    monkeypatch.setattr(_named, "_CIFAR_MD5", digest)
    monkeypatch.setattr(_named, "_CIFAR_EXAMPLES", {"train": 20, "test": 4})
    monkeypatch.setattr(_named, "_CIFAR_ADDRESS", "http://127.0.0.1:9/")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return path, parts, members


def test_cifar10_is_read_from_its_archive(cifar, tmp_path):
    path, parts, _ = cifar
    dataset = load_dataset("cifar10", root=tmp_path, download=False)
    batch = dataset.train.take(np.arange(20))
    np.testing.assert_array_equal(
        batch["label"], np.concatenate([p[0] for p in parts[:5]])
    )
    np.testing.assert_array_equal(
        batch["image"], np.concatenate([p[1] for p in parts[:5]])
    )
    np.testing.assert_array_equal(dataset.test.columns["image"], parts[5][1])
    assert len(dataset.classes) == 10 and len(dataset.mean) == len(dataset.std) == 3
    path.unlink()
    again = load_dataset("cifar10", root=tmp_path, download=False)
    assert again.source == "archive in the cache folder"
    assert not (tmp_path / "outside.bin").exists()


@pytest.mark.parametrize("damage", ["flip", "shape", "label"])
def test_a_damaged_cifar10_cache_is_noticed_and_made_again(cifar, tmp_path, damage):
    path, parts, _ = cifar
    load_dataset("cifar10", root=tmp_path, download=False)
    cached = path.parent / "train-image.npy"
    if damage == "flip":
        content = bytearray(cached.read_bytes())
        content[-1] ^= 1
        cached.write_bytes(content)
    else:  # files put there by hand have no digests
        (path.parent / "sha256.txt").unlink()
        if damage == "shape":
            np.save(cached, np.zeros((20, 8, 8, 3)))
        else:
            np.save(path.parent / "train-label.npy", np.full(20, 77, np.uint8))
    again = load_dataset("cifar10", root=tmp_path, download=False)
    np.testing.assert_array_equal(again.train.columns["image"][:4], parts[0][1])
    assert again.train.columns["label"].max() <= 9
    cached.write_bytes(b"")
    path.unlink()
    with pytest.raises(DatasetUnavailableError, match="train-image.npy has SHA-256"):
        load_dataset("cifar10", root=tmp_path, download=False)


def test_cifar10_with_another_digest_or_no_network(cifar, tmp_path, monkeypatch):
    monkeypatch.setattr(_named, "_CIFAR_MD5", "0" * 32)
    with pytest.raises(DatasetUnavailableError) as caught:
        load_dataset("cifar10", root=tmp_path)
    message = str(caught.value)
    assert "expected " + "0" * 32 in message
    assert "official address http://127.0.0.1:9/cifar-10-binary.tar.gz" in message
    assert "put cifar-10-binary.tar.gz into" in message


def test_damaged_cifar10(cifar, tmp_path):
    path, _, members = cifar
    names = list(members)
    write_cifar(path, {n: members[n] for n in names[:5]})
    with pytest.raises(DataCorruptionError, match="no file .*test_batch.bin"):
        _cifar.convert_cifar10(path, tmp_path)
    write_cifar(path, {**members, names[1]: members[names[1]][:-1]})
    with pytest.raises(DataCorruptionError, match="data_batch_2.bin.*12291 bytes"):
        _cifar.convert_cifar10(path, tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(DataCorruptionError, match="unreadable"):
        _cifar.convert_cifar10(path, tmp_path)
    path.write_bytes(b"no archive")
    with pytest.raises(DataCorruptionError, match="unreadable"):
        _cifar.convert_cifar10(path, tmp_path)
    with pytest.raises(DataCorruptionError, match="whole records"):
        _cifar.parse_cifar10(b"", "x.bin")
    with pytest.raises(DataCorruptionError, match="label from 0 to 9, found 10") as got:
        _cifar.parse_cifar10(bytes(3073) + bytes([10]) + bytes(3072), "x.bin")
    assert (got.value.record, got.value.offset) == (1, 3073)


def test_digits():
    digits = load_dataset("digits")
    assert (len(digits.train), len(digits.test)) == (1437, 360)
    assert digits.train.spec["image"] == ((8, 8, 1), np.uint8)
    train, test = digits.train.columns, digits.test.columns
    assert train["image"].max() == 255 and set(np.unique(train["label"])) == set(
        range(10)
    )
    np.testing.assert_allclose(digits.mean, (train["image"] / 255).mean(), rtol=1e-12)
    np.testing.assert_allclose(digits.std, (train["image"] / 255).std(), rtol=1e-12)
    from sklearn.datasets import load_digits

    original: Any = load_digits()
    np.testing.assert_array_equal(test["label"], original.target[::5])
    # 16 levels, spread over 0 to 255.
    np.testing.assert_allclose(
        test["image"][..., 0] / 255 * 16, original.images[::5], atol=0.04
    )


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxaccel\[examples\]'"):
        load_dataset("digits")


def test_unknown_name():
    with pytest.raises(ValueError, match="'mnist'; choose one of 'cifar10', 'digits'"):
        load_dataset("mnist")


def test_constants_of_fashion_mnist_where_it_is_cached():
    try:
        dataset = load_dataset("fashion_mnist", download=False)
    except DatasetUnavailableError:
        pytest.skip("Fashion-MNIST is not in the cache of this machine")
    images = dataset.train.columns["image"] / np.float64(255)
    np.testing.assert_allclose(dataset.mean, images.mean(), rtol=1e-9)
    np.testing.assert_allclose(dataset.std, images.std(), rtol=1e-9)
    for store, count in ((dataset.train, 6000), (dataset.test, 1000)):
        assert np.bincount(store.columns["label"]).tolist() == [count] * 10
