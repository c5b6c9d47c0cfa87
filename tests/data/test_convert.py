"""convert: exact, whole or not at all, and going on after an interruption."""

import dataclasses
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    ColumnSpec,
    DataCorruptionError,
    Store,
    _bar,
    _conversion,
    convert,
    disk_cache,
    open_store,
)
from jaxaccel.data._open import FORMATS
from jaxaccel.data._partial import Partial, locked

N = 60
WRITABLE = sorted(name for name, known in FORMATS.items() if known.create)
SUFFIX = {
    name: (FORMATS[name].suffixes[0] if name != "npy" else "") for name in WRITABLE
}


class Decoded(Store):
    """A store whose reads cost something: it counts them, and can fail."""

    def __init__(
        self,
        arrays,
        label="a",
        fail_at=None,
        error: type[BaseException] = KeyboardInterrupt,
    ):
        super().__init__(
            {n: ColumnSpec(a.shape[1:], a.dtype) for n, a in arrays.items()}
        )
        self.arrays, self.label = arrays, label
        self.fail_at, self.error, self.read = fail_at, error, []

    def __len__(self):
        return len(next(iter(self.arrays.values())))

    def fingerprint(self):
        return self.label

    def _read(self, rows):
        if self.fail_at is not None and self.fail_at in rows:
            raise self.error
        self.read += rows.tolist()
        return {name: array[rows] for name, array in self.arrays.items()}


@pytest.fixture
def arrays(rng):
    return {
        "image": rng.integers(0, 256, (N, 6, 5, 3), dtype=np.uint8),
        "label": rng.integers(0, 9, N).astype(np.uint8),
    }


@pytest.fixture(autouse=True)
def note_always(monkeypatch):
    monkeypatch.setattr(_conversion, "_SECONDS_BETWEEN_NOTES", 0.0)


def check(store, arrays):
    assert len(store) == N and set(store.spec) == set(arrays)
    for name, array in store.take(np.arange(N)).items():
        assert array.dtype == arrays[name].dtype
        np.testing.assert_array_equal(array, arrays[name])
    store.close()


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def go(source, destination, **options):
    return convert(source, destination, batch_size=7, progress=False, **options)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("name", WRITABLE)
def test_every_format_holds_the_same_columns(tmp_path, arrays, name, plain):
    source = ArrayStore(arrays) if plain else Decoded(arrays)
    destination = tmp_path / f"x{SUFFIX[name]}"
    with go(source, destination) as store:
        check(store, arrays)
    with open_store(destination) as again:
        check(again, arrays)
    assert f"x{SUFFIX[name]}.partial" not in entries(tmp_path)


@pytest.mark.parametrize(
    ("name", "compression"),
    [(name, c) for name in WRITABLE for c in FORMATS[name].compressions],
)
def test_every_compression(tmp_path, arrays, name, compression):
    destination = tmp_path / f"x{SUFFIX[name]}"
    with go(ArrayStore(arrays), destination, compression=compression) as store:
        check(store, arrays)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("shards", [1, 3, 8])
