"""Tar files of samples against Python's tarfile, and damage."""

import io
import os
import pickle
import tarfile

import numpy as np
import PIL.Image
import pytest

from jaxaccel.data import ColumnSpec, DataCorruptionError, open_store
from jaxaccel.data._formats import WriteOptions
from jaxaccel.data._sidecar import sidecar_path, write_checksums
from jaxaccel.data._tar import FORMAT

UINT8, INT32 = np.dtype(np.uint8), np.dtype(np.int32)


@pytest.fixture
def columns(rng):
    return {
        "image": rng.integers(0, 256, (30, 5, 4, 3), dtype=np.uint8),
        "label": rng.integers(0, 256, 30).astype(np.uint8),
        "score": rng.normal(size=(30, 2)),
        "flag": rng.integers(0, 2, 30).astype(bool),
        "id": rng.integers(0, 2**64, 30, dtype=np.uint64),
    }


@pytest.fixture
def written(tmp_path, columns):
    return write_columns(tmp_path / "w.tar", columns)


def write_columns(path, columns):
    spec = {n: ColumnSpec(c.shape[1:], c.dtype) for n, c in columns.items()}
    assert FORMAT.create is not None
    writer = FORMAT.create(path, spec, WriteOptions(None, 30))
    writer.write({name: column[:25] for name, column in columns.items()})
    writer.write({name: column[25:] for name, column in columns.items()})
    writer.finish()
    return path


@pytest.fixture
def pack(tmp_path):
    def pack(members, format=tarfile.PAX_FORMAT, name="a.tar", **options):
        path = tmp_path / name
        with tarfile.open(path, "w", format=format, **options) as file:
            for member, content in members:
                info = tarfile.TarInfo(member)
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
        return path

    return pack


def npy(array, version=None):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=version)
    return file.getvalue()


def encoded(pixels, kind="PNG"):
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, format=kind)
    return file.getvalue()


def read_all(path, **options):
    with open_store(path, **options) as store:
        return [*store.scan(7), store.take(np.arange(len(store))[::-1])]


def test_what_was_written_is_read(written, columns, rng):
    with open_store(written) as store:
        assert store.spec == {
            n: ColumnSpec(c.shape[1:], c.dtype) for n, c in columns.items()
        }
        rows = rng.integers(0, 30, 20)
        batch, seen = store.take(rows), list(store.scan(17))
        for name, column in columns.items():
            np.testing.assert_array_equal(batch[name], column[rows])
            found = np.concatenate([batch[name] for batch in seen])
            np.testing.assert_array_equal(found, column)
        assert store.take([])["image"].shape == (0, 5, 4, 3)


def test_written_file_is_what_others_expect(written, columns):
    with tarfile.open(written) as file:
        names = file.getnames()
        assert names[:2] == ["00.image.npy", "00.cls"]
        assert len(names) == 150
        for i in range(30):
            content = file.extractfile(f"{i:02}.image.npy")
            assert content is not None
            image = np.load(io.BytesIO(content.read()))
            np.testing.assert_array_equal(image, columns["image"][i])
            content = file.extractfile(f"{i:02}.cls")
            assert content is not None
            assert int(content.read()) == columns["label"][i]


LONG = "d" * 120


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize(
    ("kind", "folder", "target"),
    [
        (tarfile.LNKTYPE, "", "./1.cls"),
        (tarfile.LNKTYPE, "a/", f"{LONG}/1.cls"),
        (tarfile.SYMTYPE, "a/", f"../{LONG}/1.cls"),
        (tarfile.SYMTYPE, "a/", "../link.cls"),
    ],
)
def test_links_stand_for_their_members(tmp_path, format, kind, folder, target):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format) as file:

        def add(name, content=b"", **fields):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in fields.items():
                setattr(info, field, value)
            file.addfile(info, io.BytesIO(content))

        add(f"{LONG}/1.cls", b"5")
        add("1.cls", b"6")
        add(f"{folder}2.cls", type=kind, linkname=target)
        # To a link that comes later.
        add("link.cls", type=tarfile.SYMTYPE, linkname=f"{LONG}/1.cls")
    expected = 6 if target == "./1.cls" else 5
    with open_store(path) as store:
        assert store.take(np.arange(4))["label"].tolist() == [5, 6, expected, 5]


