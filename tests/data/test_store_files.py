"""Reading .npy and IDX files, and noticing damaged ones."""

import gzip
import pickle
import struct

import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    ColumnSpec,
    DataCorruptionError,
    convert,
    open_store,
)
from jaxaccel.data._open import FORMATS

IDX_CODES = {
    0x08: ">u1",
    0x09: ">i1",
    0x0B: ">i2",
    0x0C: ">i4",
    0x0D: ">f4",
    0x0E: ">f8",
}


def idx_bytes(array, code=0x08):
    header = bytes([0, 0, code, array.ndim])
    header += b"".join(struct.pack(">I", n) for n in array.shape)
    return header + array.astype(IDX_CODES[code]).tobytes()


@pytest.fixture
def images(rng):
    return rng.integers(0, 256, (7, 4, 3), dtype=np.uint8)


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("code", IDX_CODES)
@pytest.mark.parametrize("compressed", [False, True])
def test_every_idx_type_is_read_in_native_byte_order(write, rng, code, compressed):
    values = rng.integers(-100, 100, (5, 3)).astype(IDX_CODES[code])
    content = idx_bytes(values, code)
    path = write("x-ubyte", gzip.compress(content) if compressed else content)
    store = open_store({"x": path})
    batch = store.take([3, 0, 3])["x"]
    assert batch.dtype == np.dtype(IDX_CODES[code]).newbyteorder("=")
    assert batch.dtype.isnative and store.spec["x"].dtype == batch.dtype
    np.testing.assert_array_equal(batch, values[[3, 0, 3]])


def test_gzip_with_two_members_is_read_as_one(write, images):
    content = idx_bytes(images)
    path = write("a.gz", gzip.compress(content[:30]) + gzip.compress(content[30:]))
    np.testing.assert_array_equal(open_store(path).take([6])["image"], images[[6]])


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.uint8, ">u2", np.float16, bool])
def test_npy_is_memory_mapped_and_named_after_its_file(tmp_path, rng, order, dtype):
    array = rng.integers(0, 2, (6, 2, 5)).astype(dtype, order=order)
    np.save(tmp_path / "picture.npy", array)
    store = open_store(tmp_path / "picture.npy")
    assert isinstance(store, ArrayStore)
    assert isinstance(store.columns["picture"].base, np.memmap)
    assert store.take([5, 1])["picture"].dtype.isnative
    np.testing.assert_array_equal(store.take([5, 1])["picture"], array[[5, 1]])


def test_folder_and_single_idx_files(tmp_path, images):
    np.save(tmp_path / "image.npy", images)
    np.save(tmp_path / "label.npy", np.arange(7, dtype=np.uint8))
    assert set(open_store(tmp_path).spec) == {"image", "label"}
    (tmp_path / "t-ubyte").write_bytes(idx_bytes(images))
    (tmp_path / "l-ubyte").write_bytes(idx_bytes(np.arange(7)))
    assert set(open_store(tmp_path / "t-ubyte").spec) == {"image"}
    assert set(open_store(tmp_path / "l-ubyte").spec) == {"label"}


def flip(content, position):
    damaged = bytearray(content)
    damaged[position] ^= 0x10
    return bytes(damaged)


RECORD = 12
HEADER = 16
SIZE = HEADER + 7 * RECORD

# name -> (damage to the content of an IDX file, record, offset, words)
IDX_DAMAGE = {
    "empty": (lambda c: b"", None, 0, "empty"),
    "truncated": (lambda c: c[:-5], 6, SIZE - 5, f"{SIZE} bytes, found {SIZE - 5}"),
    "cut at a record": (lambda c: c[:-24], 5, SIZE - 24, "truncated"),
    "trailing": (lambda c: c + b"!", 7, SIZE, f"{SIZE} bytes, found {SIZE + 1}"),
    "cut header": (lambda c: c[:9], None, 9, "header needs 16 bytes, found 9"),
    "wrong type": (lambda c: flip(c, 2), None, 0, "IDX type code"),
    "absurd length": (
        lambda c: c[:4] + b"\xff" * 12 + c[16:],
        None,
        SIZE,
        "truncated",
    ),
    "absurd rank": (lambda c: c[:3] + b"\xff" + c[4:], None, 3, "claims 255 axes"),
}