def test_shards_share_the_examples_evenly(tmp_path, arrays, shards, plain):
    source = ArrayStore(arrays) if plain else Decoded(arrays)
    with go(source, tmp_path / "x.arrow", shards=shards) as store:
        check(store, arrays)
    names = [f"x-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    assert [name for name in entries(tmp_path) if name.endswith(".arrow")] == names
    with open_store(tmp_path / f"x-*-of-{shards:05d}.arrow") as again:
        check(again, arrays)
    sizes = [len(open_store(tmp_path / name)) for name in names]
    assert sum(sizes) == N and max(sizes) - min(sizes) <= 1


def test_a_store_that_ends_early_is_named(tmp_path, arrays):
    class Short(Decoded):
        def _scan(self, size):
            yield self._read(np.arange(10))

    with pytest.raises(ValueError, match="Short must read .* got uint8.10"):
        go(Short(arrays), tmp_path / "x")


def test_an_npy_folder_keeps_its_checksums_with_it(tmp_path, arrays):
    go(Decoded(arrays), tmp_path / "x")
    names = [f"{n}.npy{s}" for n in arrays for s in ("", ".crc.npz")]
    assert entries(tmp_path / "x") == sorted(names)
    assert entries(tmp_path) == ["x"]


def test_paths_and_mappings_are_opened(tmp_path, arrays):
    check(go(arrays, tmp_path / "one"), arrays)
    check(go(tmp_path / "one", tmp_path / "two.arrow"), arrays)
    check(go(str(tmp_path / "two.arrow"), str(tmp_path / "three")), arrays)


@pytest.mark.parametrize("stop", [1, 25, N - 1])
@pytest.mark.parametrize(
    ("name", "shards"), [("npy", None), ("arrow", None), ("arrow", 4)]
)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_conversion_goes_on(tmp_path, arrays, name, shards, stop, kind):
    source = Decoded(arrays, fail_at=stop, error=kind)
    destination = tmp_path / f"x{SUFFIX[name]}"
    with pytest.raises(kind):
        go(source, destination, shards=shards)
    assert entries(tmp_path) in ([f"{destination.name}.partial"], [])
    source.fail_at = None
    check(go(source, destination, shards=shards), arrays)
    # The batch that failed had not been decoded; nothing was decoded twice but the
    # rest of a batch that belongs to the next shard.
    assert set(source.read) == set(range(N))
    assert len(source.read) <= N + (7 if shards else 0)
    assert f"{destination.name}.partial" not in entries(tmp_path)


def test_an_interruption_while_writing_decodes_nothing_again(
    tmp_path, arrays, monkeypatch
):
    known, written = FORMATS["arrow"], []

    def create(path, spec, options):
        assert known.create is not None
        writer = known.create(path, spec, options)
        write = writer.write

        def fail(batch):
            if len(written) == 3:
                raise KeyboardInterrupt
            written.append(len(batch))
            write(batch)

        monkeypatch.setattr(writer, "write", fail)
        return writer

    broken = dataclasses.replace(known, create=create)
    source = Decoded(arrays)
    with monkeypatch.context() as patch:
        patch.setitem(FORMATS, "arrow", broken)
        with pytest.raises(KeyboardInterrupt):
            go(source, tmp_path / "x.arrow")
    assert source.read == list(range(N))
    assert entries(tmp_path) == ["x.arrow.partial"]
    check(go(source, tmp_path / "x.arrow"), arrays)
    assert source.read == list(range(N))


@pytest.mark.parametrize("change", ["source", "compression", "shards", "damage"])
def test_leftovers_of_another_conversion_are_not_used(tmp_path, arrays, change):
    source = Decoded(arrays, fail_at=40)
    options: dict[str, object] = {"shards": 2}
    with pytest.raises(KeyboardInterrupt):
        go(source, tmp_path / "x.arrow", **options)
    other = {name: array[::-1].copy() for name, array in arrays.items()}
    source = Decoded(other, label="b" if change == "source" else "a")
    if change == "compression":
        options["compression"] = "zstd"
    elif change == "shards":
        options["shards"] = 3
    elif change == "damage":
        source = Decoded(arrays)
        partial = tmp_path / "x.arrow.partial"
        for file in [*partial.glob("output/*.arrow"), *partial.glob("staging/*.npy")]:
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    check(
        go(source, tmp_path / "x.arrow", **options),
        arrays if change == "damage" else other,
    )


SCRIPT = """
import sys, time
import numpy as np
from jaxaccel.data import ColumnSpec, Store, _conversion, convert
_conversion._SECONDS_BETWEEN_NOTES = 0.0
class Slow(Store):
    def __init__(self):
        super().__init__({"x": ColumnSpec((1000,), np.dtype(np.uint8))})
    def __len__(self): return 100
    def fingerprint(self): return "slow"
    def _read(self, rows):
        print(*rows, flush=True)
        if rows[0] >= 50 and sys.argv[2] == "die":
            time.sleep(60)
        return {"x": np.repeat(rows[:, None].astype(np.uint8), 1000, 1)}
convert(Slow(), sys.argv[1], batch_size=5, progress=False)
"""


def script(destination, how):
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(destination), how],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def test_a_killed_conversion_goes_on(tmp_path):
    destination = tmp_path / "x.arrow"
    with script(destination, "die") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("50 "):
                break
        process.send_signal(signal.SIGKILL)
    assert entries(tmp_path) == ["x.arrow.partial"]
    with script(destination, "live") as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert [int(word) for word in output.split()] == list(range(50, 100))
    found = open_store(destination).take(np.arange(100))["x"]
    np.testing.assert_array_equal(found, np.repeat(np.arange(100)[:, None], 1000, 1))


