"""Checksums beside data files."""

import concurrent.futures
import os
import pickle
import zlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel.data import DataCorruptionError
from jaxaccel.data._sidecar import (
    BLOCK,
    BlockCrcs,
    Checksums,
    sidecar_path,
    write_checksums,
)


@pytest.fixture
def file(tmp_path, rng):
    path = tmp_path / "data.bin"
    path.write_bytes(rng.bytes(5 * BLOCK + 123))
    write_checksums(path)
    return path


def mapped(path):
    return np.memmap(path, np.uint8, "r")


def load(path):
    found = Checksums.load(path)
    assert found is not None
    return found


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def ranges(*pairs):
    return np.array([pair[0] for pair in pairs]), np.array([pair[1] for pair in pairs])


def test_the_sidecar_holds_zlibs_checksum_of_each_block(file):
    content = file.read_bytes()
    expected = [
        zlib.crc32(content[start : start + BLOCK])
        for start in range(0, len(content), BLOCK)
    ]
    with np.load(sidecar_path(file)) as saved:
        assert saved["crc32"].tolist() == expected and len(expected) == 6
        assert int(saved["size"]) == len(content)
    assert sorted(os.listdir(file.parent)) == ["data.bin", "data.bin.crc.npz"]


def test_without_a_sidecar_there_is_nothing_to_check(tmp_path):
    assert Checksums.load(tmp_path / "none.bin") is None


def test_intact_files_pass_and_an_empty_one_has_no_block(file, tmp_path):
    load(file).check_all(mapped(file))
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    write_checksums(empty)
    load(empty).check_all(np.empty(0, np.uint8))
    assert load(empty).crcs.shape == (0,)


@pytest.mark.parametrize("block", range(6))
def test_a_flipped_bit_is_found_in_its_block_only(file, block):
    flip(file, block * BLOCK + 77)
    checksums, data = load(file), mapped(file)
    starts = np.arange(6) * BLOCK
    stops = np.minimum(starts + BLOCK, len(data))
    others = np.delete(np.arange(6), block)
    checksums.check(data, starts[others], stops[others])
    with pytest.raises(DataCorruptionError, match="checksum") as caught:
        checksums.check(data, starts[::-1], stops[::-1], np.arange(60, 66)[::-1])
    assert caught.value.offset == block * BLOCK
    assert caught.value.record == 60 + block
    # Again: a block that failed does not count as seen.
    with pytest.raises(DataCorruptionError):
        checksums.check_all(data)


def test_blocks_between_two_that_were_compared_are_compared(file):
    flip(file, BLOCK + 5)
    checksums, data = load(file), mapped(file)
    ends = np.array([0, 2 * BLOCK])
    checksums.check(data, ends, ends + 10)
    checksums.check(data, np.array([3, len(data)]), np.array([BLOCK, len(data)]))
    with pytest.raises(DataCorruptionError, match="checksum"):
        checksums.check(data, np.array([10]), np.array([2 * BLOCK + 10]))


