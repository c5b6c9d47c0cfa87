"""Mistakes that would otherwise corrupt data, or end inside NumPy or jax."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxaccel import data


def store_of(n=64, width=4096):
    image = np.repeat(np.arange(n, dtype=np.uint8)[:, None], width, axis=1)
    return data.ArrayStore({"image": image})


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_transform_may_reuse_its_buffer(prefetch):
    buffer = np.empty((8, 4096), np.uint8)

    def transform(batch, rng):
        buffer[...] = batch["image"]
        return {"image": buffer}

    store, plan = store_of(), data.BatchPlan(64, 8, shuffle=False, epochs=1)
    loader = data.Loader(store, plan, transform=transform, prefetch=prefetch)
    with data.to_device(loader) as batches:
        kept = list(batches)
    assert [int(b["image"][0, 0]) for b in kept] == list(range(0, 64, 8))
    assert all((b["image"] == b["image"][:, :1]).all() for b in kept)


def test_a_transform_may_change_its_batch_in_place():
    def transform(batch, rng):
        batch["image"] += 1
        return batch

    store, plan = store_of(), data.BatchPlan(64, 8, shuffle=False, epochs=1)
    with data.Loader(store, plan, transform=transform) as loader:
        got = np.concatenate([batch["image"][:, 0] for batch in loader])
    np.testing.assert_array_equal(got, np.arange(1, 65))
    assert store.columns["image"][0, 0] == 0


@pytest.mark.usefixtures("unchecked")
def test_a_loader_names_what_it_needs():
    store, plan = store_of(), data.BatchPlan(64, 8)
    with pytest.raises(TypeError, match="reads a Store, got dict"):
        data.Loader({"image": np.zeros(64)}, plan)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="follows a BatchPlan, got int"):
        data.Loader(store, 32)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="PRNG key.*got int"):
        data.random_crop_flip(0, np.zeros((1, 8, 8, 1), np.uint8))  # type: ignore


def test_masked_arrays_are_refused():
    with pytest.raises(TypeError, match="masked array"):
        data.open_store({"x": np.ma.masked_equal(np.arange(4), 2)})


def test_an_idx_header_with_255_axes(tmp_path):
    path = tmp_path / "x-ubyte"
    path.write_bytes(bytes([0, 0, 8, 255]) + b"\0\0\0\1" * 255 + b"x")
    with pytest.raises(data.DataCorruptionError, match="claims 255 axes"):
        data.open_store(path)


@pytest.mark.usefixtures("unchecked")
def test_resident_rows_by_a_list():
    resident = data.DeviceDataset(store_of())
    rows: Any = [3, 1]
    np.testing.assert_array_equal(resident.take(rows)["image"][:, 0], rows)
    with pytest.raises(IndexError, match="0 to 63"):
        resident.take([64, 0])  # type: ignore[arg-type]


def test_mean_and_std_against_float64(rng):
    image = rng.integers(0, 256, (2000, 3, 2, 3)).astype(np.uint8)
    mean, std = data.mean_and_std(data.ArrayStore({"image": image}))
    pixels = image.reshape(-1, 3) / 255
    np.testing.assert_allclose(mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std(0), rtol=1e-12)
    jax.block_until_ready(data.make_normalizer(mean, std)(image))


def test_mean_and_std_name_the_mistake():
    store = data.ArrayStore({"image": np.zeros((2, 2)), "label": np.zeros(2, np.uint8)})
    with pytest.raises(TypeError, match="'image' is float64"):
        data.mean_and_std(store)
    with pytest.raises(ValueError, match="no column 'x'"):
        data.mean_and_std(store, "x")
    with pytest.raises(ValueError, match="holds scalars"):
        data.mean_and_std(store, "label")
