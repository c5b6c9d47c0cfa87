"""DeviceDataset: what the contract suite does not say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel.data import ArrayStore, BatchPlan, DeviceDataset


@pytest.fixture
def store(rng):
    return ArrayStore(
        {
            "image": rng.integers(0, 256, (64, 4, 4, 1), dtype=np.uint8),
            "label": np.arange(64, dtype=np.uint8),
        }
    )


def test_take_inside_jit_as_an_argument(store):
    dataset = DeviceDataset(store)
    rows = np.array([[3, 0], [63, 3]], np.int32)
    lowered = jax.jit(lambda d, i: d.take(i)).lower(dataset, rows)
    batch = lowered.compile()(dataset, rows)
    assert batch["image"].shape == (2, 2, 4, 4, 1)
    np.testing.assert_array_equal(batch["image"], store.columns["image"][rows])
    np.testing.assert_array_equal(batch["label"], rows)
    # The data must not have become part of the program.
    assert len(lowered.as_text()) < 10_000


def test_an_epoch_as_one_scan(store):
    dataset = DeviceDataset(store)
    plan = BatchPlan(64, 16, epochs=1)
    order = np.stack([plan.indices(step) for step in range(4)]).astype(np.int32)

    @jax.jit
    def epoch(dataset, order):
        def step(total, rows):
            return total + dataset.take(rows)["image"].astype(jnp.int32).sum(), None

        return jax.lax.scan(step, jnp.int32(0), order)[0]

    assert int(epoch(dataset, order)) == int(store.columns["image"].sum())


def test_it_is_a_pytree_with_named_leaves(store):
    dataset = DeviceDataset(store)
    paths = [
        jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(dataset)
    ]
    assert paths == ["['image']", "['label']"]
    same = jax.tree.map(lambda x: x, dataset)
    assert isinstance(same, DeviceDataset) and len(same) == 64
    assert same.spec == dict(store.spec) and "64 examples" in repr(same)
    abstract = jax.eval_shape(lambda d: d, dataset)
    assert abstract.columns["image"].shape == (64, 4, 4, 1)


@pytest.mark.parametrize("offset", [0, 1])
def test_the_store_is_copied(offset):
    raw = np.zeros(4096 + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    source = raw[start : start + 4096].reshape(64, 64)
    dataset = DeviceDataset(ArrayStore({"x": source}))
    source[:] = 9
    assert not np.asarray(dataset.columns["x"]).any()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("data", [PartitionSpec("data"), PartitionSpec()])
@pytest.mark.parametrize("rows", [PartitionSpec("data"), PartitionSpec(), None])
def test_sharding(store, axis_type, data, rows):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    dataset = DeviceDataset(store, sharding=NamedSharding(mesh, data))
    where = None if rows is None else NamedSharding(mesh, rows)
    plan = BatchPlan(64, 16, epochs=1)
    with dataset.batches(plan, sharding=where) as batches:
        for step, batch in enumerate(batches):
            np.testing.assert_array_equal(
                batch["image"], store.columns["image"][plan.indices(step)]
            )
            if where is not None:
                assert batch["image"].sharding.is_equivalent_to(where, 4)


def test_only_indices_travel_and_nothing_is_compiled_twice(store):
    dataset = DeviceDataset(store)
    with dataset.batches(BatchPlan(64, 12, epochs=3, remainder="pad")) as batches:
        assert len(batches) == 18 and batches
        for batch in batches:
            assert batch["mask"].dtype == bool and not batch["image"].committed
    assert batches.bytes_put == 18 * 12 * 4


def test_too_large_is_refused(store):
    with pytest.raises(ValueError, match=r"takes 1088 bytes.*1087 \(max_bytes\)"):
        DeviceDataset(store, max_bytes=1087)
    assert len(DeviceDataset(store, max_bytes=1088)) == 64
    mesh = jax.make_mesh((8,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    assert len(DeviceDataset(store, max_bytes=136, sharding=sharding)) == 64
    huge = ArrayStore({"x": np.broadcast_to(np.uint8(0), (3, 1 << 30))})
    if not jax.local_devices()[0].memory_stats():
        with pytest.raises(ValueError, match="default for cpu.*Loader and to_device"):
            DeviceDataset(huge)


def test_the_devices_own_memory_is_asked(store, monkeypatch):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 2000, "bytes_in_use": 500}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(ValueError, match="more than 1000 .max_fraction=0.5 of 2000"):
        DeviceDataset(store)
    with pytest.raises(ValueError, match="more than 100 "):
        DeviceDataset(store, max_fraction=0.05)
    assert len(DeviceDataset(store, max_fraction=0.9)) == 64


def test_bad_arguments(store):
    dataset = DeviceDataset(store)
    with pytest.raises(IndexError, match="0 to 63, got -1 to 64"):
        dataset.take(np.array([-1, 64]))
    with pytest.raises(TypeError, match="integers, got float32"):
        dataset.take(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"max_fraction must be in \(0, 1\], got 0"):
        DeviceDataset(store, max_fraction=0.0)
    with pytest.raises(ValueError, match="plan is for 60 examples"):
        dataset.batches(BatchPlan(60, 4))
    with pytest.raises(TypeError, match="'x' has dtype float64"):
        DeviceDataset(ArrayStore({"x": np.zeros(3)}))
    sharding = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
    with pytest.raises(ValueError, match=r"'x' of shape \(9,\).*divisible"):
        DeviceDataset(ArrayStore({"x": np.zeros(9, np.uint8)}), sharding=sharding)