@hypothesis.given(st.data())
def test_exactly_the_touched_blocks_are_compared(tmp_path_factory, data):
    # Damage everywhere: whatever is touched must fail, nothing else is looked at.
    folder = tmp_path_factory.mktemp("blocks")
    path = folder / "x"
    size = 11 * BLOCK + 5
    content = np.zeros(size, np.uint8)
    path.write_bytes(content.tobytes())
    write_checksums(path)
    checksums = load(path)
    bad = data.draw(st.integers(0, 11))
    content[min(bad * BLOCK + 3, size - 1)] = 1
    pairs = data.draw(
        st.lists(st.tuples(st.integers(0, size), st.integers(0, size)), max_size=6)
    )
    pairs = [(min(pair), max(pair)) for pair in pairs]
    touched = {
        block
        for start, stop in pairs
        if stop > start
        for block in range(start // BLOCK, (stop - 1) // BLOCK + 1)
    }
    starts, stops = ranges(*pairs) if pairs else (np.empty(0, int),) * 2
    if bad in touched:
        with pytest.raises(DataCorruptionError) as caught:
            checksums.check(content, starts, stops)
        assert caught.value.offset == bad * BLOCK
    else:
        checksums.check(content, starts, stops)


def test_a_block_is_compared_once(file):
    checksums, data = load(file), mapped(file)
    checksums.check(data, *ranges((0, 10)))
    flip(file, 5)
    checksums.check(data, *ranges((0, 10)))
    with pytest.raises(DataCorruptionError):
        load(file).check(data, *ranges((0, 10)))


def test_a_pickled_copy_still_checks(file):
    copy = pickle.loads(pickle.dumps(load(file)))
    flip(file, 2 * BLOCK)
    with pytest.raises(DataCorruptionError):
        copy.check_all(mapped(file))


def test_threads_may_share_the_checksums(file):
    flip(file, 4 * BLOCK)
    checksums, data = load(file), mapped(file)
    starts = np.arange(0, 5 * BLOCK, 1000)

    def read(start):
        try:
            checksums.check(data, starts[start : start + 1], starts[start] + [1000])
        except DataCorruptionError as error:
            return error.offset
        return None

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(read, range(len(starts))))
    overlaps = (starts < 5 * BLOCK) & (starts + 1000 > 4 * BLOCK)
    assert [bool(offset) for offset in found] == overlaps.tolist()


@pytest.mark.parametrize("change", [-1, 1, -BLOCK])
def test_another_size_is_refused_when_loading(file, change):
    size = file.stat().st_size
    os.truncate(file, size + change)
    with pytest.raises(DataCorruptionError, match="on purpose") as caught:
        Checksums.load(file)
    assert caught.value.path == str(file)
    assert caught.value.offset == min(size, size + change)


@pytest.mark.parametrize("keep", [0, 1, 40, 200, -1])
def test_a_truncated_sidecar_is_named(file, keep):
    content = sidecar_path(file).read_bytes()
    sidecar_path(file).write_bytes(content[:keep])
    with pytest.raises(DataCorruptionError, match="unreadable checksums") as caught:
        Checksums.load(file)
    assert caught.value.path == str(sidecar_path(file))


def test_flipped_bits_in_a_sidecar_never_pass_for_other_checksums(file):
    content = sidecar_path(file).read_bytes()
    expected = load(file).crcs
    for offset in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[offset] ^= 0x10
        sidecar_path(file).write_bytes(damaged)
        try:
            found = Checksums.load(file)
        except ValueError:
            continue
        assert found is not None
        np.testing.assert_array_equal(found.crcs, expected)


def test_another_version_is_refused_with_the_remedy(file):
    with np.load(sidecar_path(file)) as saved:
        block, size, crc32 = saved["block"], saved["size"], saved["crc32"]
    np.savez(sidecar_path(file), version=2, block=block, size=size, crc32=crc32)
    with pytest.raises(ValueError, match="write_index=True"):
        Checksums.load(file)


def test_a_failing_write_leaves_no_trace(file, monkeypatch):
    before = sidecar_path(file).read_bytes()

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_checksums(file)
    assert sidecar_path(file).read_bytes() == before
    assert len(os.listdir(file.parent)) == 2


@hypothesis.given(st.lists(st.integers(0, 3 * BLOCK), max_size=5))
def test_bytes_may_come_in_any_pieces(tmp_path_factory, cuts):
    content = np.random.default_rng(1).bytes(2 * BLOCK + 99)
    path = tmp_path_factory.mktemp("pieces") / "x"
    path.write_bytes(content)
    write_checksums(path)
    crcs, start = BlockCrcs(), 0
    for stop in [*sorted(cuts), len(content)]:
        crcs.update(content[start:stop])
        start = max(start, min(stop, len(content)))
    assert crcs.size == len(content)
    np.testing.assert_array_equal(crcs.values(), load(path).crcs)
