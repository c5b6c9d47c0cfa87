"""TFRecord files against Grain's reader, Google's protobuf, and damage."""

import io
import os
import pickle
import struct
import sys
import threading
from pathlib import Path
from typing import Any

import google_crc32c
import grain
import hypothesis
import numpy as np
import PIL.Image
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import strategies as st

from jaxaccel.data import ColumnSpec, DataCorruptionError, open_store
from jaxaccel.data._formats import WriteOptions
from jaxaccel.data._sidecar import write_checksums
from jaxaccel.data._tf_example import (
    ExampleError,
    Records,
    Template,
    parse_example,
    read_numbers,
)
from jaxaccel.data._tfrecord import FORMAT

UINT8, INT32 = np.dtype(np.uint8), np.dtype(np.int32)


def example_class():
    """tf.Example, from its definition, for Google's own implementation."""
    file = descriptor_pb2.FileDescriptorProto(name="example", package="t")
    repeated, optional, one = 3, 1, {"packed": True}

    def add(name, *fields):
        message = file.message_type.add(name=name)
        for number, field in enumerate(fields, 1):
            message.field.add(number=number, **field)
        return message

    add("B", {"name": "value", "type": 12, "label": repeated})
    add("F", {"name": "value", "type": 2, "label": repeated, "options": one})
    add("I", {"name": "value", "type": 3, "label": repeated, "options": one})
    kinds = [("bytes_list", ".t.B"), ("float_list", ".t.F"), ("int64_list", ".t.I")]
    fields = [
        {"name": n, "type": 11, "type_name": t, "label": optional} for n, t in kinds
    ]
    add("Feature", *fields)
    entries = {
        "name": "feature",
        "type": 11,
        "type_name": ".t.Features.FeatureEntry",
        "label": repeated,
    }
    entry = add("Features", entries).nested_type.add(name="FeatureEntry")
    entry.field.add(name="key", number=1, type=9, label=optional)
    entry.field.add(
        name="value", number=2, type=11, type_name=".t.Feature", label=optional
    )
    entry.options.map_entry = True
    fields = [
        {"name": "features", "type": 11, "type_name": ".t.Features", "label": optional}
    ]
    add("Example", *fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


EXAMPLE: Any = example_class()


def example(**features):
    """Serializes features; `__` stands for `/`."""
    message = EXAMPLE()
    for name, value in features.items():
        feature = message.features.feature[name.replace("__", "/")]
        values = value if isinstance(value, list) else [value]
        if values and isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        elif values and isinstance(values[0], float):
            feature.float_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return message.SerializeToString(deterministic=True)


def masked(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def frame(record):
    length = struct.pack("<Q", len(record))
    return length + masked(length) + record + masked(record)


def encoded(pixels, kind="PNG"):
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


@pytest.fixture
def write(tmp_path):
    def write(records, name="a.tfrecord"):
        path = tmp_path / name
        path.write_bytes(b"".join(frame(record) for record in records))
        return path

    return write


@pytest.fixture
def columns(rng):
    return {
        "image": rng.integers(0, 256, (40, 5, 4, 3), dtype=np.uint8),
        "label": rng.integers(0, 256, 40).astype(np.uint8),
        "weight": rng.normal(size=40).astype(np.float32),
        "delta": rng.integers(-300, 300, 40).astype(np.int16),
        "flag": rng.integers(0, 2, 40).astype(bool),
        "id": rng.integers(0, 2**64, 40, dtype=np.uint64),
        "code": rng.normal(size=(40, 3)).astype(np.float16),
        "mask": rng.integers(0, 2, (40, 7)).astype(bool),
        "far": rng.integers(-(2**62), 2**62, (40, 2)),
    }


@pytest.fixture
def written(tmp_path, columns):
    path = tmp_path / "w.tfrecord"
    spec = {n: ColumnSpec(c.shape[1:], c.dtype) for n, c in columns.items()}
    assert FORMAT.create is not None
    writer = FORMAT.create(path, spec, WriteOptions(None, 40))
    writer.write({name: column[:25] for name, column in columns.items()})
    writer.write({name: column[25:] for name, column in columns.items()})
    writer.finish()
    return path


def index_of(path):
    return path.with_name(path.name + ".idx.npz")


@pytest.mark.parametrize("checksums", [True, False])
def test_what_was_written_is_read(written, columns, rng, checksums):
    with open_store(written, checksums=checksums) as store:
        assert store.spec == {
            n: ColumnSpec(c.shape[1:], c.dtype) for n, c in columns.items()
        }
        rows = rng.integers(0, 40, 30)
        batch = store.take(rows)
        for name, column in columns.items():
            np.testing.assert_array_equal(batch[name], column[rows])
        seen = list(store.scan(17))
        for name, column in columns.items():
            found = np.concatenate([batch[name] for batch in seen])
            np.testing.assert_array_equal(found, column)
        assert store.take([])["image"].shape == (0, 5, 4, 3)


def test_written_file_is_what_others_expect(written, columns):
    for i, record in enumerate(grain.experimental.TFRecordIterDataset(str(written))):
        feature = EXAMPLE.FromString(record).features.feature
        assert feature["image"].bytes_list.value == [columns["image"][i].tobytes()]
        assert feature["image/shape"].int64_list.value == [5, 4, 3]
        assert feature["image/dtype"].bytes_list.value == [b"uint8"]
        assert feature["label"].int64_list.value == [columns["label"][i]]
        assert feature["delta"].int64_list.value == [columns["delta"][i]]
        assert feature["weight"].float_list.value == [columns["weight"][i]]
    content, at = written.read_bytes(), 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        assert content[at:].startswith(frame(content[at + 12 : at + 12 + length]))
        at += length + 16


def test_names_that_would_be_confused(tmp_path):
    spec = {name: ColumnSpec((), UINT8) for name in ("x", "x/shape")}
    assert FORMAT.create is not None
    with pytest.raises(ValueError, match="'x' and 'x/shape'"):
        FORMAT.create(tmp_path / "x.tfrecord", spec, WriteOptions(None, 1))


def test_foreign_examples(write, rng):
    pixels = rng.integers(0, 256, (9, 6, 5, 3), dtype=np.uint8)
    records = [
        example(
            image__encoded=encoded(image),
            image__format=b"png",
            image__height=6,
            image__width=5,
            image__class__label=1000 * i - 1,
            box=[0.5, -1.0, float(i)],
            counts=[i, 300 * i, 7],
            nothing=[],
        )
        for i, image in enumerate(pixels)
    ]
    store = open_store(write(records))
    assert store.spec == {
        "box": ColumnSpec((3,), np.dtype(np.float32)),
        "counts": ColumnSpec((3,), INT32),
        "image/class/label": ColumnSpec((), INT32),
        "image/encoded": ColumnSpec((6, 5, 3), UINT8),
        "image/height": ColumnSpec((), INT32),
        "image/width": ColumnSpec((), INT32),
    }
    batch = store.take([8, 0, 3, 3])
    np.testing.assert_array_equal(batch["image/encoded"], pixels[[8, 0, 3, 3]])
    assert batch["image/class/label"].tolist() == [7999, -1, 2999, 2999]
    assert batch["counts"].tolist()[0] == [8, 2400, 7]
    assert batch["box"].tolist()[2] == [0.5, -1.0, 3.0]


@pytest.mark.parametrize("prefix", ["", "image__"])
def test_raw_image_with_its_sides_beside_it(write, rng, prefix):
    pixels = rng.integers(0, 256, (4, 6, 5, 3), dtype=np.uint8)
    sides = {f"{prefix}height": 6, f"{prefix}width": 5, f"{prefix}depth": 3}
    records = [example(**{f"{prefix}raw": p.tobytes()}, **sides) for p in pixels]
    batch = open_store(write(records)).take([2, 1])
    name = prefix.replace("__", "/") + "raw"
    np.testing.assert_array_equal(batch[name], pixels[[2, 1]])
    # The same number of bytes, but another shape.
    sides = {f"{prefix}height": 5, f"{prefix}width": 6, f"{prefix}depth": 3}
    records.append(example(**{f"{prefix}raw": pixels[0].tobytes()}, **sides))
    store = open_store(write(records))
    with pytest.raises(ValueError, match=r"record 4 .*a column has one shape"):
        store.take([0, 1, 2, 3, 4])


def test_columns_choose_and_narrow(write):
    records = [example(x=i, y=[1, 2, 3, 4], z=b"abcd", f=0.25) for i in range(200)]
    spec = {
        "x": ColumnSpec((), UINT8),
        "y": ColumnSpec((2, 2), np.dtype(np.int64)),
        "z": ColumnSpec((2,), np.dtype(np.uint16)),
        "f": ColumnSpec((), np.dtype(np.float16)),
    }
    store = open_store(write(records), columns=spec)
    batch = store.take([3, 199])
    assert dict(store.spec) == spec
    assert {name: a.dtype for name, a in batch.items()} == {
        name: s.dtype for name, s in spec.items()
    }
    assert batch["x"].tolist() == [3, 199]
    assert batch["y"].tolist() == [[[1, 2], [3, 4]]] * 2
    assert batch["z"].tobytes() == b"abcdabcd"


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"y": ColumnSpec((), INT32)}, "no feature 'y'.*'f', 's', 'x'"),
        ({"x": ColumnSpec((2,), INT32)}, r"should be int32\[2\].*holds 1 integers"),
        ({"f": ColumnSpec((), INT32)}, "holds 1 floats"),
        ({"s": ColumnSpec((3,), UINT8)}, "holds 2 bytes"),
        ({"x": ColumnSpec((), np.dtype("U3"))}, "holds numbers"),
        ({}, "names no column"),
    ],
)
def test_columns_that_do_not_fit(write, columns, message):
    path = write([example(x=1, f=0.5, s=b"ab")])
    with pytest.raises(ValueError, match=message):
        open_store(path, columns=columns)


