"""Stores that decode once, on disk and in memory."""

import concurrent.futures
import os
import pathlib
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxaccel.data import (
    ColumnSpec,
    DataCorruptionError,
    Store,
    disk_cache,
    memory_cache,
)

N = 50
ROW = 4 * 3 + 2


class Slow(Store):
    """Counts what is read of it."""

    def __init__(self, label="a", fail_at=-1):
        super().__init__(
            {
                "image": ColumnSpec((4, 3), np.dtype(np.uint8)),
                "label": ColumnSpec((), np.dtype(np.uint16)),
            }
        )
        self.label, self.fail_at, self.read = label, fail_at, []

    def __len__(self):
        return N

    def fingerprint(self):
        return self.label

    def _read(self, rows):
        if self.fail_at in rows:
            raise KeyboardInterrupt
        self.read += rows.tolist()
        return expected(rows)


def expected(rows):
    rows = np.asarray(rows)
    image = (rows[:, None, None] * 7 + np.arange(12).reshape(4, 3)) % 256
    return {"image": image.astype(np.uint8), "label": (rows * 1000).astype(np.uint16)}


def check(store, rows):
    batch = store.take(rows)
    assert set(batch) == {"image", "label"}
    for name, array in expected(rows).items():
        assert batch[name].dtype == array.dtype
        np.testing.assert_array_equal(batch[name], array)


def cached(store, folder, **options):
    return disk_cache(store, folder, progress=False, **options)


def test_the_disk_decodes_once(tmp_path, rng):
    source = Slow()
    for _ in range(2):
        store = cached(source, tmp_path / "deep" / "cache")
        check(store, rng.integers(0, N, 80))
        assert dict(store.spec) == dict(source.spec) and len(store) == N
    assert source.read == list(range(N))


def test_each_fingerprint_has_an_entry_of_its_own(tmp_path):
    first, second = Slow("a"), Slow("b")
    cached(first, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    cached(second, tmp_path)
    cached(first[10:20], tmp_path)
    assert len(os.listdir(tmp_path)) == 3
    for path, time in before.items():
        assert path.stat().st_mtime_ns == time
    assert len(second.read) == N and len(first.read) == N + 10


def test_the_cache_folder_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXACCEL_DATA", str(tmp_path))
    check(disk_cache(Slow(), progress=False), [3])
    assert os.listdir(tmp_path) == ["stores"]


def test_an_interrupted_entry_is_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxaccel.data._cache.batch_rows", lambda store: 10)
    source = Slow(fail_at=33)
    with pytest.raises(KeyboardInterrupt):
        cached(source, tmp_path)
    source.fail_at = -1
    check(cached(source, tmp_path), [0, 33, 49])
    assert source.read == list(range(N))
    assert len(os.listdir(tmp_path)) == 1


def test_threads_that_ask_at_once_decode_once(tmp_path):
    source = Slow()
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        stores = list(pool.map(lambda _: cached(source, tmp_path), range(6)))
    for store in stores:
        check(store, [49, 0])
    assert source.read == list(range(N))
    assert len(os.listdir(tmp_path)) == 1


SCRIPT = """
import sys, time
import numpy as np
from jaxaccel.data import ColumnSpec, Store, disk_cache
class Slow(Store):
    def __init__(self): super().__init__({"x": ColumnSpec((9,), np.dtype(np.uint8))})
    def __len__(self): return 20
    def fingerprint(self): return "slow"
    def _read(self, rows):
        time.sleep(0.3)
        print("read", len(rows))
        return {"x": np.repeat(rows[:, None].astype(np.uint8), 9, 1)}
print("ready", flush=True)
sys.stdin.readline()
print(disk_cache(Slow(), sys.argv[1], progress=False).take([19])["x"].tolist())
"""


def test_processes_that_ask_at_once_decode_once(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    pipe = subprocess.PIPE
    both = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
        for _ in range(2)
    ]
    for process in both:
        # Both are ready: they wait for this line.
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert all(output.endswith(f"{[[19] * 9]}\n") for output in outputs)
    assert sum(output.count("read") for output in outputs) == 1
    assert len(os.listdir(tmp_path)) == 1


def test_an_entry_is_checked_when_it_is_read(tmp_path):
    store = cached(Slow(), tmp_path)
    copy = pickle.loads(pickle.dumps(store))
    check(copy, [5])
    (file,) = tmp_path.rglob("image.npy")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataCorruptionError, match="image.npy"):
        cached(Slow(), tmp_path).take([49])


