"""verify: reads all, compares all that can be, writes sidecars on request."""

import os
import shutil

import numpy as np
import PIL.Image
import pytest

from jaxaccel.data import DataCorruptionError, convert, verify
from jaxaccel.data._open import FORMATS
from jaxaccel.data._sidecar import sidecar_path

N = 40
WRITABLE = sorted(name for name, known in FORMATS.items() if known.create)


@pytest.fixture
def arrays(rng):
    return {
        "image": rng.integers(0, 256, (N, 30, 21, 3), dtype=np.uint8),
        "label": rng.integers(0, 9, N).astype(np.uint8),
    }


def write(folder, name, arrays, **options):
    suffix = FORMATS[name].suffixes[0] if name != "npy" else ""
    path = folder / f"x{suffix}"
    convert(arrays, path, progress=False, **options).close()
    return path


def data_files(path):
    files = [path] if path.is_file() else sorted(path.iterdir())
    return [file for file in files if not file.name.endswith(".npz")]


def flip(path, offset):
    content = bytearray(path.read_bytes())
    content[offset] ^= 8
    path.write_bytes(content)


def check(path, **options):
    return verify(path, progress=False, **options)


@pytest.mark.parametrize("name", WRITABLE)
def test_an_intact_file_is_counted_and_compared(tmp_path, arrays, name):
    path = write(tmp_path, name, arrays)
    report = check(path)
    files = data_files(path)
    assert report.examples == N and not report.errors
    assert report.bytes == sum(file.stat().st_size for file in files)
    assert set(report.files) == set(files)
    expected = "format" if name == "array_record" else "sidecar"
    assert set(report.files.values()) == {expected}


@pytest.mark.parametrize("part", [0.0, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", WRITABLE)
def test_a_flipped_bit_anywhere_is_found(tmp_path, arrays, name, part):
    path = write(tmp_path, name, arrays)
    check(path, write_index=True)
    file = max(data_files(path), key=lambda file: file.stat().st_size)
    flip(file, int(part * (file.stat().st_size - 1)))
    with pytest.raises(DataCorruptionError) as caught:
        check(path)
    assert caught.value.path == str(file)
    assert [error.path for error in check(path, all_errors=True).errors] == [str(file)]


@pytest.mark.parametrize("name", WRITABLE)
def test_a_truncated_file_is_found(tmp_path, arrays, name):
    path = write(tmp_path, name, arrays)
    file = max(data_files(path), key=lambda file: file.stat().st_size)
    os.truncate(file, file.stat().st_size // 2 - 7)
    with pytest.raises(DataCorruptionError) as caught:
        check(path)
    assert caught.value.path == str(file)


def test_a_sidecar_tells_that_whole_records_are_missing(tmp_path, arrays):
    path = write(tmp_path, "tfrecord", arrays)
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half])
    sidecar_path(path).unlink()
    # All records have one length: without a sidecar this is an intact file.
    assert check(path).examples == N // 2
    path.write_bytes(content)
    check(path, write_index=True)
    path.write_bytes(content[:half])
    with pytest.raises(DataCorruptionError, match="when its checksums were written"):
        check(path)


@pytest.mark.parametrize("name", WRITABLE)
def test_files_of_others_get_a_sidecar_on_request(tmp_path, arrays, name):
    path = write(tmp_path, name, arrays)
    for file in data_files(path):
        sidecar_path(file).unlink(missing_ok=True)
    assert "sidecar" not in check(path).files.values()
    assert not any(sidecar_path(file).exists() for file in data_files(path))
    check(path, write_index=True)
    assert set(check(path).files.values()) == {"sidecar"}


def test_no_sidecar_is_written_for_what_cannot_be_read(tmp_path, arrays):
    path = write(tmp_path, "npy", arrays)
    for file in data_files(path):
        sidecar_path(file).unlink()
    os.truncate(path / "image.npy", 999)
    with pytest.raises(DataCorruptionError):
        check(path, write_index=True)
    assert not sidecar_path(path / "label.npy").exists()


def test_shards_are_verified_one_by_one(tmp_path, arrays):
    convert(arrays, tmp_path / "x.arrow", shards=4, progress=False)
    pattern = tmp_path / "x-*-of-00004.arrow"
    assert check(pattern).examples == check(tmp_path).examples == N
    for number in (1, 3):
        flip(tmp_path / f"x-{number:05d}-of-00004.arrow", 3000)
    report = check(pattern, all_errors=True)
    assert report.examples == N // 2 and len(report.files) == 4
    assert [error.path[-19:] for error in report.errors] == [
        "x-00001-of-00004.arrow"[-19:],
        "x-00003-of-00004.arrow"[-19:],
    ]
    (tmp_path / "x-00002-of-00004.arrow").unlink()
    with pytest.raises(FileNotFoundError, match=r"\[2\]"):
        check(pattern, all_errors=True)


def test_a_damaged_sidecar_is_damage_too(tmp_path, arrays):
    path = write(tmp_path, "npy", arrays)
    flip(sidecar_path(path / "label.npy"), 100)
    with pytest.raises(DataCorruptionError, match="label.npy.crc.npz"):
        check(path)


def test_files_without_any_checksum_are_said_to_have_none(tmp_path, arrays):
    path = write(tmp_path, "npy", arrays)
    shutil.copy(path / "image.npy", tmp_path / "image.npy")
    report = check(tmp_path / "image.npy")
    assert list(report.files.values()) == ["none"] and report.examples == N


def test_wrong_arguments_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no data file"):
        check(tmp_path / "x")
    with pytest.raises(ValueError, match="one of"):
        check(tmp_path, format="hdf5")


@pytest.mark.parametrize("damaged", [(0, 3), (1, 2), (0, 1, 2, 3)])
def test_each_damaged_image_of_a_folder_is_found(tmp_path, rng, damaged):
    paths = [tmp_path / name for name in ("a/0.png", "a/1.png", "b/0.png", "b/1.png")]
    for number, path in enumerate(paths):
        path.parent.mkdir(exist_ok=True)
        pixels = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(path)
        if number in damaged:
            path.write_bytes(path.read_bytes()[:20])
    report = check(tmp_path, all_errors=True)
    found = [(error.record, error.path) for error in report.errors]
    if len(damaged) < 4:
        assert found == [(number, str(paths[number])) for number in damaged]
        assert report.examples == 4 - len(damaged)
    else:
        # No image says what size they should have.
        assert found == [(0, str(paths[0]))] and report.examples == 0
    with pytest.raises(DataCorruptionError, match=paths[damaged[0]].name):
        check(tmp_path)
