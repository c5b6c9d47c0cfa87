"""Arrow files and streams against pyarrow and NumPy, and damaged ones."""

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    ColumnSpec,
    ConcatStore,
    DataCorruptionError,
    DataWarning,
    Loader,
    _chunk_cache,
    open_store,
)
from jaxaccel.data import _arrow_fields as fields
from jaxaccel.data._arrow import ArrowWriter
from jaxaccel.data._formats import WriteOptions
from jaxaccel.data._sidecar import sidecar_path, write_checksums

N = 50
COLUMNS = {
    "image": ((4, 3, 3), np.uint8),
    "label": ((), np.uint8),
    "wide": ((5,), np.uint16),
    "half": ((2, 2), np.float16),
    "scalar_half": ((), np.float16),
    "mask": ((3,), np.bool_),
    "flag": ((), np.bool_),
    "big": ((), np.int64),
    "double": ((2,), np.float64),
}


@pytest.fixture
def columns(rng):
    return {
        name: rng.integers(0, 256, (N, *shape)).astype(dtype)
        if dtype != np.bool_
        else rng.integers(0, 2, (N, *shape)).astype(bool)
        for name, (shape, dtype) in COLUMNS.items()
    }


def spec_of(columns):
    return {name: ColumnSpec(x.shape[1:], x.dtype) for name, x in columns.items()}


def write(path, columns, compression=None, step=7):
    writer = ArrowWriter(path, spec_of(columns), WriteOptions(compression, N))
    for start in range(0, N, step):
        writer.write({name: x[start : start + step] for name, x in columns.items()})
    writer.finish()
    return path


@pytest.fixture
def small_batches(monkeypatch):
    # About 16 examples in a record batch.
    monkeypatch.setattr(fields, "_CHUNK_BYTES", 16 * 96)


def assert_reads(store, columns):
    assert dict(store.spec) == spec_of(columns)
    for rows in (
        np.arange(N),
        np.arange(13, 37),
        np.array([49, 0, 17, 17, 48, 3, 16, 15]),
        np.array([20]),
        np.array([], np.int64),
    ):
        batch = store.take(rows)
        for name, array in columns.items():
            assert batch[name].dtype == array.dtype and batch[name].flags.writeable
            np.testing.assert_array_equal(batch[name], array[rows], err_msg=name)
    parts = list(store.scan(11))
    for name, array in columns.items():
        whole = np.concatenate([part[name] for part in parts])
        np.testing.assert_array_equal(whole, array, err_msg=name)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("checksums", [True, False])
def test_what_is_written_is_read(
    tmp_path, columns, small_batches, compression, checksums
):
    path = write(tmp_path / "x.arrow", columns, compression)
    with open_store(path, checksums=checksums) as store:
        assert_reads(store, columns)
        # Again, now that all checksums were compared.
        assert_reads(store, columns)


def test_pyarrow_reads_what_is_written(tmp_path, columns):
    with pa.memory_map(str(write(tmp_path / "x.feather", columns))) as file:
        table = pa.ipc.open_file(file).read_all()
    assert table.num_rows == N
    image = table["image"].combine_chunks()
    np.testing.assert_array_equal(image.to_numpy_ndarray(), columns["image"])
    np.testing.assert_array_equal(table["label"].to_numpy(), columns["label"])
    np.testing.assert_array_equal(table["flag"].to_numpy(), columns["flag"])


def test_the_file_does_not_depend_on_the_batches_written(tmp_path, columns):
    one = write(tmp_path / "a.arrow", columns, step=N)
    many = write(tmp_path / "b.arrow", columns, step=3)
    assert one.read_bytes() == many.read_bytes()


