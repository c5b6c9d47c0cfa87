"""What every store does, whatever its format; and what none does when damaged."""

import concurrent.futures
import pathlib
import pickle
import shutil

import numpy as np
import pytest

from jaxaccel.data import (
    BatchPlan,
    DataCorruptionError,
    Loader,
    convert,
    memory_cache,
    open_store,
)

EXAMPLES = 13
# Suffix, and whether a checksum covers every byte of what `convert` writes.
FORMATS = {
    "npy": "",
    "arrow": ".arrow",
    "parquet": ".parquet",
    "tfrecord": ".tfrecord",
    "array_record": ".array_record",
    "tar": ".tar",
}
DAMAGES = ("empty", "one_byte", "third", "two_thirds", "last_byte", "garbage", "longer")


@pytest.fixture(scope="module")
def columns():
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(256, size=(EXAMPLES, 6, 5, 3), dtype=np.uint8),
        "label": np.arange(EXAMPLES, dtype=np.uint16) * 1000,
        "score": rng.standard_normal(EXAMPLES).astype(np.float32),
        "flags": rng.integers(2, size=(EXAMPLES, 4)).astype(bool),
    }


@pytest.fixture(scope="module")
def written(columns, tmp_path_factory):
    """A file, or folder, of each format; never changed."""
    folder = tmp_path_factory.mktemp("stores")
    for name, suffix in FORMATS.items():
        convert(columns, folder / f"{name}{suffix}", format=name, progress=False)
    return folder


@pytest.fixture(params=FORMATS)
def path(request, written):
    return written / f"{request.param}{FORMATS[request.param]}"


def assert_equal(batch, columns, rows):
    assert sorted(batch) == sorted(columns)
    for name, array in batch.items():
        assert array.dtype == columns[name].dtype
        np.testing.assert_array_equal(array, columns[name][rows], err_msg=name)


def test_any_row_in_any_order(path, columns, rng):
    with open_store(path) as store:
        assert len(store) == EXAMPLES
        for name, spec in store.spec.items():
            assert spec == (columns[name].shape[1:], columns[name].dtype)
        for rows in ([3], [12, 0, 12, 5], rng.permutation(EXAMPLES), []):
            assert_equal(store.take(np.array(rows, int)), columns, np.array(rows, int))
        with pytest.raises(IndexError, match="13 is out of range"):
            store.take([13])
        with pytest.raises(IndexError, match="-1 is out of range"):
            store.take([-1])


@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_scan_reads_everything_once_in_order(path, columns, size):
    with open_store(path) as store:
        batches = list(store.scan(size))
    lengths = [min(size, EXAMPLES - i) for i in range(0, EXAMPLES, size)]
    assert [len(batch["label"]) for batch in batches] == lengths
    whole = {name: np.concatenate([b[name] for b in batches]) for name in columns}
    assert_equal(whole, columns, np.arange(EXAMPLES))


def test_batches_are_fresh_and_writable(path, columns):
    with open_store(path) as store:
        for batch in (store.take([1, 2]), next(store.scan(2))):
            for array in batch.values():
                array[...] = 0
        assert_equal(store.take([1, 2, 0]), columns, [1, 2, 0])


def test_what_is_closed_says_so(written, columns):
    for name, suffix in FORMATS.items():
        store = open_store(written / f"{name}{suffix}")
        store.take([0])
        store.close()
        if name == "npy":
            continue  # An array, which nothing can close.
        with pytest.raises(ValueError, match="is closed; open it again"):
            store.take([0])
        with pytest.raises(ValueError, match="is closed; open it again"):
            next(store.scan(5))
    store = memory_cache(open_store(columns), max_bytes=10_000)
    store.close()
    with pytest.raises(ValueError, match="is closed; open it again"):
        store.take([0])