LIMITED = """
import resource, sys
import numpy as np
from jaxaccel.data import convert
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
for path in sys.argv[1:]:
    try:
        convert({"x": np.zeros((1000, 1000), np.uint8)}, path, progress=False)
    except OSError as error:
        print(error)
"""


def test_a_full_disk_leaves_nothing_under_the_final_name(tmp_path):
    suffixes = ("", ".arrow", ".parquet", ".tfrecord", ".array_record", ".tar")
    names = [f"x{suffix}" for suffix in suffixes]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *(str(tmp_path / name) for name in names)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.stdout.count("takes about 1.000 MB") == len(names), done
    assert not set(names) & set(entries(tmp_path))
    for name in names:
        zeros = {"x": np.zeros((1000, 1000), np.uint8)}
        with convert(zeros, tmp_path / name, progress=False) as store:
            assert not store.take([999])["x"].any()


def test_a_small_disk_is_noticed_before_anything_is_read(tmp_path, arrays, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    source = Decoded(arrays)
    with pytest.raises(OSError, match=r"x.arrow needs 0.011 MB.*0.001 MB") as caught:
        go(source, tmp_path / "x.arrow")
    assert caught.value.errno == errno.ENOSPC
    assert not source.read and entries(tmp_path) == []


def test_existing_files_are_kept_unless_overwritten(tmp_path, arrays):
    other = {name: array[::-1].copy() for name, array in arrays.items()}
    for name in ("x", "x.arrow"):
        go(arrays, tmp_path / name)
        with pytest.raises(FileExistsError, match="overwrite=True"):
            go(other, tmp_path / name)
        check(open_store(tmp_path / name), arrays)
        check(go(other, tmp_path / name, overwrite=True), other)
        check(open_store(tmp_path / name), other)
    go(other, tmp_path / "y.arrow", shards=2)
    with pytest.raises(FileExistsError, match="y-00000-of-00002"):
        go(arrays, tmp_path / "y.arrow", shards=2)
    check(go(arrays, tmp_path / "y.arrow", shards=2, overwrite=True), arrays)


def test_a_failed_overwrite_keeps_the_old_files(tmp_path, arrays):
    go(arrays, tmp_path / "x.arrow")
    source = Decoded(arrays, label="b", fail_at=33, error=RuntimeError)
    with pytest.raises(RuntimeError):
        go(source, tmp_path / "x.arrow", overwrite=True)
    check(open_store(tmp_path / "x.arrow"), arrays)


@pytest.mark.parametrize("moves", range(4))
def test_publishing_goes_on_where_it_stopped(tmp_path, arrays, monkeypatch, moves):
    done, replace = [], os.replace

    def stop(source, target):
        if os.path.dirname(target) == str(tmp_path):
            if len(done) == moves:
                raise KeyboardInterrupt
            done.append(target)
        replace(source, target)

    source = Decoded(arrays)
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", stop)
        with pytest.raises(KeyboardInterrupt):
            go(source, tmp_path / "x.arrow", shards=2)
    check(go(source, tmp_path / "x.arrow", shards=2), arrays)
    assert "x.arrow.partial" not in entries(tmp_path)
    assert len(source.read) == N


@pytest.mark.parametrize("name", ["x", "x.arrow"])
def test_a_conversion_killed_while_it_probed_goes_on(
    tmp_path, arrays, name, monkeypatch
):
    def kill(work):
        # What it has made by then.
        probe = work._partial.folder / f"probe-{name}"
        probe.mkdir() if name == "x" else probe.write_bytes(b"ARROW1")
        raise SystemExit

    store, path = Decoded(arrays), tmp_path / name
    with monkeypatch.context() as patch:
        patch.setattr(_conversion._Conversion, "probe", kill)
        patch.setattr(Partial, "discard", lambda self: None)
        with pytest.raises(SystemExit):
            convert(store, path, progress=False)
    assert list(tmp_path.glob("x*.partial/probe-x*"))
    check(convert(store, path, progress=False), arrays)
    assert not list(tmp_path.glob("*.partial*"))


@pytest.mark.parametrize("again", ["convert", "overwrite", "cache"])
def test_what_was_given_up_is_removed_later(tmp_path, arrays, again, monkeypatch):
    def kill(path, remove=shutil.rmtree, **options):
        if ".partial." in os.path.basename(path):
            raise SystemExit
        remove(path, **options)

    store, path = Decoded(arrays), tmp_path / "x"
    other = tmp_path / "xx.partial.0123abcd"
    other.mkdir()

    def make(**options):
        if again == "cache":
            disk_cache(store, tmp_path, progress=False).close()
        else:
            convert(store, path, progress=False, **options).close()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", kill)
        with pytest.raises(SystemExit):
            make()
    assert len(list(tmp_path.glob("*.partial.*"))) == 2
    if again == "convert":
        with pytest.raises(FileExistsError):
            make()
    else:
        make(**({"overwrite": True} if again == "overwrite" else {}))
    # That of another destination stays.
    assert list(tmp_path.glob("*.partial*")) == [other]


def test_two_conversions_to_one_destination_exclude_each_other(tmp_path, arrays):
    with locked(tmp_path / "x", wait=False):
        with pytest.raises(FileExistsError, match="another process"):
            go(arrays, tmp_path / "x")
    check(go(arrays, tmp_path / "x"), arrays)


def test_a_damaged_source_is_reported(tmp_path, arrays):
    go(arrays, tmp_path / "x")
    file = tmp_path / "x" / "image.npy"
    content = bytearray(file.read_bytes())
    content[500] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataCorruptionError, match="image.npy"):
        go(tmp_path / "x", tmp_path / "y.arrow")
    assert entries(tmp_path) == ["x"]