def foreign(path, table, *, stream=False, compression=None, rows=16):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def lists(x):
    array = pa.array(x.reshape(-1))
    for size in x.shape[:0:-1]:
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_layouts_of_others(tmp_path, rng, stream, compression):
    image = rng.integers(0, 256, (N, 8, 6, 3), dtype=np.uint8)
    small = rng.integers(0, 256, (N, 2, 3), dtype=np.uint16)
    bits = rng.integers(0, 2, (N, 3)).astype(bool)
    names = rng.integers(0, 3, N)
    blobs = [png(pixels) for pixels in image]
    table = pa.table(
        {
            "caption": [f"number {i}" for i in range(N)],
            "nested": lists(small),
            "fixed": pa.array([x.tobytes() for x in small], pa.binary(12)),
            "raw": pa.array([x.tobytes() for x in small], pa.binary()),
            "large": pa.array([x.tobytes() for x in small], pa.large_binary()),
            "png": pa.array(blobs, pa.binary()),
            # Fields before and after the bytes, as their order is not fixed.
            "struct": pa.array(
                [{"path": "a.png", "bytes": blob, "size": [1]} for blob in blobs]
            ),
            "bits": lists(bits),
            "class": pa.DictionaryArray.from_arrays(
                pa.array(names, pa.int8()), ["ant", "bee", "cat"]
            ),
        }
    )
    path = foreign(tmp_path / "x.arrow", table, stream=stream, compression=compression)
    pixels = ColumnSpec((2, 3), np.dtype(np.uint16))
    decoded = ColumnSpec((8, 6, 3), np.dtype(np.uint8))
    wanted = {
        "class": ColumnSpec((), np.dtype(np.int8)),
        "struct": decoded,
        "png": decoded,
        "nested": pixels,
        "fixed": pixels,
        "raw": pixels,
        "large": pixels,
        "bits": ColumnSpec((3,), np.dtype(bool)),
    }
    expected = {
        "class": names.astype(np.int8),
        "struct": image,
        "png": image,
        **dict.fromkeys(["nested", "fixed", "raw", "large"], small),
        "bits": bits,
    }
    store = open_store(path, columns=wanted)
    assert list(store.spec) == list(wanted)
    assert_reads(store, expected)


def test_encoded_images_are_resized_and_become_gray(tmp_path, rng):
    blobs = [
        png(rng.integers(0, 256, (height, 8, 3), dtype=np.uint8)) for height in (8, 10)
    ]
    path = foreign(tmp_path / "x.arrow", pa.table({"image": blobs}))
    store = open_store(path, image_size=(4, 4), image_mode="L")
    assert store.take([0, 1])["image"].shape == (2, 4, 4, 1)
    with pytest.raises(ValueError, match="image_size"):
        open_store(path).take([0, 1])


def test_a_shape_may_be_given_to_flat_numbers(tmp_path, rng):
    flat = rng.integers(0, 9, (N, 6))
    path = foreign(tmp_path / "x.arrow", pa.table({"x": lists(flat)}))
    spec = ColumnSpec((3, 2), np.dtype(np.int64))
    store = open_store(path, columns={"x": spec})
    np.testing.assert_array_equal(store.take([4])["x"], flat[[4]].reshape(1, 3, 2))
    narrow = ColumnSpec((3, 2), np.dtype(np.uint8))
    store = open_store(path, columns={"x": narrow})
    np.testing.assert_array_equal(store.take([4])["x"], flat[[4]].reshape(1, 3, 2))
    wrong = ColumnSpec((3, 2), np.dtype(np.float32))
    with pytest.raises(ValueError, match=r"holds int64\[6\], not ColumnSpec"):
        open_store(path, columns={"x": wrong})