def test_integer_that_does_not_fit(write):
    path = write([example(x=i) for i in (1, 2, 2**31, 4)])
    store = open_store(path)
    with pytest.raises(ValueError, match=r"record 2 \(byte.*2147483648, outside int32"):
        store.take([0, 1, 2])
    wide = {"x": ColumnSpec((), np.dtype(np.uint32))}
    assert open_store(path, columns=wide).take([2])["x"].tolist() == [2**31]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (example(y=1), "no feature 'x', only"),
        (example(x=1.0), "here 1 floats"),
        (example(x=[1, 2]), "here 2 integers"),
        (example(x=b"1"), "here 1 bytes"),
    ],
)
def test_record_unlike_the_first(write, record, message):
    store = open_store(write([example(x=1), example(x=2), record]))
    assert store.take([1])["x"].tolist() == [2]
    with pytest.raises(ValueError, match=rf"record 2 .*{message}"):
        store.take([0, 1, 2])


def test_records_that_are_no_examples(write, rng):
    tokens = rng.integers(0, 2**16, (6, 8)).astype(np.uint16)
    path = write([row.tobytes() for row in tokens])
    with pytest.raises(ValueError, match="no tf.Example; say what they hold"):
        open_store(path)
    spec = {"token": ColumnSpec((8,), np.dtype(np.uint16))}
    store = open_store(path, columns=spec)
    np.testing.assert_array_equal(store.take([5, 2])["token"], tokens[[5, 2]])
    with pytest.raises(ValueError, match="holds 16 bytes"):
        open_store(path, columns={"token": ColumnSpec((9,), np.dtype(np.uint16))})