def test_slices_pickles_and_threads_read_the_same(path, columns):
    with open_store(path) as store:
        part = store[2:12:3]
        assert_equal(part.take([3, 0]), columns, [11, 2])
        with pickle.loads(pickle.dumps(store)) as copy:
            assert copy.fingerprint() == store.fingerprint() != part.fingerprint()
            assert_equal(copy.take([4, 1]), columns, [4, 1])
        orders = [np.random.default_rng(i).permutation(EXAMPLES) for i in range(16)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            for rows, batch in zip(orders, pool.map(store.take, orders), strict=True):
                assert_equal(batch, columns, rows)


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_shards_hold_every_example_once(written, columns, tmp_path, shards, path):
    if not path.suffix:
        pytest.skip("a folder of columns is one shard")
    name = f"train{path.suffix}"
    convert(columns, tmp_path / name, shards=shards, progress=False)
    pattern = tmp_path / f"train-*-of-{shards:05d}{path.suffix}"
    with open_store(pattern) as store:
        plan = BatchPlan(EXAMPLES, 4, epochs=1, remainder="pad")
        with Loader(store, plan) as loader:
            seen = [b["label"][b["mask"]] for b in loader]
    assert sorted(np.concatenate(seen)) == sorted(columns["label"])
    if shards > 1:
        next(tmp_path.glob(f"*-00001-of-*{path.suffix}")).unlink()
        with pytest.raises(FileNotFoundError, match=r"\[1\] are missing"):
            open_store(pattern)


def read_all(path: pathlib.Path):
    with open_store(path) as store:
        batches = list(store.scan(4))
        batches.append(store.take(np.arange(len(store))[::-1]))
        return batches


def damage(content: bytes, how: str) -> bytes:
    size = len(content)
    lengths = {"empty": 0, "one_byte": 1, "third": size // 3}
    lengths |= {"two_thirds": 2 * size // 3, "last_byte": size - 1}
    if how in lengths:
        return content[: lengths[how]]
    if how == "garbage":
        return bytes(i * 37 % 251 for i in range(size))
    return content + b"\x00" * 16


def copy_of(path: pathlib.Path, folder: pathlib.Path) -> tuple[pathlib.Path, list]:
    """A copy with its sidecars, and the files in it that hold data."""
    for neighbour in path.parent.glob(f"{path.name}*"):
        copy = shutil.copytree if neighbour.is_dir() else shutil.copy2
        copy(neighbour, folder / neighbour.name)
    copied = folder / path.name
    if copied.is_dir():
        return copied, [copied / "image.npy", copied / "label.npy"]
    return copied, [copied]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_an_error_that_names_it(path, tmp_path, how):
    copied, files = copy_of(path, tmp_path)
    for file in files:
        intact = file.read_bytes()
        file.write_bytes(damage(intact, how))
        with pytest.raises(DataCorruptionError) as caught:
            read_all(copied)
        assert pathlib.Path(caught.value.path) == file
        assert caught.value.offset >= 0
        file.write_bytes(intact)
    read_all(copied)


def test_a_file_cut_between_two_records(written, tmp_path):
    copied, _ = copy_of(written / "tfrecord.tfrecord", tmp_path)
    content = copied.read_bytes()
    length = int.from_bytes(content[:8], "little")
    copied.write_bytes(content[: 3 * (8 + 4 + length + 4)])
    with pytest.raises(DataCorruptionError):
        read_all(copied)


def test_no_flipped_bit_becomes_a_pixel(path, columns, tmp_path, rng):
    copied, files = copy_of(path, tmp_path)
    for file in files:
        intact = file.read_bytes()
        for place in sorted(rng.choice(len(intact), 24, replace=False)):
            content = bytearray(intact)
            content[place] ^= 1 << int(rng.integers(8))
            file.write_bytes(content)
            refused_or_right(copied, file, columns)
        file.write_bytes(intact)


def refused_or_right(path, file, columns) -> bool:
    try:
        batches = read_all(path)
    except DataCorruptionError as error:
        assert pathlib.Path(error.path) == file
        return True
    # Allowed only where the byte means nothing, such as padding.
    assert_equal(batches[-1], columns, np.arange(EXAMPLES)[::-1])
    return False


def test_length_fields_that_promise_the_earth(path, columns, tmp_path):
    copied, files = copy_of(path, tmp_path)
    for file in files:
        intact, refused = file.read_bytes(), 0
        for place in range(0, min(len(intact), 256) - 8, 24):
            content = bytearray(intact)
            content[place : place + 8] = b"\xff" * 7 + b"\x7f"
            file.write_bytes(content)
            refused += refused_or_right(copied, file, columns)
        assert refused
        file.write_bytes(intact)