REFUSED = {
    "nulls": (pa.array([1, None]), "missing.*fill them"),
    "nulls below": (
        pa.array([[1, 2], [3, None]], pa.list_(pa.int8(), 2)),
        "missing.*fill them",
    ),
    "lists": (pa.array([[1], [2, 3]]), "fixed_size_list, or pad"),
    "text": (pa.array(["a", "b"]), "encode it as integers, or as a dictionary"),
    "number dictionary": (pa.array([5, 6]).dictionary_encode(), "values themselves"),
    "time": (pa.array([0, 1], pa.timestamp("s")), "cast it to integers"),
    "fixed bytes": (
        pa.array([b"ab", b"cd"], pa.binary(2)),
        "unknown meaning.*columns=",
    ),
    "bytes": (pa.array([b"ab", b"cd"]), "no JPEG or PNG.*columns="),
    "struct": (pa.array([{"a": 1}, {"a": 2}]), "columns of their own"),
    "view": (pa.array(["a", "b"], pa.string_view()), "oldest"),
    "empty lists": (pa.array([[], []], pa.list_(pa.int8(), 0)), "empty lists"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_read_is_refused_with_a_remedy(tmp_path, kind):
    array, words = REFUSED[kind]
    path = foreign(tmp_path / "x.arrow", pa.table({"bad": array}))
    with pytest.raises(ValueError, match=words) as caught:
        open_store(path)
    assert str(path) in str(caught.value)
    assert not isinstance(caught.value, DataCorruptionError)


def test_a_refusal_says_how_to_read_the_rest(tmp_path):
    table = pa.table({"text": ["a", "b"], "label": pa.array([3, 4], pa.uint8())})
    path = foreign(tmp_path / "x.arrow", table)
    with pytest.raises(ValueError) as caught:
        open_store(path)
    advice = "columns={'label': ColumnSpec((), np.dtype('uint8'))}"
    assert advice in str(caught.value)
    columns = {"label": ColumnSpec((), np.dtype("uint8"))}
    assert open_store(path, columns=columns).take([1])["label"].tolist() == [4]


def test_wrong_requests_name_the_columns(tmp_path):
    path = foreign(tmp_path / "x.arrow", pa.table({"a": [b"xy", b"z"], "b": [1, 2]}))
    number = ColumnSpec((), np.dtype(np.int64))
    with pytest.raises(ValueError, match=r"columns named 'c'.*\['a', 'b'\]"):
        open_store(path, columns={"c": number})
    spec = ColumnSpec((2,), np.dtype(np.uint8))
    store = open_store(path, columns={"a": spec})
    assert store.take([0])["a"].tolist() == [[120, 121]]
    with pytest.raises(ValueError, match="record 1 of column 'a' has 1 bytes"):
        store.take([0, 1])
    with pytest.raises(ValueError, match="2 in the first example.*not a ColumnSpec"):
        open_store(path, columns={"a": number})


def test_a_dictionary_that_changes_is_refused(tmp_path):
    schema = pa.schema({"x": pa.dictionary(pa.int8(), pa.string())})
    path = tmp_path / "x.arrow"
    with pa.ipc.new_stream(str(path), schema) as writer:
        for words in (["a", "b"], ["c", "d"]):
            array = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), words)
            writer.write_batch(pa.record_batch([array], schema=schema))
    with pytest.raises(ValueError, match="no fixed meaning"):
        open_store(path)


def dictionary(path, words, *, stream=False, compression=None, name="label"):
    array = pa.array(words).dictionary_encode()
    lists = pa.FixedSizeListArray.from_arrays(array, 1)
    table = pa.table({"image": pa.array([7, 8], pa.uint8()), name: array, "x": lists})
    return foreign(path, table, stream=stream, compression=compression)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_dictionaries_must_agree_between_shards(tmp_path, stream, compression):
    how = {"stream": stream, "compression": compression}
    paths = [tmp_path / f"s-0000{i}-of-00002.arrow" for i in range(2)]
    dictionary(paths[0], ["cat", "dog"], **how)
    dictionary(paths[1], ["dog", "emu"], **how)
    with pytest.raises(ValueError, match=r"'cat', 'dog'\] in part 0.*'dog', 'emu'"):
        open_store(tmp_path / "s-*-of-00002.arrow")
    # Parts of them, and read as another integer, are no better.
    label = {"label": ColumnSpec((), np.dtype(np.uint8))}
    parts = [open_store(path, columns=label)[1:] for path in paths]
    with pytest.raises(ValueError, match="mean the same"):
        ConcatStore(parts)
    image = {"image": ColumnSpec((), np.dtype(np.uint8))}
    assert len(open_store(tmp_path / "s-*-of-00002.arrow", columns=image)) == 4
    dictionary(paths[1], ["cat", "dog"], **how)
    store = open_store(tmp_path / "s-*-of-00002.arrow")
    assert store.take(np.arange(4))["label"].tolist() == [0, 1, 0, 1]
    assert store.class_names == ("cat", "dog")
    assert pickle.loads(pickle.dumps(store)).class_names == ("cat", "dog")


def test_a_dictionary_of_another_column_is_no_list_of_classes(tmp_path):
    for i, words in enumerate((["a", "b"], ["b", "c"])):
        dictionary(tmp_path / f"{i}.arrow", words, name="split")
    parts = [open_store(tmp_path / f"{i}.arrow") for i in range(2)]
    assert [part.class_names for part in parts] == [None, None]
    with pytest.raises(ValueError, match="dictionary of column 'split'"):
        ConcatStore(parts)


def test_class_names_must_agree_between_parts():
    parts = [ArrayStore({"label": np.arange(2)}) for _ in range(3)]
    parts[0].class_names, parts[2].class_names = ("cat", "dog"), ("dog", "emu")
    assert len(ConcatStore(parts[:2])) == 4
    with pytest.raises(ValueError, match="class_names is .*emu.* in part 2"):
        ConcatStore(parts)