def test_records_that_are_images(write, rng):
    pixels = rng.integers(0, 256, (3, 6, 5, 3), dtype=np.uint8)
    store = open_store(write([encoded(image) for image in pixels]))
    np.testing.assert_array_equal(store.take([2, 0])["image"], pixels[[2, 0]])
    small = open_store(write([encoded(p) for p in pixels]), image_size=(3, 2))
    assert small.take([1])["image"].shape == (1, 3, 2, 3)


def test_images_of_different_sizes(write):
    sizes = (4, 4, 5)
    images = [encoded(np.zeros((n, 4, 3), np.uint8)) for n in sizes]
    path = write([example(i=image) for image in images])
    store = open_store(path)
    with pytest.raises(ValueError, match=r"a.tfrecord.*5x4 \(record 2.*4x4"):
        store.take([0, 2])


@hypothesis.given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["a", "b", "long/name"]),
            st.one_of(
                st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
                st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=3),
                st.lists(st.binary(max_size=9), min_size=1, max_size=3),
            ),
            min_size=1,
        ),
        min_size=1,
        max_size=3,
    )
)
def test_parser_agrees_with_protobuf(messages):
    for features in messages:
        record = example(**features)
        found = parse_example(memoryview(record))
        assert found.keys() == features.keys()
        records = Records(
            np.frombuffer(record, np.uint8), np.zeros(1, np.int64), len(record)
        )
        assert Template(memoryview(record), found).matches(records).all()
        for name, values in features.items():
            if found[name].kind == "bytes":
                assert [record[a:b] for a, b in found[name].spans] == values
            else:
                assert read_numbers(records, found[name])[0].tolist() == values


@hypothesis.given(st.binary(max_size=60))
def test_parser_survives_anything(data):
    try:
        spans = [f.spans for f in parse_example(memoryview(data)).values()]
    except ExampleError as error:
        assert 0 <= error.offset <= len(data)
    else:
        assert all(0 <= a <= b <= len(data) for each in spans for a, b in each)


