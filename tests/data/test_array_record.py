"""ArrayRecord files against the package's own reader, and damage."""

import importlib
import os
import pickle
import threading

import numpy as np
import pytest
from array_record.python import array_record_data_source

from jaxaccel.data import ColumnSpec, DataCorruptionError, open_store
from jaxaccel.data._array_record import FORMAT
from jaxaccel.data._formats import WriteOptions
from jaxaccel.data._tf_example import parse_example

array_record_module = importlib.import_module("array_record.python.array_record_module")
UINT8 = np.dtype(np.uint8)


@pytest.fixture
def columns(rng):
    return {
        "image": rng.integers(0, 256, (50, 5, 4, 3), dtype=np.uint8),
        "label": rng.integers(0, 256, 50).astype(np.uint8),
        "score": rng.normal(size=(50, 2)),
    }


@pytest.fixture(params=[None, "zstd"])
def written(request, tmp_path, columns):
    path = tmp_path / "w.array_record"
    spec = {n: ColumnSpec(c.shape[1:], c.dtype) for n, c in columns.items()}
    assert FORMAT.create is not None
    writer = FORMAT.create(path, spec, WriteOptions(request.param, 50))
    writer.write({name: column[:30] for name, column in columns.items()})
    writer.write({name: column[30:] for name, column in columns.items()})
    writer.finish()
    return path


@pytest.fixture
def write(tmp_path):
    def write(records, options="group_size:1", name="a.array_record"):
        writer = array_record_module.ArrayRecordWriter(str(tmp_path / name), options)
        for record in records:
            writer.write(record)
        writer.close()
        return tmp_path / name

    return write


def test_what_was_written_is_read(written, columns, rng):
    with open_store(written) as store:
        assert store.spec == {
            n: ColumnSpec(c.shape[1:], c.dtype) for n, c in columns.items()
        }
        rows = rng.integers(0, 50, 30)
        batch, seen = store.take(rows), list(store.scan(17))
        for name, column in columns.items():
            np.testing.assert_array_equal(batch[name], column[rows])
            found = np.concatenate([batch[name] for batch in seen])
            np.testing.assert_array_equal(found, column)
        assert store.take([])["label"].shape == (0,)


def test_written_file_is_what_others_expect(written, columns):
    source = array_record_data_source.ArrayRecordDataSource([str(written)])
    assert len(source) == 50
    record = source[7]
    start, stop = parse_example(memoryview(record))["image"].spans[0]
    assert record[start:stop] == columns["image"][7].tobytes()
    reader = array_record_module.ArrayRecordReader(str(written))
    assert "group_size:1," in reader.writer_options_string()


@pytest.mark.parametrize("options", ["group_size:1,uncompressed", "group_size:8,zstd"])
def test_records_of_one_array(write, rng, options):
    tokens = rng.integers(0, 2**16, (20, 8)).astype(np.uint16)
    path = write([row.tobytes() for row in tokens], options)
    with pytest.raises(ValueError, match="no tf.Example; say what they hold"):
        open_store(path)
    spec = {"token": ColumnSpec((8,), np.dtype(np.uint16))}
    store = open_store(path, columns=spec)
    np.testing.assert_array_equal(store.take([15, 2, 2])["token"], tokens[[15, 2, 2]])


def test_recognized_by_content(write):
    path = write([b"abcd"], name="train-00000-of-00001")
    spec = {"x": ColumnSpec((4,), UINT8)}
    assert open_store(path, columns=spec).take([0])["x"].tobytes() == b"abcd"


def test_pickled_store_reads_the_same(written, columns, monkeypatch):
    monkeypatch.chdir(written.parent)
    store = open_store(written.name)
    content = pickle.dumps(store)
    monkeypatch.chdir("/")
    copy = pickle.loads(content)
    np.testing.assert_array_equal(copy.take([7])["image"], columns["image"][[7]])
    assert copy.fingerprint() == store.fingerprint()
    os.utime(written, ns=(0, 0))
    assert open_store(written).fingerprint() != store.fingerprint()
    with pytest.raises(DataCorruptionError, match="changed after"):
        pickle.loads(content)


def test_several_threads(written, columns):
    store, errors = open_store(written), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(10):
            rows = rng.integers(0, 50, 8)
            if not np.array_equal(store.take(rows)["image"], columns["image"][rows]):
                errors.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_closed_store(written):
    store = open_store(written)
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        store.take([0])


def test_flipped_bit_names_the_record_and_leaves_the_others(written, columns):
    good = written.read_bytes()
    # Somewhere in the pixels or compressed bytes of an early record.
    damaged = bytearray(good)
    damaged[1500] ^= 4
    written.write_bytes(damaged)
    store = open_store(written)
    with pytest.raises(DataCorruptionError, match="hash mismatch") as info:
        store.take(np.arange(50))
    bad = info.value.record
    assert bad is not None and 0 < info.value.offset <= 1500
    with pytest.raises(DataCorruptionError):
        store.take([bad])
    others = np.delete(np.arange(50), bad)
    np.testing.assert_array_equal(store.take(others)["label"], columns["label"][others])
    with pytest.raises(DataCorruptionError):
        list(store.scan(20))


@pytest.mark.parametrize("keep", [0, 1, 30, 100, 5000, 65_000, 70_000, -1])
def test_truncated_file(written, keep):
    written.write_bytes(written.read_bytes()[:keep])
    with pytest.raises(DataCorruptionError, match="w.array_record"):
        open_store(written).take(np.arange(50))


@pytest.mark.parametrize("size", [100, 200_000])
def test_garbage(tmp_path, rng, size):
    path = tmp_path / "x.array_record"
    path.write_bytes(rng.bytes(size))
    with pytest.raises(DataCorruptionError, match="x.array_record"):
        open_store(path)


def test_file_without_records(write):
    with pytest.raises(DataCorruptionError, match="the file is empty"):
        open_store(write([]))


def test_failing_write_is_an_os_error(tmp_path):
    spec = {"x": ColumnSpec((), UINT8)}
    assert FORMAT.create is not None
    with pytest.raises(OSError, match="nowhere"):
        writer = FORMAT.create(
            tmp_path / "nowhere" / "x.array_record", spec, WriteOptions(None, 1)
        )
        writer.write({"x": np.zeros(1, np.uint8)})
        writer.finish()
