"""Integers in the width that was asked for: the same in all formats, and checked."""

import pickle

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    ColumnSpec,
    Loader,
    convert,
    open_store,
)

N = 20
SUFFIXES = {
    "npy": "",
    "arrow": ".arrow",
    "parquet": ".parquet",
    "tfrecord": ".tfrecord",
    "array_record": ".array_record",
    "tar": ".tar",
}


def narrow(**shapes):
    return {n: ColumnSpec(shape, np.dtype(np.uint8)) for n, shape in shapes.items()}


@pytest.fixture(scope="module")
def columns():
    rng = np.random.default_rng(0)
    return {
        "label": rng.integers(0, 256, N),
        "token": rng.integers(0, 256, (N, 3), dtype=np.int32),
        "score": rng.standard_normal(N).astype(np.float32),
    }


@pytest.fixture(scope="module")
def written(columns, tmp_path_factory):
    """Files of each format, with a value that fits and with some that do not."""
    folder = tmp_path_factory.mktemp("integers")
    wide = {name: x.copy() for name, x in columns.items()}
    wide["label"][13], wide["token"][7, 1] = 256, -1
    for name, suffix in SUFFIXES.items():
        convert(columns, folder / f"{name}{suffix}", format=name, progress=False)
        convert(wide, folder / f"{name}_wide{suffix}", format=name, progress=False)
    return folder


@pytest.fixture(params=SUFFIXES)
def name(request):
    return request.param


def test_integers_are_narrowed(written, columns, name):
    path = written / f"{name}{SUFFIXES[name]}"
    with open_store(path, columns=narrow(label=(), token=(3,))) as store:
        assert dict(store.spec) == narrow(label=(), token=(3,))
        rows = np.array([19, 0, 3, 3])
        for batch, chosen in [
            (store.take(rows), rows),
            (store[5:].take([1]), np.array([6])),
            *((b, np.arange(6 * i, min(N, 6 * i + 6))) for i, b in
              enumerate(store.scan(6))),
        ]:  # fmt: skip
            for column, array in batch.items():
                assert array.dtype == np.uint8
                np.testing.assert_array_equal(array, columns[column][chosen])
        assert store.take([])["token"].shape == (0, 3)
        copy = pickle.loads(pickle.dumps(store))
        assert copy.fingerprint() == store.fingerprint()
        assert copy.spec == store.spec
        copy.close()
    with open_store(path) as whole:
        assert whole.fingerprint() != store.fingerprint()
        assert whole.spec["label"].dtype == np.int64


def test_a_value_that_does_not_fit_is_an_error(written, name):
    path = written / f"{name}_wide{SUFFIXES[name]}"
    with open_store(path, columns=narrow(label=())) as store:
        assert len(store.take([12, 14])["label"]) == 2
        with pytest.raises(
            ValueError, match="label.* 13 .*256, outside uint8"
        ) as error:
            store.take([2, 13])
        assert path.name in str(error.value)
        with pytest.raises(ValueError, match="label.* 13 .*256, outside uint8"):
            list(store.scan(5))
    with open_store(path, columns=narrow(token=(3,))) as store:
        with pytest.raises(ValueError, match="token.* 7 .*-1, outside uint8"):
            store.take([7])


def test_nothing_else_is_cast(written, name):
    path = written / f"{name}{SUFFIXES[name]}"
    for column, shape, dtype in [("label", (2,), "uint8"), ("score", (), "uint8"),
                                 ("token", (2,), "uint8")]:  # fmt: skip
        with pytest.raises(ValueError, match=column):
            open_store(path, columns={column: ColumnSpec(shape, np.dtype(dtype))})
    with pytest.raises(ValueError, match="nothing"):
        open_store(path, columns=narrow(nothing=()))
    with pytest.raises(ValueError, match="names no column"):
        open_store(path, columns={})


def test_convert_narrows(written, columns, name, tmp_path):
    path = written / f"{name}{SUFFIXES[name]}"
    store = convert(path, tmp_path / "x", columns=narrow(label=()), progress=False)
    assert dict(store.spec) == narrow(label=())
    np.testing.assert_array_equal(np.load(tmp_path / "x" / "label.npy"),
                                  columns["label"])  # fmt: skip
    path = written / f"{name}_wide{SUFFIXES[name]}"
    with pytest.raises(ValueError, match="256, outside uint8"):
        convert(path, tmp_path / "y.arrow", columns=narrow(label=()), progress=False)
    assert not (tmp_path / "y.arrow").exists()


@pytest.mark.parametrize("write", [pq.write_table, pyarrow.feather.write_feather])
def test_files_of_others(tmp_path, write):
    labels = np.arange(N) % 10
    fields = {"label": pa.array(labels), "code": pa.array(labels, pa.uint64())}
    write(pa.table(fields), tmp_path / "x")
    wanted = {
        "label": ColumnSpec((), np.dtype(np.uint8)),
        "code": ColumnSpec((), np.dtype(np.int16)),
    }
    with open_store(tmp_path / "x", columns=wanted) as store:
        # No warning of wide labels, which is an error here.
        with Loader(store, BatchPlan(N, 5, epochs=1, shuffle=False)) as loader:
            batch = next(loader)
    assert [str(batch[name].dtype) for name in wanted] == ["uint8", "int16"]
    assert batch["label"].tolist() == batch["code"].tolist() == [0, 1, 2, 3, 4]


def test_arrays_and_mappings(columns, tmp_path):
    np.save(tmp_path / "token.npy", columns["token"])
    mapping = {**columns, "token": tmp_path / "token.npy"}
    store = open_store(mapping, columns=narrow(token=(3,), label=()))
    assert list(store.spec) == ["token", "label"]
    np.testing.assert_array_equal(store.take([4])["token"], columns["token"][[4]])
    # Wider is a width, too; what is there already needs nothing around it.
    store = open_store(columns, columns={"token": ColumnSpec((3,), np.dtype("int64"))})
    assert store.take([4])["token"].dtype == np.int64
    same = open_store(columns, columns={"token": ColumnSpec((3,), np.dtype("int32"))})
    assert isinstance(same, ArrayStore)
    # Where a comparison as floats would err.
    large = {"x": np.array([2**63 - 1, 2**63, 0], np.uint64)}
    store = open_store(large, columns={"x": ColumnSpec((), np.dtype(np.int64))})
    assert store.take([0])["x"].tolist() == [2**63 - 1]
    with pytest.raises(ValueError, match="record 1 is 9223372036854775808, outside"):
        store.take([0, 1])


def test_shards_name_their_own_records(columns, tmp_path):
    wide = {"label": np.where(np.arange(N) == 13, 999, columns["label"])}
    convert(wide, tmp_path / "x.arrow", shards=2, progress=False)
    store = open_store(tmp_path / "x-*-of-00002.arrow", columns=narrow(label=()))
    with pytest.raises(ValueError, match="x-00001-of-00002.arrow.*record 3 is 999"):
        store.take(np.arange(N))


def test_the_labels_of_a_folder_of_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number in range(2):
        (tmp_path / f"class{number}").mkdir()
        image.new("L", (3, 3)).save(tmp_path / f"class{number}" / "x.png")
    store = open_store(tmp_path, columns={"label": ColumnSpec((), np.dtype(np.int32))})
    batch = store.take([1])
    assert batch["label"].dtype == np.int32 and batch["label"].tolist() == [1]
    assert store.class_names == ("class0", "class1")