@pytest.mark.parametrize("damage", IDX_DAMAGE)
def test_damaged_idx_is_reported_with_its_place(write, images, damage):
    spoil, record, offset, words = IDX_DAMAGE[damage]
    path = write("x-ubyte", spoil(idx_bytes(images)))
    with pytest.raises(DataCorruptionError, match=words) as caught:
        open_store({"image": path})
    assert caught.value.path == str(path)
    assert caught.value.offset == offset
    if record is not None:
        assert caught.value.record == record
    assert "x-ubyte" in str(caught.value) and "etch it again" in str(caught.value)


GZIP_DAMAGE = {
    "truncated": (lambda c: gzip.compress(c)[:-12], "truncated gzip"),
    "no checksum": (lambda c: gzip.compress(c)[:-8], "truncated gzip"),
    "wrong checksum": (lambda c: flip(gzip.compress(c), -6), "damaged gzip"),
    "flipped bit": (lambda c: flip(gzip.compress(c), 60), "damaged gzip|truncated"),
    "garbage": (lambda c: gzip.compress(c) + b"garbage", "damaged gzip"),
    "zeros": (lambda c: gzip.compress(c) + b"\0\0\0", "damaged gzip|truncated"),
    "trailing content": (lambda c: gzip.compress(c + b"!"), "after the data"),
    "short content": (lambda c: gzip.compress(c[:-1]), "truncated"),
    "not IDX": (lambda c: gzip.compress(b"hello" * 9), "not IDX content"),
    "empty content": (lambda c: gzip.compress(b""), "not IDX content"),
    "absurd length": (
        lambda c: gzip.compress(c[:4] + b"\x7f" * 12 + c[16:]),
        "at most",
    ),
}


@pytest.mark.parametrize("damage", GZIP_DAMAGE)
def test_damaged_gzip_is_reported(write, images, damage):
    spoil, words = GZIP_DAMAGE[damage]
    path = write("x-ubyte.gz", spoil(idx_bytes(images)))
    with pytest.raises(DataCorruptionError, match=words) as caught:
        open_store({"image": path})
    assert caught.value.path == str(path)


def test_a_gzip_bomb_stops_at_the_promised_size(write, images):
    content = idx_bytes(images) + b"\0" * (64 << 20)
    path = write("x-ubyte.gz", gzip.compress(content, 1))
    with pytest.raises(DataCorruptionError, match="after the data"):
        open_store({"image": path})


NPY_DAMAGE = {
    "truncated": (lambda c: c[:-3], 6, "truncated"),
    "trailing": (lambda c: c + b"!", 7, "bytes after the data"),
    "cut header": (lambda c: c[:40], None, "header"),
    "version": (lambda c: c[:6] + b"\x09" + c[7:], None, "version"),
    "not npy": (lambda c: b"hello world", None, "not a .npy"),
    "pickle": (lambda c: pickle.dumps([1, 2]), None, "not a .npy"),
    "absurd length": (
        lambda c: c.replace(b"(7, ", b"(7777777777, ", 1),
        None,
        "trunc|h",
    ),
}


@pytest.mark.parametrize("damage", NPY_DAMAGE)
def test_damaged_npy_is_reported(tmp_path, images, damage):
    spoil, record, words = NPY_DAMAGE[damage]
    path = tmp_path / "image.npy"
    np.save(path, images)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(DataCorruptionError, match=words) as caught:
        open_store(path)
    assert caught.value.path == str(path)
    if record is not None:
        assert caught.value.record == record


def test_pickled_objects_are_never_loaded(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="pickled Python objects.*never"):
        open_store(tmp_path / "a.npy")


def test_other_bad_paths(tmp_path, write):
    with pytest.raises(FileNotFoundError, match="no data file or folder at .*gone.npy"):
        open_store(tmp_path / "gone.npy")
    with pytest.raises(ValueError, match="holds no <column>.npy"):
        open_store(tmp_path)
    notes = write("notes.txt", b"hello")
    with pytest.raises(ValueError, match="a .npy or IDX file.*open_store"):
        open_store({"label": notes})
    with pytest.raises(
        ValueError, match="no known format: it starts with b'hello'"
    ) as e:
        open_store(notes)
    assert "format=" in str(e.value) and ".gz" not in str(e.value)
    for name in FORMATS:
        assert repr(name) in str(e.value)
    with pytest.raises(DataCorruptionError, match="is empty"):
        open_store(write("nothing.txt", b""))