def test_no_example_and_the_old_format(tmp_path):
    path = foreign(tmp_path / "x.arrow", pa.table({"x": pa.array([], pa.int8())}))
    with pytest.raises(ValueError, match="holds no example"):
        open_store(path)
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(60))
    with pytest.raises(ValueError, match="old.feather"):
        open_store(tmp_path / "old.feather")


def test_a_pickled_store_refers_to_its_file(tmp_path, columns, small_batches):
    for name, compression in (("a.arrow", None), ("b.arrow", "zstd")):
        path = write(tmp_path / name, columns, compression)
        store = open_store(path)
        content = pickle.dumps(store)
        assert len(content) < 2000
        again = pickle.loads(content)
        assert again.fingerprint() == store.fingerprint()
        assert_reads(again, columns)
        sidecar_path(path).unlink()
        path.write_bytes(path.read_bytes() + b"!")
        with pytest.raises(ValueError, match="was changed since"):
            pickle.loads(content)


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_threads_may_read_at_once(tmp_path, columns, small_batches, compression):
    store = open_store(write(tmp_path / "x.arrow", columns, compression))

    def read(seed):
        rows = np.random.default_rng(seed).permutation(N)
        return rows, store.take(rows)["image"]

    with ThreadPoolExecutor(4) as pool:
        for rows, images in pool.map(read, range(24)):
            np.testing.assert_array_equal(images, columns["image"][rows])


def test_a_loader_reads_it(tmp_path, columns):
    path = write(tmp_path / "x.arrow", {"label": columns["label"]})
    with Loader(open_store(path), BatchPlan(N, 10, epochs=1)) as loader:
        labels = np.concatenate([batch["label"] for batch in loader])
    np.testing.assert_array_equal(np.sort(labels), np.sort(columns["label"]))


def test_scans_decode_each_batch_once_and_random_reads_warn(
    tmp_path, columns, small_batches, monkeypatch
):
    monkeypatch.setattr(_chunk_cache, "CACHE_BYTES", 1000)
    store: Any = open_store(write(tmp_path / "x.arrow", columns, "zstd"))
    loaded, load = [], store._load
    monkeypatch.setattr(
        store, "_load", lambda chunk: loaded.append(chunk) or load(chunk)
    )
    assert sum(len(batch["label"]) for batch in store.scan(5)) == N
    assert loaded == list(range(len(loaded))) and len(loaded) > 2
    with pytest.warns(DataWarning, match="random order.*convert") as caught:
        for _ in range(2):
            batch = store.take([49, 0, 30])
    assert len(caught) == 1
    np.testing.assert_array_equal(batch["image"], columns["image"][[49, 0, 30]])
    assert len(store._cache) == 1


def test_everything_that_fits_stays_decoded(tmp_path, columns, small_batches):
    store: Any = open_store(write(tmp_path / "x.arrow", columns, "zstd"))
    store.take(np.arange(N))
    chunks = len(store._cache)
    assert chunks > 2
    store.take(np.arange(N)[::-1])
    assert len(store._cache) == chunks
    store.close()
    assert not store._cache


def test_a_batch_that_does_not_fit_the_announcement(tmp_path, columns):
    writer = ArrowWriter(tmp_path / "x.arrow", spec_of(columns), WriteOptions(None, N))
    with pytest.raises(ValueError, match="column 'label' must be uint8"):
        writer.write({**columns, "label": columns["label"].astype(np.int64)})
    with pytest.raises(ValueError, match="different lengths"):
        writer.write({**columns, "label": columns["label"][:5]})
    writer.abort()
    writer.abort()
    assert not sidecar_path(tmp_path / "x.arrow").exists()
    empty = {"x": ColumnSpec((0, 3), np.dtype(np.uint8))}
    with pytest.raises(ValueError, match="hold nothing"):
        ArrowWriter(tmp_path / "y.arrow", empty, WriteOptions(None, N))


def damaged(path):
    with pytest.raises(DataCorruptionError) as caught:
        store = open_store(path)
        store.take(np.arange(len(store)))
    assert caught.value.path == str(path)
    assert 0 <= caught.value.offset <= max(path.stat().st_size, 1)
    return caught.value


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("stream", [False, True])
def test_truncation_is_noticed_without_checksums(
    tmp_path, columns, small_batches, compression, stream
):
    path = write(tmp_path / "x.arrow", columns, compression)
    sidecar_path(path).unlink()
    if stream:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_file(file).read_all()
        foreign(path, table, stream=True, compression=compression)
    content = path.read_bytes()
    for size in {0, 1, 7, 8, 20, *range(64, len(content), 397), len(content) - 1}:
        path.write_bytes(content[:size])
        damaged(path)
    path.write_bytes(content + bytes(8))
    damaged(path)


