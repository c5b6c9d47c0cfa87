"""Parquet files against pyarrow and NumPy, and damaged ones."""

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxaccel.data import (
    ColumnSpec,
    DataCorruptionError,
    DataWarning,
    _chunk_cache,
    open_store,
)
from jaxaccel.data import _arrow_fields as fields
from jaxaccel.data._formats import WriteOptions
from jaxaccel.data._parquet import ParquetWriter
from jaxaccel.data._sidecar import sidecar_path

N = 50
GROUP = 16


@pytest.fixture
def columns(rng):
    return {
        "image": rng.integers(0, 256, (N, 4, 3, 3), dtype=np.uint8),
        "label": rng.integers(0, 256, N, dtype=np.uint8),
        "wide": rng.integers(0, 65536, (N, 5), dtype=np.uint16),
        "half": rng.normal(size=(N, 2, 2)).astype(np.float16),
        "scalar_half": rng.normal(size=N).astype(np.float16),
        "mask": rng.integers(0, 2, (N, 3)).astype(bool),
        "flag": rng.integers(0, 2, N).astype(bool),
    }


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    # 16 examples of 61 bytes in a row group.
    monkeypatch.setattr(fields, "_CHUNK_BYTES", GROUP * 61)


def spec_of(columns):
    return {name: ColumnSpec(x.shape[1:], x.dtype) for name, x in columns.items()}


def write(path, columns, compression=None):
    writer = ParquetWriter(path, spec_of(columns), WriteOptions(compression, N))
    for start in range(0, N, 7):
        writer.write({name: x[start : start + 7] for name, x in columns.items()})
    writer.finish()
    return path


@pytest.mark.parametrize("compression", [None, "lz4", "snappy", "zstd"])
def test_what_is_written_is_read(tmp_path, columns, compression):
    path = write(tmp_path / "x.parquet", columns, compression)
    store = open_store(path)
    assert dict(store.spec) == spec_of(columns)
    for rows in ([49, 0, 17, 17, 48, 3], range(13, 37), [20], range(N)):
        batch = store.take(np.array(rows))
        for name, array in columns.items():
            assert batch[name].dtype == array.dtype
            np.testing.assert_array_equal(batch[name], array[list(rows)], err_msg=name)


def test_pyarrow_reads_what_is_written_in_row_groups(tmp_path, columns):
    path = write(tmp_path / "x.parquet", columns, "zstd")
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        table, metadata = file.read(), file.metadata
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert groups == [16, 16, 16, 2]
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert not metadata.row_group(0).column(0).has_dictionary_page
    np.testing.assert_array_equal(table["label"].to_numpy(), columns["label"])
    images = np.frombuffer(b"".join(table["image"].to_pylist()), np.uint8)
    np.testing.assert_array_equal(images.reshape(N, 4, 3, 3), columns["image"])


def test_layouts_of_others(tmp_path, rng):
    image = rng.integers(0, 256, (N, 8, 6, 3), dtype=np.uint8)
    blobs = []
    for pixels in image:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "png")
        blobs.append(file.getvalue())
    points = rng.normal(size=(N, 2))
    table = pa.table(
        {
            "image": pa.array([{"bytes": b, "path": None} for b in blobs]),
            "label": pa.array(range(N), pa.int64()),
            "text": ["x"] * N,
            "raw": [x.tobytes() for x in points],
            "point": pa.FixedSizeListArray.from_arrays(pa.array(points.ravel()), 2),
        }
    )
    path = tmp_path / "x.parquet"
    # The defaults of pyarrow: dictionaries, statistics, snappy.
    pq.write_table(table, path, row_group_size=GROUP)
    double = ColumnSpec((2,), np.dtype(np.float64))
    wanted = {
        "image": ColumnSpec((8, 6, 3), np.dtype(np.uint8)),
        "label": ColumnSpec((), np.dtype(np.int64)),
        "raw": double,
        "point": double,
    }
    rows = rng.permutation(N)
    batch = open_store(path, columns=wanted).take(rows)
    np.testing.assert_array_equal(batch["image"], image[rows])
    np.testing.assert_array_equal(batch["label"], rows)
    np.testing.assert_array_equal(batch["raw"], points[rows])
    np.testing.assert_array_equal(batch["point"], points[rows])
    with pytest.raises(ValueError, match="'text' holds text.*Without it"):
        open_store(path)


def test_missing_values_and_dictionaries_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    for array in (
        pa.array([1, None, 3]),
        pa.array([[1, 2], [None, 3]], pa.list_(pa.int8(), 2)),
    ):
        pq.write_table(pa.table({"x": array}), path)
        with pytest.raises(ValueError, match=r"column 'x' has missing values \(null\)"):
            open_store(path).take([0])
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"x": words}), path)
    with pytest.raises(ValueError, match="differ between row groups"):
        open_store(path)
    pq.write_table(pa.table({"x": pa.array([], pa.int8())}), path)
    with pytest.raises(ValueError, match="holds no example"):
        open_store(path)