def test_the_exception_survives_pickling():
    error = DataCorruptionError("a.npy", 3, 152, "too short")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.path, copy.record, copy.offset, str(copy)) == (
        "a.npy",
        3,
        152,
        str(error),
    )


@pytest.mark.parametrize("files", [("a.arrow", "b.parquet"), ("x.npy", "a.arrow")])
def test_folders_of_several_formats_need_a_choice(tmp_path, files):
    values = np.arange(6)
    for name in files:
        if name.endswith("npy"):
            np.save(tmp_path / name, values)
        else:
            convert({"x": values}, tmp_path / name, progress=False).close()
    known = [{"a": "arrow", "b": "parquet", "x": "npy"}[name[0]] for name in files]
    with pytest.raises(ValueError, match="several formats.*format=") as caught:
        open_store(tmp_path)
    for name, format in zip(files, known, strict=True):
        assert f"{name} ({format})" in str(caught.value)
        store = open_store(tmp_path, format=format)
        np.testing.assert_array_equal(store.take(values)["x"], values)
    with pytest.raises(ValueError, match="no file of the format tar"):
        open_store(tmp_path, format="tar")


@pytest.mark.parametrize("name", ["npy", "arrow", "parquet", "tfrecord", "mapping"])
def test_arrays_are_not_resized(tmp_path, images, name):
    arrays = {"image": images, "label": np.arange(7)}
    label = {"label": ColumnSpec((), np.dtype(np.int64))}
    if name != "mapping":
        path = tmp_path / ("x" if name == "npy" else f"x.{name}")
        convert(arrays, path, progress=False).close()
    source = arrays if name == "mapping" else path
    with pytest.raises(ValueError, match="image_size.*resize them before"):
        open_store(source, image_size=(2, 2))  # type: ignore[call-overload]
    open_store(source, image_size=(4, 3)).close()  # type: ignore[call-overload]
    assert set(open_store(source, columns=label).spec) == {"label"}


def test_a_remedy_of_its_own_survives_pickling():
    error = DataCorruptionError("a.npy", None, 0, "too short", "Wait.")
    assert str(pickle.loads(pickle.dumps(error))).endswith("(byte offset 0). Wait.")


def test_sound_files_are_not_to_be_deleted(tmp_path, images):
    convert({"x": images}, tmp_path / "v.parquet", progress=False).close()
    with pytest.raises(ValueError, match="of the format parquet.*leave it out") as got:
        open_store(tmp_path / "v.parquet", format="arrow")
    assert "elete" not in str(got.value)
    (tmp_path / "x-0.tfrecord").write_bytes(b"")
    with pytest.raises(DataCorruptionError, match="is empty.*leave it out") as got:
        open_store(tmp_path / "x-0.tfrecord")
    assert "elete" not in str(got.value)
    convert({"x": images}, tmp_path / "x", progress=False).close()
    np.save(tmp_path / "x" / "x.npy", images + 1)
    with pytest.raises(DataCorruptionError, match="or delete x.npy.crc.npz, if"):
        open_store(tmp_path / "x").take([0])


def test_unnumbered_shards_come_in_the_order_of_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for i in (0, 2, 10, 1):
        values = {"x": np.array([i])}
        convert(values, tmp_path / f"q{i}.arrow", progress=False).close()
    for source in (tmp_path, tmp_path / "q*.arrow", "~", "~/q*.arrow"):
        assert open_store(source).take(range(4))["x"].tolist() == [0, 1, 2, 10]
    np.save(tmp_path / "y.npy", np.arange(3))
    assert open_store({"y": "~/y.npy"}).take([2])["y"].tolist() == [2]
    convert({"x": np.arange(2)}, "~/made.arrow", progress=False).close()
    assert (tmp_path / "made.arrow").is_file()
