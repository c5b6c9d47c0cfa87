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


# Type checkers would notice, too.
untyped: Any = data

MISTAKES: dict[str, tuple[Any, str]] = {
    "disk_cache": (lambda s: untyped.disk_cache("v.parquet"), "takes a Store, got str"),
    "memory_cache": (
        lambda s: untyped.memory_cache("v", max_bytes=1),
        "memory_cache takes a Store, got str",
    ),
    "mean_and_std": (lambda s: untyped.mean_and_std({}), "takes a Store, got dict"),
    "dataset": (lambda s: untyped.DeviceDataset({}), "takes a Store, got dict"),
    "dataset_sharding": (
        lambda s: untyped.DeviceDataset(s, sharding="d"),
        "sharding must be .* got 'd'",
    ),
    "device_sharding": (
        lambda s: untyped.to_device([], sharding="d"),
        "sharding must be .* got 'd'",
    ),
    "device_store": (lambda s: untyped.to_device(s), "got ArrayStore; pass Loader"),
    "device_dict": (
        lambda s: untyped.to_device({"x": np.ones(2)}),
        "one batch as .batch",
    ),
    "device_number": (lambda s: untyped.to_device(3), "iterable of batches, got int"),
    "verify_dict": (lambda s: untyped.verify({}), "path of a file or folder, got dict"),
    "verify_store": (
        lambda s: untyped.verify(s),
        "path of a file or folder, got Array",
    ),
    "columns": (
        lambda s: untyped.open_store("x", columns=["label"]),
        r"maps names to what they hold, .* got \['label'\]",
    ),
    "rows": (
        lambda s: untyped.DeviceDataset(s).rows(untyped.BatchPlan(4, 2), 3),
        r"steps must be a range, as range\(3\), got 3",
    ),
    "images": (
        lambda s: untyped.random_crop_flip(jax.random.key(0), [[1]]),
        "images must be an array, got list",
    ),
    "bits": (
        lambda s: untyped.unpack_bits(np.zeros((1, 2), np.uint8), 9),
        r"shape must be a tuple, such as \(9,\), got 9",
    ),
    "shuffle": (
        lambda s: untyped.BatchPlan(4, 2, shuffle="no"),
        "shuffle must be True or False, got 'no'",
    ),
    "mixed_shuffle": (
        lambda s: untyped.MixturePlan((4,), (1,), 2, shuffle="no"),
        "shuffle must be True or False, got 'no'",
    ),
    "transform": (
        lambda s: untyped.Loader(s, untyped.BatchPlan(4, 2), transform="x"),
        "transform must be a function .* got str",
    ),
    "grain_transform": (
        lambda s: untyped.as_grain(s, untyped.BatchPlan(4, 2), transform="x"),
        "transform must be a function .* got str",
    ),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_type_is_named(call, words):
    with pytest.raises(TypeError, match=words):
        call(store_of(4, 2))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda k, x: untyped.open_store("x", image_size=8),
            "image_size must be .height",
        ),
        (lambda k, x: untyped.random_erasing(k, x, fill="nois"), "'noise', got 'nois'"),
        (lambda k, x: untyped.random_erasing(k, x, scale=0.5), "two numbers.*got 0.5"),
        (lambda k, x: untyped.windows(np.arange(9), 3, name=""), "non-empty string"),
        (
            lambda k, x: untyped.WeightedPlan(np.full(3, 1e308), 2),
            "positive finite sum, got inf",
        ),
        (
            lambda k, x: untyped.Loader(
                store_of(4, 2), untyped.WeightedPlan(np.ones(3), 2)
            ),
            "holds 4; build it for this store",
        ),
    ],
)
def test_a_wrong_value_is_named(key, call, words):
    with pytest.raises(ValueError, match=words):
        call(key, np.zeros((1, 8, 8, 1), np.uint8))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({}, "got an empty one"),
        ({"id": np.array(["a"] * 2)}, "'id' has dtype <U1"),
        ({"id": np.array([{}] * 2)}, "'id' has dtype object"),
    ],
)
def test_what_a_transform_returns_is_named(result, words):
    plan = untyped.BatchPlan(4, 2)
    transform: Any = lambda batch, rng: result  # noqa: E731
    with untyped.Loader(
        store_of(4, 2), plan, transform=transform, prefetch=0
    ) as loader:
        with pytest.raises(TypeError, match=words):
            next(loader)


def test_a_sharding_of_more_axes_than_a_column_is_named():
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    sharding = jax.NamedSharding(mesh, jax.P("a", "b"))
    store = data.ArrayStore({"label": np.zeros(4, np.uint8)})
    words = "'label' of shape .4,. cannot be laid out.*no axis that the column lacks"
    with pytest.raises(ValueError, match=words):
        data.DeviceDataset(store, sharding=sharding)
    with data.Loader(store, data.BatchPlan(4, 4)) as loader:
        with pytest.raises(ValueError, match=words):
            next(data.to_device(loader, sharding=sharding))
