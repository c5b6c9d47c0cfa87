"""Checksums of examples, by which a loader's state knows its data."""

import io
import json
import tarfile

import numpy as np
import pytest

from jaxaccel.data import (
    BatchPlan,
    ColumnSpec,
    Loader,
    convert,
    disk_cache,
    open_store,
)
from jaxaccel.data._state import sample_content

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")

SHAPED = {"npy": "", "arrow": ".arrow", "parquet": ".parquet", "tar": ".tar",
          "tfrecord": ".tfrecord", "array_record": ".array_record"}  # fmt: skip


@pytest.mark.parametrize("changed", ["image", "label"])
def test_files_of_all_formats_tell_other_data_apart(tmp_path, changed):
    plan = BatchPlan(40, 4, epochs=1)
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 3, 1), np.uint8)
    arrays = {"image": images, "label": np.arange(40, dtype=np.uint16)}
    others = {**arrays, changed: arrays[changed][::-1].copy()}
    states, refused = [], 0
    for name, suffix in SHAPED.items():
        path = tmp_path / f"{name}{suffix}"
        with Loader(convert(arrays, path, progress=False), plan) as loader:
            states.append(json.loads(json.dumps(loader.get_state())))
    for name, suffix in SHAPED.items():
        with Loader(open_store(tmp_path / f"{name}{suffix}"), plan) as loader:
            # The same data, in whatever format.
            for state in states:
                loader.set_state(state)
        other = convert(others, tmp_path / f"other-{name}{suffix}", progress=False)
        with Loader(other, plan) as loader:
            for state in states:
                with pytest.raises(
                    ValueError, match=f"column '{changed}': saved [0-9]"
                ):
                    loader.set_state(state)
                refused += 1
    assert refused == 36


def encoded_folder(folder, seed):
    pil = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(seed)
    for row in range(8):
        path = folder / "ab"[row // 4] / f"{row}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pil.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    return sorted(folder.rglob("*.jpg"))


def packed(files, path):
    contents, labels = [f.read_bytes() for f in files], [0] * 4 + [1] * 4
    if path.suffix == ".tar":
        with tarfile.open(path, "w") as tar:
            for row, (content, label) in enumerate(zip(contents, labels, strict=True)):
                for end, data in (("jpg", content), ("cls", b"%d" % label)):
                    member = tarfile.TarInfo(f"{row}.{end}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    else:
        table = pa.table({"image": contents, "label": pa.array(labels, pa.uint8())})
        if path.suffix == ".parquet":
            pq.write_table(table, path)
        else:
            feather.write_feather(table, path, compression="uncompressed")
    narrow = {"label": ColumnSpec((), np.dtype(np.uint8))}
    image = {"image": ColumnSpec((8, 8, 3), np.dtype(np.uint8))}
    return open_store(path, columns=image | narrow)


def test_encoded_images_are_told_apart_without_decoding(tmp_path, monkeypatch):
    plan, states = BatchPlan(8, 4, epochs=1), {}
    files = encoded_folder(tmp_path / "x", 0)
    stores = [open_store(tmp_path / "x")]
    stores += [
        packed(files, tmp_path / f"x{e}") for e in (".tar", ".parquet", ".arrow")
    ]
    other = open_store(encoded_folder(tmp_path / "y", 1)[0].parents[1])
    for module in ("_arrow_buffers", "_image_folder", "_tar"):
        monkeypatch.setattr(f"jaxaccel.data.{module}.decode_images", None)
    for store in stores:
        with Loader(store, plan, prefetch=0) as loader:
            states[store] = loader.get_state()
            for state in states.values():
                loader.set_state(state)
    with Loader(other, plan, prefetch=0) as loader:
        for state in states.values():
            with pytest.raises(ValueError, match=r"column 'image \(encoded\)': saved"):
                loader.set_state(state)
    monkeypatch.undo()
    with Loader(disk_cache(stores[1], tmp_path / "c", progress=False), plan) as loader:
        for state in states.values():
            loader.set_state(state)


def test_a_sample_of_shards_and_slices_is_that_of_the_whole(tmp_path):
    arrays = {"x": np.random.default_rng(0).integers(0, 99, (50, 7))}
    narrow = {"x": ColumnSpec((7,), np.dtype(np.uint8))}
    whole = sample_content(open_store(arrays, columns=narrow))
    assert set(whole) == {"first", "spread"}
    for suffix in (".arrow", ".parquet", ".tar"):
        path = tmp_path / f"x{suffix}"
        convert(arrays, path, shards=3, progress=False)
        pattern = tmp_path / f"x-*-of-00003{suffix}"
        store = open_store(pattern, columns=narrow)
        found = sample_content(store)
        assert found == {place: whole[place] for place in found}
        part = sample_content(store[3::2])
        assert part == {
            place: sample_content(open_store({"x": arrays["x"][3::2].astype("u1")}))[
                place
            ]
            for place in found
        }


def test_floats_alone_have_no_content():
    assert sample_content(open_store({"x": np.zeros((5, 2))})) == {}


@pytest.mark.parametrize("content", [3, [1], None, {}, {"first": 5}, {"else": {}}])
def test_content_of_another_kind_is_not_compared(content):
    store = open_store({"x": np.arange(12, dtype=np.uint8)})
    with Loader(store, BatchPlan(12, 4), prefetch=0) as loader:
        state = json.loads(json.dumps(loader.get_state()))
        state["fingerprint"]["content"] = content
        loader.set_state(state)
