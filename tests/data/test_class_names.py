"""Class names go where the examples go, in formats that can hold them."""

import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxaccel.data import (
    ArrayStore,
    DataCorruptionError,
    convert,
    disk_cache,
    memory_cache,
    open_store,
    verify,
)

NAMES = ("cat", "Straße", 'a "dog"')


@pytest.fixture
def store():
    store = ArrayStore({"label": np.arange(9, dtype=np.uint8) % 3})
    store.class_names = NAMES
    return store


@pytest.mark.parametrize(
    ("name", "compression"),
    [("x", None), ("x.arrow", None), ("x.arrow", "zstd"), ("x.parquet", "zstd")],
)
def test_they_are_written_and_read(tmp_path, store, name, compression):
    path = tmp_path / name
    made = convert(store, path, compression=compression, progress=False)
    assert made.class_names == open_store(path).class_names == NAMES
    assert verify(path, progress=False).examples == 9
    assert pickle.loads(pickle.dumps(made)).class_names == NAMES
    assert made[2:].class_names == NAMES
    # From file to file.
    again = convert(path, tmp_path / "again.arrow", progress=False)
    assert again.class_names == NAMES
    if name != "x":
        many = convert(store, path, shards=2, progress=False)
        assert many.class_names == NAMES


def test_without_names_nothing_is_written(tmp_path, store):
    store.class_names = None
    for name in ("x", "x.arrow", "x.parquet", "x.tar"):
        assert convert(store, tmp_path / name, progress=False).class_names is None
    assert not list(tmp_path.rglob("*.json"))


def test_other_programs_find_them(tmp_path, store):
    convert(store, tmp_path / "x", progress=False)
    content = (tmp_path / "x" / "class_names.json").read_text(encoding="utf-8")
    assert tuple(json.loads(content)) == NAMES
    convert(store, tmp_path / "x.arrow", progress=False)
    convert(store, tmp_path / "x.parquet", progress=False)
    with pa.OSFile(str(tmp_path / "x.arrow")) as file, pa.ipc.open_file(file) as reader:
        arrow = reader.schema.metadata
    parquet = pq.read_schema(tmp_path / "x.parquet").metadata
    for metadata in (arrow, parquet):
        assert tuple(json.loads(metadata[b"jaxaccel.class_names"])) == NAMES


def test_slices_and_caches_keep_them(tmp_path, store):
    assert store[3:].class_names == NAMES
    assert memory_cache(store, max_bytes=1000).class_names == NAMES
    for _ in range(2):
        cached = disk_cache(store, tmp_path, progress=False)
        assert cached.class_names == NAMES
    # Others under the same labels are another entry.
    store.class_names = ("x", "y", "z")
    assert disk_cache(store, tmp_path, progress=False).class_names == ("x", "y", "z")
    store.class_names = None
    assert disk_cache(store, tmp_path, progress=False).class_names is None


def test_the_classes_of_a_folder_of_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for name in ("dog", "cat"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        image.new("L", (3, 3)).save(tmp_path / "pets" / name / "x.png")
    # Decoded, so through the staging area of convert.
    for name in ("x", "x.arrow"):
        store = convert(tmp_path / "pets", tmp_path / name, progress=False)
        assert store.class_names == ("cat", "dog")


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b'{"a": 1}', b'["a'])
def test_damaged_names_are_reported(tmp_path, store, content):
    convert(store, tmp_path / "x", progress=False)
    (tmp_path / "x" / "class_names.json").write_bytes(content)
    with pytest.raises(DataCorruptionError, match="class names") as caught:
        open_store(tmp_path / "x")
    assert caught.value.path.endswith("class_names.json")
    table = pa.table({"label": pa.array([1, 2], pa.uint8())})
    table = table.replace_schema_metadata({"jaxaccel.class_names": content})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataCorruptionError, match="class names"):
        open_store(tmp_path / "x.parquet")
