"""Folders of .npy files with checksums: written, read, damaged, continued."""

import gzip
import os
import pickle
import shutil

import numpy as np
import pytest

from jaxaccel.data import ArrayStore, ColumnSpec, DataCorruptionError, open_store
from jaxaccel.data._formats import WriteOptions
from jaxaccel.data._npy import FORMAT, NpyWriter
from jaxaccel.data._sidecar import BLOCK, sidecar_path, write_checksums

N = 200


@pytest.fixture
def columns(rng):
    return {
        "image": rng.integers(0, 256, (N, 30, 31, 3), dtype=np.uint8),
        "image/class/label": rng.integers(0, 9, N).astype(np.uint16),
        "100%": rng.normal(size=(N, 2)).astype(np.float16),
        "flag": rng.integers(0, 2, N).astype(bool),
    }


def spec_of(columns):
    return {name: ColumnSpec(c.shape[1:], c.dtype) for name, c in columns.items()}


def batches(columns, start, stop, size=33):
    for first in range(start, stop, size):
        last = min(first + size, stop)
        yield {name: c[first:last] for name, c in columns.items()}


@pytest.fixture
def folder(tmp_path, columns):
    path = tmp_path / "data"
    assert FORMAT.create is not None
    writer = FORMAT.create(path, spec_of(columns), WriteOptions(None, N))
    for batch in batches(columns, 0, N):
        writer.write(batch)
    writer.finish()
    return path


def opened(path):
    store = open_store(path)
    assert isinstance(store, ArrayStore)
    return store


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_numpy_reads_what_was_written(folder, columns):
    names = {name.replace("%", "%25").replace("/", "%2F"): name for name in columns}
    files = {f"{name}.npy" for name in names}
    assert set(os.listdir(folder)) == files | {f"{name}.crc.npz" for name in files}
    for file, name in names.items():
        np.testing.assert_array_equal(np.load(folder / f"{file}.npy"), columns[name])
    for file in files:
        before = sidecar_path(folder / file).read_bytes()
        with np.load(sidecar_path(folder / file)) as saved:
            crcs = saved["crc32"]
        write_checksums(folder / file)
        with np.load(sidecar_path(folder / file)) as again:
            np.testing.assert_array_equal(again["crc32"], crcs)
        sidecar_path(folder / file).write_bytes(before)


def test_stores_give_back_the_columns_and_their_names(folder, columns, rng):
    store = open_store(folder)
    assert dict(store.spec) == spec_of(columns) and len(store) == N
    rows = rng.integers(0, N, 64)
    for name, array in store.take(rows).items():
        np.testing.assert_array_equal(array, columns[name][rows])
    part = store[150:10:-7][2:6]
    for name, array in part.take([3, 0]).items():
        np.testing.assert_array_equal(array, columns[name][150:10:-7][2:6][[3, 0]])


def test_a_pickled_store_refers_to_the_files(folder, columns):
    store = open_store(folder)[::-3][4:]
    content = pickle.dumps(store)
    assert len(content) < 2000
    copy = pickle.loads(content)
    assert len(copy) == len(store) and copy.fingerprint() == store.fingerprint()
    expected = columns["image"][::-3][4:]
    np.testing.assert_array_equal(copy.take([0, 9])["image"], expected[[0, 9]])
    flip(folder / "flag.npy", 130)
    with pytest.raises(DataCorruptionError, match="flag"):
        pickle.loads(content)


def test_a_store_whose_files_shrank_is_refused(folder, columns, tmp_path):
    content = pickle.dumps(open_store(folder))
    shutil.rmtree(folder)
    folder.mkdir()
    np.save(folder / "image.npy", columns["image"][:5])
    with pytest.raises((ValueError, FileNotFoundError)):
        pickle.loads(content)


@pytest.mark.parametrize("row", [0, 1, 77, N - 1])
@pytest.mark.parametrize("byte", [0, 1400, 2789])
def test_a_flipped_pixel_is_found_when_its_block_is_read(folder, row, byte):
    path = folder / "image.npy"
    offset = 128 + row * 2790 + byte
    flip(path, offset)
    block = offset // BLOCK
    first, last = block * BLOCK, (block + 1) * BLOCK
    starts = 128 + np.arange(N) * 2790
    apart = (starts >= last) | (starts + 2790 <= first)
    if block == 0:
        with pytest.raises(DataCorruptionError) as caught:
            open_store(folder)
    else:
        store = open_store(folder)
        store.take(np.flatnonzero(apart))
        with pytest.raises(DataCorruptionError) as caught:
            store.take([row])
        assert caught.value.record == row
        with pytest.raises(DataCorruptionError):
            list(store.scan(64))
        with pytest.raises(DataCorruptionError):
            _ = opened(folder).columns
    assert (caught.value.path, caught.value.offset) == (str(path), first)
    # Told not to look, it does not.
    assert len(open_store(folder, checksums=False).take([row])["image"]) == 1