def test_pickle_and_threads(tmp_path, columns):
    store = open_store(write(tmp_path / "x.parquet", columns, "zstd"))
    content = pickle.dumps(store)
    assert len(content) < 2000
    again = pickle.loads(content)
    assert again.fingerprint() == store.fingerprint()

    def read(seed):
        rows = np.random.default_rng(seed).permutation(N)
        return rows, again.take(rows)["image"]

    with ThreadPoolExecutor(4) as pool:
        for rows, images in pool.map(read, range(24)):
            np.testing.assert_array_equal(images, columns["image"][rows])


def test_scans_decode_each_group_once_and_random_reads_warn(
    tmp_path, columns, monkeypatch
):
    monkeypatch.setattr(_chunk_cache, "CACHE_BYTES", 1000)
    store: Any = open_store(write(tmp_path / "x.parquet", columns))
    loaded, load = [], store._load
    monkeypatch.setattr(
        store, "_load", lambda chunk: loaded.append(chunk) or load(chunk)
    )
    parts = [batch["image"] for batch in store.scan(5)]
    np.testing.assert_array_equal(np.concatenate(parts), columns["image"])
    assert loaded == [0, 1, 2, 3]
    with pytest.warns(DataWarning, match="chunks of up to 16 examples"):
        store.take([49, 0, 30])
    assert len(store._cache) == 1


def damaged(path):
    with pytest.raises(DataCorruptionError) as caught:
        store = open_store(path)
        store.take(np.arange(len(store)))
    assert caught.value.path == str(path)


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_truncation_is_noticed_without_checksums(tmp_path, columns, compression):
    path = write(tmp_path / "x.parquet", columns, compression)
    sidecar_path(path).unlink()
    content = path.read_bytes()
    for size in {0, 1, 4, 11, 12, *range(64, len(content), 397), len(content) - 1}:
        path.write_bytes(content[:size])
        damaged(path)


def test_every_flipped_bit_is_noticed_with_the_sidecar(tmp_path, columns, rng):
    path = write(tmp_path / "x.parquet", columns)
    content = path.read_bytes()
    for position in rng.integers(0, len(content), 30):
        spoiled = bytearray(content)
        spoiled[position] ^= 1 << rng.integers(8)
        path.write_bytes(spoiled)
        damaged(path)


def test_flipped_pixels_are_noticed_by_the_checksums_of_pages(tmp_path, columns):
    path = write(tmp_path / "x.parquet", columns)
    sidecar_path(path).unlink()
    content = bytearray(path.read_bytes())
    position = content.index(columns["image"][20].tobytes())
    content[position + 3] ^= 1
    path.write_bytes(content)
    store = open_store(path)
    np.testing.assert_array_equal(store.take([0])["image"], columns["image"][[0]])
    with pytest.raises(DataCorruptionError, match="x.parquet.*damaged.*CRC"):
        store.take([20])
    unchecked = open_store(path, checksums=False).take([20])["image"]
    assert np.count_nonzero(unchecked != columns["image"][[20]]) == 1


def test_absurd_metadata_is_noticed_without_the_sidecar(tmp_path, columns, rng):
    path = write(tmp_path / "x.parquet", columns, "zstd")
    sidecar_path(path).unlink()
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    noticed = 0
    for position in rng.integers(footer, len(content) - 4, 60):
        spoiled = bytearray(content)
        spoiled[position : position + 4] = b"\xff\xff\xff\x7f"
        path.write_bytes(spoiled)
        try:
            store = open_store(path)
            store.take(np.arange(min(len(store), N)))
        except DataCorruptionError:
            noticed += 1
        except ValueError as error:
            assert str(path) in str(error)
    assert noticed > 20


@pytest.mark.parametrize("embedded", [[None, None], [b"x", None]], ids=["none", "some"])
def test_images_that_are_not_in_the_file_are_explained(tmp_path, embedded):
    path = tmp_path / "x.parquet"
    images = pa.array(
        [{"bytes": each, "path": "a.jpg"} for each in embedded],
        pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    )
    pq.write_table(pa.table({"image": images, "label": pa.array([1, 2])}), path)
    with pytest.raises(ValueError, match="paths in place of images") as caught:
        open_store(path)
    assert str(caught.value).count("x.parquet") == 1
    assert "Without it: open_store(..., columns={'label'" in str(caught.value)


def test_gray_is_refused_where_nothing_is_decoded():
    images = np.zeros((4, 8, 8, 3), np.uint8)
    with pytest.raises(ValueError, match="image_mode 'L' decodes"):
        open_store({"image": images}, image_mode="L")  # type: ignore
    gray = open_store({"image": images[..., :1]}, image_mode="L")  # type: ignore
    assert gray.spec["image"].shape == (8, 8, 1)


@pytest.mark.parametrize("format", ["parquet", "arrow"])
def test_images_of_different_sizes_name_the_record(tmp_path, format):
    contents = []
    for height in (6, 6, 7):
        file = io.BytesIO()
        Image.new("RGB", (5, height)).save(file, "PNG")
        contents.append(file.getvalue())
    path, table = tmp_path / f"x.{format}", pa.table({"image": contents})
    if format == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(ValueError, match=r"different sizes.*record 2"):
        open_store(path).take([0, 1, 2])
    assert open_store(path, image_size=(4, 4)).take([2])["image"].shape == (1, 4, 4, 3)