def test_every_flipped_bit_is_noticed_with_checksums(
    tmp_path, columns, small_batches, rng
):
    for name, compression in (("a.arrow", None), ("b.arrow", "lz4")):
        path = write(tmp_path / name, columns, compression)
        content = path.read_bytes()
        for position in rng.integers(0, len(content), 25):
            spoiled = bytearray(content)
            spoiled[position] ^= 1 << rng.integers(8)
            path.write_bytes(spoiled)
            damaged(path)


def test_a_flipped_pixel_names_its_example(tmp_path, rng):
    # Larger than a block of the checksums.
    image = rng.integers(0, 256, (N, 64, 64, 3), dtype=np.uint8)
    path = write(tmp_path / "x.arrow", {"image": image})
    content = bytearray(path.read_bytes())
    position = content.index(image[30].tobytes()) + 7000
    content[position] ^= 1
    path.write_bytes(content)
    store = open_store(path)
    np.testing.assert_array_equal(store.take([0, 2])["image"], image[[0, 2]])
    with pytest.raises(DataCorruptionError, match="checksum") as caught:
        store.take([2, 30])
    assert caught.value.record == 30
    assert caught.value.offset <= position < caught.value.offset + (1 << 16)
    unchecked = open_store(path, checksums=False).take([30])["image"]
    assert np.count_nonzero(unchecked != image[[30]]) == 1


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_absurd_metadata_is_noticed_without_checksums(
    tmp_path, columns, small_batches, rng, compression
):
    path = write(tmp_path / "x.arrow", columns, compression)
    sidecar_path(path).unlink()
    content = path.read_bytes()
    footer = len(content) - 10 - int.from_bytes(content[-10:-6], "little")
    outcomes = []
    for _ in range(60):
        # In the footer, or in the schema or a batch's metadata at the beginning.
        position = int(
            rng.choice([rng.integers(footer, len(content)), rng.integers(1200)])
        )
        spoiled = bytearray(content)
        spoiled[position : position + 4] = b"\xff\xff\xff\x7f"
        path.write_bytes(spoiled[: len(content)])
        try:
            store = open_store(path)
            store.take(np.arange(min(len(store), N)))
        except DataCorruptionError as error:
            outcomes.append(error)
        except ValueError as error:
            assert str(path) in str(error)
    assert len(outcomes) > 20


def test_damaged_offsets_and_images_name_the_example(tmp_path, rng):
    blobs = [png(x) for x in rng.integers(0, 256, (8, 6, 6, 3), dtype=np.uint8)]
    path = foreign(tmp_path / "x.arrow", pa.table({"image": blobs}))
    content = path.read_bytes()
    ends = np.cumsum([0, *map(len, blobs)]).astype("<i4").tobytes()
    absurd = content.replace(ends, ends[:16] + b"\xff\xff\xff\x7f" + ends[20:])
    assert absurd != content
    path.write_bytes(absurd)
    with pytest.raises(DataCorruptionError, match="an example at bytes") as caught:
        open_store(path).take([0, 4])
    assert caught.value.record == 4
    spoiled = bytearray(content)
    start = content.index(blobs[5])
    spoiled[start + 40 : start + 60] = bytes(20)
    path.write_bytes(spoiled)
    with pytest.raises(DataCorruptionError, match="cannot be decoded") as caught:
        open_store(path).take([1, 5])
    assert (caught.value.record, caught.value.offset) == (5, start)


def test_checksums_of_files_by_others(tmp_path, rng):
    x = rng.integers(0, 256, (N, 2000), dtype=np.uint8)
    path = foreign(tmp_path / "x.arrow", pa.table({"x": lists(x)}), stream=True)
    write_checksums(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert "checksum" in damaged(path).reason


def test_shards_are_found_by_content(tmp_path, columns):
    parts = {name: np.split(x, [20]) for name, x in columns.items()}
    for index in range(2):
        part = {name: halves[index] for name, halves in parts.items()}
        writer = ArrowWriter(
            tmp_path / f"train-{index}-of-2.data",
            spec_of(part),
            WriteOptions(["zstd", None][index], len(part["label"])),
        )
        writer.write(part)
        writer.finish()
    assert_reads(open_store(tmp_path / "train-*-of-2.data"), columns)