def test_unpacked_numbers():
    # As old writers have it: each value with its own tag.
    integers = b"\x1a\x05" + b"\x08\x01" + b"\x08\x96\x01"
    floats = b"\x12\x0a" + b"".join(b"\x0d" + struct.pack("<f", x) for x in (1, 2))
    entries = [
        b"\x0a\x01" + name + b"\x12" + bytes([len(body)]) + body
        for name, body in ((b"i", integers), (b"f", floats))
    ]
    features = b"".join(b"\x0a" + bytes([len(e)]) + e for e in entries)
    record = b"\x0a" + bytes([len(features)]) + features
    data, starts = np.frombuffer(record * 2, np.uint8), np.array([0, len(record)])
    found, records = (
        parse_example(memoryview(record)),
        Records(data, starts, len(record)),
    )
    assert read_numbers(records, found["i"]).tolist() == [[1, 150]] * 2
    assert read_numbers(records, found["f"]).tolist() == [[1.0, 2.0]] * 2


def test_same_size_but_other_places(write):
    # The two integers of the list change places between their one and two bytes,
    # and so do features between records.
    lists = [[1, 300], [300, 1], [2, 400], [127, 128], [128, 127]] * 3
    records = [example(a=values, b=i) for i, values in enumerate(lists)]
    swapped = EXAMPLE.FromString(example(a=[5, 600]))
    tail = EXAMPLE.FromString(example(b=100))
    first, second = tail.SerializeToString(), swapped.SerializeToString()
    body = first[2:] + second[2:]
    records.append(b"\x0a" + bytes([len(body)]) + body)
    assert len({len(record) for record in records}) == 1
    batch = open_store(write(records)).take(np.arange(16)[::-1])
    assert batch["a"].tolist() == [[5, 600], *lists[::-1]]
    assert batch["b"].tolist() == [100, *range(14, -1, -1)]


def test_runs_of_equal_records(write):
    # Long enough for the scan to look at many at a time, and interrupted.
    values = [1] * 50 + [300] + [2] * 1000 + [300] * 20 + [3]
    path = write([example(x=value) for value in values])
    store = open_store(path)
    assert len(store) == len(values)
    assert next(store.scan(2000))["x"].tolist() == values


def test_index_is_cached(write, monkeypatch):
    path = write([example(x=i) for i in range(9)])
    open_store(path)
    before = index_of(path).stat()
    monkeypatch.setattr("jaxaccel.data._tfrecord.walk", None)
    assert open_store(path).take([8])["x"].tolist() == [8]
    assert index_of(path).stat() == before


@pytest.mark.parametrize("damage", ["garbage", "truncated", "other", "empty"])
def test_index_that_is_stale_or_damaged_is_rebuilt(write, damage):
    path = write([example(x=i) for i in range(9)])
    open_store(path)
    index = index_of(path)
    if damage == "other":
        status = path.stat()
        path = write([example(x=i) for i in (1, 300, 2, 300)])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    else:
        content = {"garbage": b"PK\3\4" + b"x" * 99, "empty": b""}
        index.write_bytes(content.get(damage, index.read_bytes()[:-30]))
    expected = [1, 300, 2, 300] if damage == "other" else list(range(9))
    assert next(open_store(path).scan(20))["x"].tolist() == expected
    again = open_store(path)
    assert index.stat().st_size > 200
    assert again.take([1])["x"].tolist() == [expected[1]]


def test_index_of_another_file_with_equal_size_and_time(write):
    # What the cached index says is compared with each record that is read.
    values = [1, 2, 300]
    path = write([example(x=value) for value in values])
    open_store(path)
    status = path.stat()
    path = write([example(x=value) for value in (1, 300, 2)])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(DataCorruptionError, match=r"delete a.tfrecord.idx.npz") as info:
        open_store(path).take([0, 1])
    assert info.value.record == 1


def test_folder_that_cannot_be_written(write, monkeypatch):
    path = write([example(x=i) for i in range(3)])

    def refuse(*args):
        raise PermissionError("read-only")

    monkeypatch.setattr("jaxaccel.data._record_index._save", refuse)
    assert open_store(path).take([2])["x"].tolist() == [2]
    assert not index_of(path).exists()


def test_pickled_store_reads_the_same(written, columns, monkeypatch):
    monkeypatch.chdir(written.parent)
    store = open_store(written.name)
    content = pickle.dumps(store)
    assert len(content) < 20_000
    monkeypatch.chdir("/")
    copy = pickle.loads(content)
    np.testing.assert_array_equal(copy.take([7])["image"], columns["image"][[7]])
    assert copy.fingerprint() == store.fingerprint()
    written.write_bytes(written.read_bytes() + b"x")
    with pytest.raises(DataCorruptionError, match="changed after"):
        pickle.loads(content)