def test_an_entry_may_not_be_too_large(tmp_path):
    with pytest.raises(ValueError, match="max_bytes"):
        cached(Slow(), tmp_path, max_bytes=N * ROW - 1)
    assert os.listdir(tmp_path) == []
    cached(Slow(), tmp_path, max_bytes=N * ROW)
    # What is there may be used.
    cached(Slow(), tmp_path, max_bytes=0)


@pytest.mark.parametrize("where", ["mkdir", "file"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch, where):
    folder = tmp_path / "cache"
    if where == "file":
        folder.write_text("no folder")
    else:

        def refuse(self, *args, **options):
            raise OSError(30, "Read-only file system", str(self))

        monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    source = Slow()
    with pytest.raises(OSError, match="cache .*JAXACCEL_DATA"):
        cached(source, folder)
    assert not source.read


def test_an_existing_entry_needs_no_writing(tmp_path, monkeypatch):
    cached(Slow(), tmp_path)

    def refuse(*args, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.replace", refuse)
    monkeypatch.setattr("os.mkdir", refuse)
    check(cached(Slow(), tmp_path), [7])


def test_a_full_disk_is_an_error_that_says_how_much(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="needs 0.001 MB"):
        cached(Slow(), tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("capacity", [1, 20, N, 3 * N])
def test_memory_gives_the_same_examples_and_keeps_its_bound(rng, capacity):
    source = Slow()
    store = memory_cache(source, max_bytes=8 * N + capacity * ROW + 5)
    for _ in range(30):
        rows = rng.integers(0, N, rng.integers(0, 25))
        check(store, rows)
    assert store.held == min(capacity, N)
    kept = sum(array.nbytes for array in store._kept.values())
    assert kept + store._slots.nbytes <= 8 * N + capacity * ROW + 5
    if capacity >= N:
        assert sorted(source.read) == list(range(N))


def test_memory_reads_what_it_keeps_no_more():
    source = Slow()
    store = memory_cache(source, max_bytes=8 * N + 10 * ROW)
    check(store, [4, 2, 2, 9])
    assert source.read == [2, 4, 9]
    source.read.clear()
    check(store, [9, 9, 4])
    assert source.read == []
    check(store, [9, 30, 4, 30, 31])
    assert source.read == [30, 31]
    assert store.fingerprint() == source.fingerprint() and len(store) == N


def test_batches_of_memory_are_fresh():
    store = memory_cache(Slow(), max_bytes=10_000)
    for _ in range(3):
        store.take([1, 2])["image"][:] = 0
    check(store, [1, 2])


def test_memory_may_be_used_by_many_threads(rng):
    store = memory_cache(Slow(), max_bytes=8 * N + 30 * ROW)
    batches = [rng.integers(0, N, 12) for _ in range(200)]
    barrier = threading.Barrier(8)

    def work(number):
        barrier.wait(10)
        for rows in batches[number::8]:
            check(store, rows)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert store.held == 30


def test_a_pickled_memory_cache_starts_empty():
    store = memory_cache(Slow(), max_bytes=10_000)
    store.take(np.arange(N))
    copy = pickle.loads(pickle.dumps(store))
    assert copy.held == 0
    check(copy, [1])


@pytest.mark.parametrize("size", [0, 8 * N + ROW - 1])
def test_memory_needs_room_for_one_example(size):
    with pytest.raises(ValueError, match="raise it"):
        memory_cache(Slow(), max_bytes=size)