WRONG = {
    "unknown format": ({"format": "hdf5"}, "x", ValueError, "one of"),
    "unknown suffix": ({}, "x.jpg", ValueError, "no format has the suffix '.jpg'"),
    "packed tar": ({}, "x.tar.gz", ValueError, "leave .gz out"),
    "packed records": ({}, "x.tfrecord.gz", ValueError, "array_record"),
    "packed by name": (
        {"format": "arrow"},
        "x.arrow.ZST",
        ValueError,
        "leave .ZST out",
    ),
    "packed shards": ({"shards": 2}, "x.tgz", ValueError, "leave .tgz out"),
    "contradiction": ({"format": "arrow"}, "x.parquet", ValueError, "contradict"),
    "compression": ({"compression": "brotli"}, "x.arrow", ValueError, "'brotli'"),
    "npy compression": ({"compression": "zstd"}, "x", ValueError, "leave it out"),
    "address": ({}, "s3://bucket/x", ValueError, "a local disk, not to s3://bucket"),
    "npy suffix": ({}, "x.npy", ValueError, "leave the suffix out"),
    "npy shards": ({"shards": 2}, "x", ValueError, "no shards"),
    "no shards": ({"shards": 0}, "x.arrow", ValueError, "at least 1"),
    "many shards": ({"shards": N + 1}, "x.arrow", ValueError, "at most"),
    "no folder": ({}, "none/x", FileNotFoundError, "create it first"),
    "store options": ({"image_mode": "L"}, "x", ValueError, "open_store"),
    "batch size": ({"batch_size": 0}, "x", ValueError, "batch_size"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_before_any_work(tmp_path, arrays, case):
    options, name, kind, words = WRONG[case]
    source = Decoded(arrays)
    with pytest.raises(kind, match=words):
        path = name if "://" in name else tmp_path / name
        convert(source, path, progress=False, **options)
    assert not source.read and entries(tmp_path) == []


def test_suffixes_that_are_recommended_are_written(tmp_path, arrays):
    with pytest.raises(ValueError, match="no format") as caught:
        go(arrays, tmp_path / "x.jpg")
    suffixes = re.findall(r"'(\.\w+)'", str(caught.value))[1:]
    assert set(suffixes) >= set(SUFFIX.values()) - {""}
    for suffix in suffixes:
        check(go(arrays, tmp_path / f"x{suffix}"), arrays)


def test_resizing_needs_a_decoder(tmp_path, arrays):
    with pytest.raises(ValueError, match="while they are decoded"):
        go(arrays, tmp_path / "x", image_size=(4, 4))


@pytest.mark.parametrize("name", ["x", "x.tfrecord"])
def test_images_are_decoded_and_resized_once(tmp_path, rng, name):
    image = pytest.importorskip("PIL.Image")
    colours = rng.integers(0, 256, (6, 3), dtype=np.uint8)
    for number, colour in enumerate(colours):
        folder = tmp_path / "photos" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.broadcast_to(colour, (20 + number, 30, 3))
        image.fromarray(pixels).save(folder / f"{number}.png")
    store = go(tmp_path / "photos", tmp_path / name, image_size=(8, 9))
    batch = store.take(np.arange(6))
    assert batch["image"].shape == (6, 8, 9, 3)
    # One class after the other; a picture of one colour keeps it.
    np.testing.assert_array_equal(batch["image"][:, 4, 4], colours[[0, 2, 4, 1, 3, 5]])
    assert batch["label"].tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(FileExistsError):
        go(tmp_path / "photos", tmp_path / name, image_size=(4, 4))
    store.close()


def test_a_format_that_cannot_hold_the_columns_says_so_at_once(
    tmp_path, arrays, monkeypatch
):
    def refuse(path, spec, options):
        raise ValueError("no such columns here")

    broken = dataclasses.replace(FORMATS["arrow"], create=refuse)
    monkeypatch.setitem(FORMATS, "arrow", broken)
    source = Decoded(arrays)
    with pytest.raises(ValueError, match="no such columns"):
        go(source, tmp_path / "x.arrow")
    assert not source.read and entries(tmp_path) == []


class Stream:
    def __init__(self, terminal):
        self.text, self.terminal = "", terminal

    def isatty(self):
        return self.terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@pytest.mark.parametrize("rich", [True, False])
@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_as_the_place_allows(monkeypatch, terminal, rich):
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setattr(_bar, "_SECONDS_BETWEEN_LINES", 0.0)
    stream = Stream(terminal)
    with _bar.Bar(200, "convert to arrow", file=stream) as bar:
        bar.update(50, "shard 1")
        bar.update(200)
    assert "convert to arrow" in stream.text and "100%" in stream.text
    if not (rich and terminal):
        assert stream.text.splitlines()[0].startswith("convert to arrow: 25%, shard 1,")


def test_quick_or_silent_work_says_nothing(monkeypatch):
    stream = Stream(False)
    with _bar.Bar(2, "convert", file=stream) as bar:
        bar.update(1)
    monkeypatch.setattr(_bar, "_SECONDS_BETWEEN_LINES", 0.0)
    with _bar.Bar(2, "convert", enabled=False, file=stream) as bar:
        bar.update(1)
    assert stream.text == ""


def test_a_waiting_lock_is_taken_over(tmp_path):
    order = []

    def work(number):
        with locked(tmp_path / "x", wait=True):
            order.append(number)
            order.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert order[::2] == order[1::2] and sorted(order[::2]) == [0, 1, 2, 3]
