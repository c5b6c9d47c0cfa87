"""DeviceDataset: what the contract suite does not say."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    DeviceDataset,
    Loader,
    Store,
    StreamPlan,
    _residency,
    make_epoch_scan,
)
from jaxaccel.train import TrainState, make_train_step, masked_mean


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


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_an_epoch_as_one_scan_equals_the_steps(store, remainder):
    dataset = DeviceDataset(store)
    plan = BatchPlan(64, 24, epochs=2, remainder=remainder)

    def step(state, batch):
        image = batch["image"].astype(jnp.int32)
        counts = batch.get("mask", jnp.ones(24, bool))
        kept = jnp.where(counts[:, None, None, None], image, 0)
        weight = jnp.arange(24, dtype=jnp.int32)[:, None, None, None]
        state = state + (kept * weight).sum()
        return state, {"sum": kept.sum(), "count": counts.sum(dtype=jnp.int32)}

    epoch = make_epoch_scan(step)
    state, metrics = jnp.int32(0), []
    for e in range(2):
        n = plan.steps_per_epoch
        rows = dataset.rows(plan, range(e * n, (e + 1) * n))
        state, values = epoch(state, dataset, rows)
        metrics.append(values)
    expected, sums, counted = 0, [], []
    for t in range(len(plan)):
        image = store.columns["image"][plan.indices(t)].astype(np.int64)
        image = image * plan.mask(t)[:, None, None, None]
        expected += (image * np.arange(24)[:, None, None, None]).sum()
        sums.append(image.sum())
        counted.append(plan.mask(t).sum())
    assert int(state) == expected
    np.testing.assert_array_equal(np.concatenate([m["sum"] for m in metrics]), sums)
    np.testing.assert_array_equal(
        np.concatenate([m["count"] for m in metrics]), counted
    )
    # A stopped run goes on in the middle of an epoch.
    half, _ = epoch(jnp.int32(0), dataset, dataset.rows(plan, range(0, 3)))
    whole, _ = epoch(half, dataset, dataset.rows(plan, range(3, len(plan))))
    assert int(whole) == expected


def test_a_train_step_in_a_scan(store):
    dataset, plan = DeviceDataset(store), BatchPlan(64, 16, epochs=1)
    tx = optax.sgd(0.1)

    def loss_fn(params, model_state, batch, key):
        x = batch["image"].astype(jnp.float32).mean(axis=(1, 2, 3)) / 255
        noise = jax.random.uniform(key)
        return masked_mean((params * x - noise) ** 2, batch), (model_state, {})

    step = make_train_step(loss_fn, tx)
    epoch = make_epoch_scan(step)

    def start():
        return TrainState.create(jnp.array(1.0), tx, key=jax.random.key(0))

    scanned, metrics = epoch(start(), dataset, dataset.rows(plan))
    state, losses = start(), []
    with dataset.batches(plan) as batches:
        for batch in batches:
            state, values = step(state, batch)
            losses.append(values["loss"])
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-6)
    np.testing.assert_allclose(scanned.params, state.params, rtol=1e-6)
    assert int(scanned.step) == 4


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_scan_over_several_devices(store, axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    dataset = DeviceDataset(store, sharding=everywhere)
    where = NamedSharding(mesh, PartitionSpec("data"))
    plan = BatchPlan(64, 16, epochs=1)
    rows = dataset.rows(plan, sharding=where)
    assert rows["index"].sharding.is_equivalent_to(
        NamedSharding(mesh, PartitionSpec(None, "data")), 2
    )

    def step(total, batch):
        labels = batch["label"].astype(jnp.int32)
        return total + labels.sum(), labels

    total = jax.device_put(jnp.int32(0), everywhere)
    total, labels = make_epoch_scan(step)(total, dataset, rows)
    assert int(total) == 64 * 63 // 2
    expected = [plan.indices(t) for t in range(4)]
    np.testing.assert_array_equal(labels, expected)


@dataclasses.dataclass(frozen=True, eq=False)
class Marked(StreamPlan):
    """Adds columns of its own, one of them named as the indices are."""

    @property
    def extra_columns(self):
        return (*super().extra_columns, "index", "noise")

    def extras(self, step):
        noise = np.random.default_rng(step).random((self.local_batch_size, 3))
        index = self.indices(step).astype(np.uint8)
        extra = {"index": index, "noise": noise.astype(np.float32)}
        return {**super().extras(step), **extra}


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_the_columns_that_a_plan_adds_travel_along(store, remainder):
    dataset, plan = DeviceDataset(store), Marked(64, 12, epochs=1, remainder=remainder)
    with Loader(store, plan) as loader:
        expected = list(loader)
    assert set(expected[0]) >= {"image", "is_first", "index", "noise"}
    with dataset.batches(plan) as batches:
        for host, batch in zip(expected, batches, strict=True):
            assert set(batch) == set(host)
            for name, array in host.items():
                assert batch[name].dtype == array.dtype
                np.testing.assert_array_equal(batch[name], array)
    epoch = make_epoch_scan(lambda state, batch: (state, batch), donate=False)
    _, scanned = epoch(jnp.int32(0), dataset, dataset.rows(plan))
    for name in expected[0]:
        whole = np.stack([batch[name] for batch in expected])
        np.testing.assert_array_equal(scanned[name], whole)


class Counted(Store):
    """A store of no arrays, which notes what is read of it."""

    def __init__(self, store):
        super().__init__(store.spec)
        self.store, self.reads = store, []

    def __len__(self):
        return len(self.store)

    def fingerprint(self):
        return "counted"

    def _read(self, rows):
        self.reads.append((int(rows[0]), len(rows)))
        return self.store._read(rows)


@pytest.mark.parametrize(
    "spec", [None, PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data")]
)
def test_any_store_is_read_once_in_blocks(store, spec, monkeypatch):
    # Blocks of 5 rows of 17 bytes: the last one of 64 is smaller.
    monkeypatch.setattr(_residency, "_BLOCK_BYTES", 5 * 17)
    counted, sharding = Counted(store), None
    if spec is not None:
        mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
        sharding = NamedSharding(mesh, spec)
    if spec == PartitionSpec(None, "data"):
        counted = Counted(ArrayStore({"image": store.columns["image"]}))
    dataset = DeviceDataset(counted, sharding=sharding)
    assert sum(count for _, count in counted.reads) == 64
    assert max(count for _, count in counted.reads) <= 5
    for name, column in dataset.columns.items():
        np.testing.assert_array_equal(column, store.columns[name])
        if sharding is None:
            assert not column.committed
        else:
            assert column.sharding.is_equivalent_to(sharding, column.ndim)


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
    with pytest.raises(ValueError, match="at least one step"):
        dataset.rows(BatchPlan(64, 4), range(0))
    with pytest.raises(ValueError, match="unroll must be at least 1"):
        make_epoch_scan(lambda state, batch: (state, {}), unroll=0)


@pytest.mark.usefixtures("unchecked")
def test_a_step_must_be_a_function():
    with pytest.raises(TypeError, match="step must be a function, got int"):
        make_epoch_scan(3)  # pyright: ignore[reportArgumentType]