@pytest.mark.parametrize("target", ["../1.cls", "/etc/1.cls", "3.cls", "2.cls"])
def test_links_out_of_the_archive_are_refused(tmp_path, target):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        info = tarfile.TarInfo("1.cls")
        info.size = 1
        file.addfile(info, io.BytesIO(b"5"))
        info = tarfile.TarInfo("2.cls")
        info.type, info.linkname = tarfile.SYMTYPE, target
        file.addfile(info)
    with pytest.raises(ValueError, match="'2.cls'.*is a link to.*--dereference"):
        open_store(path)


def test_equal_data_make_equal_files(tmp_path, columns):
    first = write_columns(tmp_path / "a.tar", columns)
    second = write_columns(tmp_path / "b.tar", columns)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["a/b", "Image", ".x"])
def test_names_that_cannot_be_suffixes(tmp_path, name):
    assert FORMAT.create is not None
    with pytest.raises(ValueError, match="rename it"):
        FORMAT.create(
            tmp_path / "x.tar", {name: ColumnSpec((), UINT8)}, WriteOptions(None, 1)
        )


@pytest.mark.parametrize(
    "format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
@pytest.mark.parametrize("folder", ["", "train/" + "n0" * 40 + "/" + "x" * 60 + "/"])
def test_web_dataset(pack, rng, format, folder):
    pixels = rng.integers(0, 256, (9, 6, 5, 3), dtype=np.uint8)
    masks = rng.integers(0, 256, (9, 6, 5), dtype=np.uint8)
    members = [
        ("readme", b"no sample"),
        ("__MACOSX/0.png", b"no image"),
        ("._0.png", b""),
    ]
    for i, (image, mask) in enumerate(zip(pixels, masks, strict=True)):
        members += [
            (f"{folder}{i:04}.{'PNG' if i % 2 else 'jpg'}", encoded(image)),
            (f"{folder}{i:04}.cls", b" %d\n" % (1000 * i - 1)),
            (f"{folder}{i:04}.seg.png", encoded(mask)),
            (f"{folder}{i:04}.box.npy", npy(np.arange(i, i + 4.0))),
            (f"{folder}{i:04}.json", b"{}"),
        ]
    store = open_store(pack(members, format))
    assert store.spec == {
        "box": ColumnSpec((4,), np.dtype(np.float64)),
        "image": ColumnSpec((6, 5, 3), UINT8),
        "label": ColumnSpec((), INT32),
        "seg": ColumnSpec((6, 5, 3), UINT8),
    }
    batch = store.take([8, 0, 3])
    np.testing.assert_array_equal(batch["image"], pixels[[8, 0, 3]])
    np.testing.assert_array_equal(batch["seg"][..., 0], masks[[8, 0, 3]])
    assert batch["label"].tolist() == [7999, -1, 2999]
    assert batch["box"][0].tolist() == [8.0, 9.0, 10.0, 11.0]


def test_members_of_a_sample_need_not_be_neighbours(pack):
    members = [(f"{i}.cls", b"%d" % i) for i in (3, 1, 2)]
    members += [(f"{i}.weight.cls", b"%d" % (i + 10)) for i in (1, 2, 3)]
    batch = open_store(pack(members)).take([0, 1, 2])
    assert batch["label"].tolist() == [3, 1, 2]
    assert batch["weight"].tolist() == [13, 11, 12]


def test_folders_and_links_that_are_no_samples_are_passed_over(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name, kind in (("a", tarfile.DIRTYPE), ("a/latest", tarfile.SYMTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "elsewhere"
            file.addfile(info)
        info = tarfile.TarInfo("a/0.cls")
        info.size = 2
        file.addfile(info, io.BytesIO(b"42"))
    assert open_store(tmp_path / "a.tar").take([0])["label"].tolist() == [42]


def test_arrays_in_other_orders(pack, rng):
    arrays = [rng.normal(size=(3, 4)).astype(np.float32) for _ in range(4)]
    variants = [
        npy(arrays[0]),
        npy(np.asfortranarray(arrays[1])),
        npy(arrays[2].astype(">f4"), version=(1, 0)),
        npy(arrays[3], version=(2, 0)),
    ]
    for order in (range(4), range(3, -1, -1), (1, 0, 2, 3), (2, 2)):
        members = [(f"{i}.npy", variants[j]) for i, j in enumerate(order)]
        store = open_store(pack(members))
        assert store.spec == {"npy": ColumnSpec((3, 4), np.dtype(np.float32))}
        batch = store.take(np.arange(len(members)))
        np.testing.assert_array_equal(batch["npy"], [arrays[j] for j in order])


def test_array_unlike_the_first(pack):
    shapes = [(2, 3), (2, 3), (3, 2)]
    members = [(f"{i}.npy", npy(np.zeros(s))) for i, s in enumerate(shapes)]
    store = open_store(pack(members))
    with pytest.raises(ValueError, match=r"record 2 .*float64\[3, 2\].*\[2, 3\]"):
        store.take([0, 2])


def test_array_of_objects_is_refused(pack):
    array = np.array([{}], object)
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    with pytest.raises(ValueError, match="dtype object"):
        open_store(pack([("0.npy", file.getvalue())]))


def test_columns_choose_and_narrow(pack):
    members = [(f"{i}.cls", b"%d" % (100 * i)) for i in range(3)]
    members += [(f"{i}.npy", npy(np.float32(i))) for i in range(3)]
    spec = {"label": ColumnSpec((), UINT8)}
    store = open_store(pack(members), columns=spec)
    assert dict(store.spec) == spec
    assert store.take([2])["label"].dtype == UINT8
    path = pack([*members, ("3.cls", b"256"), ("3.npy", npy(np.float32(0)))])
    with pytest.raises(ValueError, match="record 3 .*256, outside uint8"):
        open_store(path, columns=spec).take([1, 3])
    with pytest.raises(ValueError, match="should be float64"):
        open_store(path, columns={"npy": ColumnSpec((), np.dtype(np.float64))})
    with pytest.raises(ValueError, match=r"no column \['mask'\].*\['label', 'npy'\]"):
        open_store(path, columns={"mask": ColumnSpec((), UINT8)})


def test_columns_not_in_all_samples(pack):
    path = pack([("0.cls", b"1"), ("0.npy", npy(np.zeros(2))), ("1.cls", b"2")])
    with pytest.raises(ValueError, match="sample 1 has 0 members for the column 'npy'"):
        open_store(path)
    store = open_store(path, columns={"label": ColumnSpec((), INT32)})
    assert store.take([0, 1])["label"].tolist() == [1, 2]
    # What the first sample lacks is no column.
    path = pack([("0.cls", b"1"), ("1.cls", b"2"), ("1.npy", npy(np.zeros(2)))])
    assert list(open_store(path).spec) == ["label"]


def test_ambiguous_names(pack):
    with pytest.raises(ValueError, match="two members named '0.cls'"):
        open_store(pack([("0.cls", b"1"), ("0.cls", b"2")]))
    image = encoded(np.zeros((2, 2, 3), np.uint8))
    with pytest.raises(ValueError, match="has 2 members for the column 'image'"):
        open_store(pack([("0.jpg", image), ("0.png", image)]))
    with pytest.raises(ValueError, match="no member named"):
        open_store(pack([("readme", b"")]))


def test_images_of_different_sizes(pack):
    images = [encoded(np.zeros((n, 4, 3), np.uint8)) for n in (4, 5)]
    path = pack([(f"{i}.png", image) for i, image in enumerate(images)])
    with pytest.raises(ValueError, match=r"a.tar.*5x4 \(record 1.*4x4"):
        open_store(path).take([0, 1])
    store = open_store(path, image_size=(2, 2), image_mode="L")
    assert store.take([0, 1])["image"].shape == (2, 2, 2, 1)


def test_index_is_cached_and_rebuilt(pack, monkeypatch):
    path = pack([("0.cls", b"1")])
    index = path.with_name("a.tar.idx.npz")
    open_store(path)
    with monkeypatch.context() as patch:
        patch.setattr("jaxaccel.data._tar.find_samples", None)
        assert open_store(path).take([0])["label"].tolist() == [1]
    os.utime(path, ns=(0, 0))
    index.write_bytes(b"garbage")
    assert open_store(path).take([0])["label"].tolist() == [1]
    path = pack([("0.cls", b"7"), ("1.cls", b"8")])
    assert open_store(path).take([0, 1])["label"].tolist() == [7, 8]


def test_pickled_store_reads_the_same(written, columns, monkeypatch):
    monkeypatch.chdir(written.parent)
    store = open_store(written.name)
    content = pickle.dumps(store)
    monkeypatch.chdir("/")
    copy = pickle.loads(content)
    np.testing.assert_array_equal(copy.take([7])["image"], columns["image"][[7]])
    assert copy.fingerprint() == store.fingerprint()
    store.close()
    with pytest.raises(ValueError, match="is closed"):
        store.take([0])


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.tar"])
def test_compressed_file(tmp_path, name):
    with tarfile.open(tmp_path / name, "w:gz"):
        pass
    with pytest.raises(ValueError, match="compressed as a whole"):
        open_store(tmp_path / name)


def test_truncated_file(written):
    content = written.read_bytes()
    end = len(content.rstrip(b"\0"))
    cuts = [0, 1, 511, 512, 1024, 1600, len(content) // 2, end - 200, end]
    for size in [*cuts, len(content) // 1024 * 512]:
        written.write_bytes(content[:size])
        with pytest.raises(DataCorruptionError, match="w.tar"):
            read_all(written)


def test_file_without_its_end(written):
    # Cut between two members, it would look complete.
    content = written.read_bytes()
    written.write_bytes(content[: -(-len(content.rstrip(b"\0")) // 512) * 512])
    with pytest.raises(DataCorruptionError, match="marks a tar file's end"):
        open_store(written)


def test_flipped_bits_in_headers_are_found(pack):
    path = pack([(f"{i}.cls", b"%d" % i) for i in range(3)], tarfile.USTAR_FORMAT)
    good = path.read_bytes()
    for offset in range(1024, 1024 + 345, 3):
        damaged = bytearray(good)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        with pytest.raises(DataCorruptionError, match="a.tar") as info:
            open_store(path)
        assert info.value.offset == 1024


@pytest.mark.parametrize("cached", [True, False])
def test_flipped_bits_are_found_by_checksums(written, cached):
    write_checksums(written)
    assert sidecar_path(written).exists()
    good, status = written.read_bytes(), written.stat()
    if cached:
        open_store(written)
    for offset in [0, 600, 1024, 1500, 3000, len(good) // 2]:
        damaged = bytearray(good)
        damaged[offset] ^= 1
        written.write_bytes(damaged)
        if cached:
            os.utime(written, ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.raises(DataCorruptionError):
            read_all(written)
    written.write_bytes(good)
    assert len(read_all(written)) == 6


@pytest.mark.parametrize(
    "field",
    [b"77777777777\0", b"\x80" + b"\xff" * 11, b"-0000000001\0", b"zzz\0" + b" " * 8],
)
def test_absurd_size(pack, field):
    path = pack([("0.cls", b"1"), ("1.cls", b"2")], tarfile.USTAR_FORMAT)
    content = bytearray(path.read_bytes())
    content[1024 + 124 : 1024 + 136] = field
    content[1024 + 148 : 1024 + 156] = b" " * 8
    total = b"%06o\0 " % sum(content[1024:1536])
    content[1024 + 148 : 1024 + 156] = total
    path.write_bytes(content)
    with pytest.raises(DataCorruptionError, match="follow|octal") as info:
        open_store(path)
    assert info.value.offset == 1024


@pytest.mark.parametrize(
    "record", [b"5 a=b\n", b"99 path=x\n", b"x", b"12 size=-1\n\n"]
)
def test_damaged_extended_header(tmp_path, record):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(record)
    content = info.tobuf(tarfile.USTAR_FORMAT) + record.ljust(512, b"\0") + bytes(1024)
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(DataCorruptionError, match="extended header"):
        open_store(tmp_path / "a.tar")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("1.cls", b"three"),
        ("1.cls", b""),
        ("1.cls", b"0" * 30 + b"7"),
        ("1.npy", b"\x93NUMPY\1\0\xff\xff"),
        ("1.npy", npy(np.zeros(3))[:-1]),
        ("1.npy", b""),
        ("1.npy", npy(np.zeros(3)).replace(b"(3,)", b"(9" + b"9" * 15 + b",)")[:200]),
        ("1.png", b"\x89PNG\r\n\x1a\n"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_damaged_member(pack, name, content, first):
    good = {
        "cls": b"7",
        "npy": npy(np.zeros(3)),
        "png": encoded(np.zeros((4, 4, 3), np.uint8)),
    }[name[2:]]
    members = [(name, content), ("2" + name[1:], good)]
    path = pack(members if first else members[::-1])
    with pytest.raises((DataCorruptionError, ValueError), match="a.tar"):
        open_store(path).take([0, 1])


def test_class_names_as_labels_are_no_reason_to_delete_the_file(pack):
    with open_store(pack([("1.cls", b"cat")])) as store:
        with pytest.raises(DataCorruptionError, match="'cat' is no.*numbers of") as got:
            store.take([0])
    assert "elete" not in str(got.value)