def test_a_record_is_counted_in_the_file_not_in_the_slice(folder):
    flip(folder / "image.npy", 128 + 150 * 2790)
    part = open_store(folder)[199:100:-1]
    with pytest.raises(DataCorruptionError) as caught:
        part.take([49])
    assert caught.value.record == 150


@pytest.mark.parametrize("offset", [7, 30, 61, 70])
def test_a_flipped_header_is_found_before_it_is_believed(folder, offset):
    flip(folder / "image%2Fclass%2Flabel.npy", offset)
    with pytest.raises(DataCorruptionError, match="checksum"):
        open_store(folder)


@pytest.mark.parametrize("keep", [0, 5, 128, 3000, -1])
def test_truncated_files_are_refused_when_opened(folder, keep):
    path = folder / "image.npy"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataCorruptionError) as caught:
        open_store(folder)
    assert caught.value.path == str(path)


def test_columns_given_by_path_are_checked_too(folder, columns):
    label = folder / "image%2Fclass%2Flabel.npy"
    store = open_store({"image": folder / "image.npy", "y": columns["flag"]})
    np.testing.assert_array_equal(store.take([5])["y"], columns["flag"][[5]])
    flip(label, 140)
    with pytest.raises(DataCorruptionError):
        open_store({"label": label})


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.uint8, ">u2"])
def test_files_of_others_are_checked_once_they_have_checksums(
    tmp_path, rng, order, dtype
):
    array = rng.integers(0, 99, (50, 40, 41)).astype(dtype, order=order)
    path = tmp_path / "x.npy"
    np.save(path, array)
    write_checksums(path)
    np.testing.assert_array_equal(open_store(path).take([3, 49])["x"], array[[3, 49]])
    flip(path, path.stat().st_size - 1)
    with pytest.raises(DataCorruptionError, match="checksum"):
        open_store(path).take([49])


def test_a_compressed_idx_file_is_checked_whole(tmp_path):
    path = tmp_path / "t-ubyte.gz"
    path.write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\3abc"))
    write_checksums(path)
    assert open_store(path).take([2])["label"].tolist() == [99]


def test_fingerprints_differ_with_content_and_rows(folder, columns):
    store = open_store(folder)
    first = store.fingerprint()
    assert first == open_store(folder).fingerprint() == store[:].fingerprint()
    assert first != store[1:].fingerprint() != store[:-1].fingerprint()
    changed = columns["flag"].copy()
    changed[7] ^= True
    np.save(folder / "flag.npy", changed)
    write_checksums(folder / "flag.npy")
    assert open_store(folder).fingerprint() != first


@pytest.mark.parametrize("extra", [b"", b"torn row"])
def test_an_interrupted_folder_is_continued(tmp_path, columns, extra):
    path, spec = tmp_path / "data", spec_of(columns)
    writer = NpyWriter(path, spec, N)
    for batch in batches(columns, 0, 99):
        writer.write(batch)
    rows, digests = writer.rows, writer.checkpoint()
    for batch in batches(columns, 99, 120):
        writer.write(batch)
    writer.abort()
    with (path / "image.npy").open("ab") as file:
        file.write(extra)
    again = NpyWriter.resume(path, spec, N, rows, digests)
    assert again is not None and again.rows == 99
    for batch in batches(columns, 99, N):
        again.write(batch)
    again.finish()
    for name, array in opened(path).columns.items():
        np.testing.assert_array_equal(array, columns[name])


@pytest.mark.parametrize("damage", ["flip", "header", "short", "missing", "other"])
def test_a_changed_folder_is_not_continued(tmp_path, columns, damage):
    path, spec = tmp_path / "data", spec_of(columns)
    writer = NpyWriter(path, spec, N)
    writer.write({name: c[:99] for name, c in columns.items()})
    digests = writer.checkpoint()
    writer.abort()
    image = path / "image.npy"
    if damage == "flip":
        flip(image, 5000)
    elif damage == "header":
        flip(image, 80)
    elif damage == "short":
        os.truncate(image, 5000)
    elif damage == "missing":
        image.unlink()
    else:
        spec["image"] = ColumnSpec((31, 30, 3), np.dtype(np.uint8))
    assert NpyWriter.resume(path, spec, N, 99, digests) is None


def test_the_writer_refuses_what_was_not_announced(tmp_path, columns):
    writer = NpyWriter(tmp_path / "data", spec_of(columns), 10)
    with pytest.raises(ValueError, match="announced"):
        writer.write(columns)
    with pytest.raises(ValueError, match="announced, got 0"):
        writer.finish()
    wrong = {name: c[:5] for name, c in columns.items()}
    with pytest.raises(ValueError, match="'flag' must be bool"):
        writer.write(wrong | {"flag": wrong["flag"].astype(np.uint8)})
    writer.abort()