def test_several_threads(written, columns):
    store, errors = open_store(written), []

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            rows = rng.integers(0, 40, 8)
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


def test_fingerprint(written):
    first = open_store(written).fingerprint()
    assert open_store(written).fingerprint() == first
    os.utime(written, ns=(0, 0))
    assert open_store(written).fingerprint() != first


def test_shards_and_names_without_suffix(write):
    for i in range(3):
        write([example(x=10 * i + j) for j in range(i + 1)], f"train-0000{i}-of-00003")
    folder = write([example(x=0)], "other").parent
    store = open_store(folder / "train-*-of-00003")
    assert store.take([0, 1, 2, 3, 4, 5])["x"].tolist() == [0, 10, 11, 20, 21, 22]


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz"])
def test_compressed_file(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8b" + bytes(40))
    with pytest.raises(ValueError, match="compressed as a whole"):
        open_store(tmp_path / name)


def test_without_google_crc32c(written, columns, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(ImportError, match=r"jaxaccel\[formats\].*checksums=False"):
        open_store(written)
    store = open_store(written, checksums=False)
    np.testing.assert_array_equal(store.take([7])["image"], columns["image"][[7]])
    assert FORMAT.create is not None
    with pytest.raises(ImportError, match=r"jaxaccel\[formats\]"):
        FORMAT.create(tmp_path / "x", {}, WriteOptions(None, 1))
    assert not (tmp_path / "x").exists()


def read_all(path: Path, **options):
    with open_store(path, **options) as store:
        batches = [*store.scan(7), store.take(np.arange(len(store))[::-1])]
        return batches


@pytest.mark.parametrize("at", [0, 3, 11, 12, 40, 300, -1, -4, -5, -20])
@pytest.mark.parametrize("checksums", [True, False])
def test_truncated_file(written, at, checksums):
    written.write_bytes(written.read_bytes()[:at])
    with pytest.raises(DataCorruptionError, match="w.tfrecord"):
        read_all(written, checksums=checksums)


def test_file_cut_between_records(write):
    path = write([example(x=i) for i in range(5)])
    write_checksums(path)
    write([example(x=i) for i in range(4)])
    with pytest.raises(DataCorruptionError, match="when its checksums were written"):
        open_store(path)


@pytest.mark.parametrize("cached", [True, False])
def test_every_flipped_bit_is_found(written, cached):
    good, status = written.read_bytes(), written.stat()
    if cached:
        open_store(written)
    record = len(good) // 40 * 3
    for offset in [*range(0, 40), *range(record, record + 600, 7), len(good) - 1]:
        damaged = bytearray(good)
        damaged[offset] ^= 1 << offset % 8
        written.write_bytes(damaged)
        if cached:
            os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(DataCorruptionError, match=r"\(record \d+, byte offset"):
            read_all(written)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 2**40, 10_000])
@pytest.mark.parametrize("checksums", [True, False])
def test_absurd_length(write, length, checksums):
    path = write([example(x=i) for i in range(5)])
    content = path.read_bytes()
    header, at = struct.pack("<Q", length), 2 * len(content) // 5
    damaged = content[:at] + header + masked(header) + content[at + 12 :]
    path.write_bytes(damaged)
    with pytest.raises(DataCorruptionError, match="only .* follow") as info:
        open_store(path, checksums=checksums)
    assert (info.value.record, info.value.offset) == (2, at)


@pytest.mark.parametrize("checksums", [True, False])
def test_garbage_and_zeros(tmp_path, rng, checksums):
    for content in (rng.bytes(5000), bytes(5000), frame(b"")):
        path = tmp_path / "x.tfrecord"
        path.write_bytes(content)
        with pytest.raises(ValueError, match="x.tfrecord"):
            read_all(path, checksums=checksums)


def test_damaged_example_without_checksums(write):
    records = [example(x=i) for i in range(5)]
    records[3] = records[3][:-1] + b"\xff"
    store = open_store(write(records), checksums=False)
    with pytest.raises(DataCorruptionError, match="no tf.Example") as info:
        store.take([2, 3, 4])
    assert info.value.record == 3


def test_file_that_shrinks_during_a_scan(written):
    store = open_store(written)
    batches = store.scan(10)
    next(batches)
    os.truncate(written, written.stat().st_size // 2)
    with pytest.raises(DataCorruptionError, match="now fewer"):
        list(batches)
