"""to_device: placement, aliasing, order and errors."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel.data import ArrayStore, BatchPlan, Loader, to_device


def aligned(shape, offset=0):
    """A uint8 array whose address is `offset` past a multiple of 64."""
    raw = np.zeros(int(np.prod(shape)) + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    array = raw[start : start + int(np.prod(shape))].reshape(shape)
    assert array.ctypes.data % 64 == offset
    return array


def test_the_trap_exists():
    """Without a copy an aligned source shows through: what the next tests prevent."""
    source = aligned((64, 64))
    device = jax.block_until_ready(jax.device_put(source))
    source[:] = 7
    if jax.default_backend() == "cpu":
        assert (np.asarray(device) == 7).all()


@pytest.mark.parametrize("offset", [0, 1, 16, 32])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("copy", [None, True])
def test_mutating_a_source_never_changes_a_device_batch(offset, sharded, copy):
    source = aligned((64, 64), offset)

    def batches():
        for step in range(6):
            source[:] = step
            yield {"image": source}
            source[:] = 99

    sharding = None
    if sharded:
        sharding = NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
    with to_device(batches(), sharding=sharding, copy=copy) as moved:
        kept = [batch["image"] for batch in moved]
    source[:] = 255
    assert [np.unique(x).tolist() for x in kept] == [[step] for step in range(6)]


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("transform", [None, lambda batch, rng: batch])
def test_mutating_a_store_never_changes_a_device_batch(offset, transform):
    source = aligned((64, 64), offset)
    source[:] = np.arange(64, dtype=np.uint8)[:, None]
    plan = BatchPlan(64, 16, epochs=1, shuffle=False)
    with to_device(
        Loader(ArrayStore({"image": source}), plan, transform=transform)
    ) as moved:
        kept = [batch["image"] for batch in moved]
    source[:] = 255
    np.testing.assert_array_equal(
        np.concatenate(kept)[:, 0], np.arange(64, dtype=np.uint8)
    )


def test_a_transform_that_reuses_its_buffer_is_safe():
    buffer = aligned((16, 64))

    def transform(batch, rng):
        buffer[:] = batch["image"]
        return {"image": buffer}

    store = ArrayStore({"image": np.repeat(np.arange(64, dtype="u1")[:, None], 64, 1)})
    plan = BatchPlan(64, 16, epochs=1, shuffle=False)
    # Without a thread nothing is transformed while a batch is being copied.
    loader = Loader(store, plan, prefetch=0, transform=transform)
    with to_device(loader) as moved:
        kept = [batch["image"] for batch in moved]
    np.testing.assert_array_equal(
        np.concatenate(kept)[:, 0], np.arange(64, dtype=np.uint8)
    )


def test_batches_of_a_plain_loader_are_adopted_without_a_copy():
    store = ArrayStore({"image": np.ones((64, 1024), np.uint8)})
    host = store.take(np.arange(32))["image"]
    assert host.ctypes.data % 64 == 0
    with to_device([{"image": host}], copy=False) as moved:
        device = next(moved)["image"]
    if jax.default_backend() == "cpu":
        assert device.unsafe_buffer_pointer() == host.ctypes.data


def test_default_placement_is_uncommitted_and_compiles_once():
    store = ArrayStore({"image": np.ones((32, 8), np.uint8)})
    compiled = []

    @jax.jit
    def step(image):
        compiled.append(1)
        return image.sum(dtype=jnp.int32)

    step(jnp.zeros((8, 8), jnp.uint8))
    with to_device(Loader(store, BatchPlan(32, 8, epochs=2))) as batches:
        for batch in batches:
            assert not batch["image"].committed
            step(batch["image"])
    assert len(compiled) == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec()])
def test_sharding(axis_type, spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, spec)
    images = np.arange(32 * 3, dtype=np.uint8).reshape(32, 3)
    store = ArrayStore({"image": images, "label": np.arange(32, dtype=np.uint8)})
    plan = BatchPlan(32, 16, epochs=1)
    with to_device(Loader(store, plan), sharding=sharding) as batches:
        for step, batch in enumerate(batches):
            assert batch["image"].sharding.is_equivalent_to(sharding, 2)
            np.testing.assert_array_equal(batch["image"], images[plan.indices(step)])
            np.testing.assert_array_equal(batch["label"], plan.indices(step))
    assert batches.bytes_put == 32 * 4


@pytest.mark.parametrize(
    ("spec", "batch", "column"),
    [
        (PartitionSpec("data"), 12, r"'image' of shape \(12, 3\).*divisible"),
        (PartitionSpec("data", None), 16, r"'label' of shape \(16,\).*no axis"),
    ],
)
def test_a_sharding_that_does_not_fit(spec, batch, column):
    sharding = NamedSharding(jax.make_mesh((8,), ("data",)), spec)
    host = {"image": np.zeros((batch, 3), np.uint8), "label": np.zeros(batch, np.uint8)}
    with to_device([host], sharding=sharding) as batches:
        with pytest.raises(ValueError, match=column):
            next(batches)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_depth_batches_are_under_way(depth):
    taken = []

    def batches():
        for step in range(10):
            taken.append(step)
            yield {"x": np.full(2, step, np.uint8)}

    with to_device(batches(), depth=depth) as moved:
        for step, batch in enumerate(moved):
            assert batch["x"].tolist() == [step, step]
            assert len(taken) == min(step + 1 + depth, 10)
            assert moved.bytes_put == 2 * len(taken)


@pytest.mark.parametrize(
    ("batch", "error", "words"),
    [
        ([1], TypeError, "non-empty dict of arrays.*got list"),
        ({}, TypeError, "non-empty dict"),
        ({"x": [1, 2]}, TypeError, "'x' must be an array, got list"),
        ({"x": 1.0}, TypeError, "'x' must be an array, got float"),
        ({"x": np.array(1)}, TypeError, "'x' is a scalar"),
        ({"x": np.zeros(2)}, TypeError, "'x' has dtype float64.*float32"),
        ({"x": np.zeros(2, int)}, TypeError, "'x' has dtype int64.*uint8, uint16 or"),
        ({"x": np.zeros(2, "u8")}, TypeError, "'x' has dtype uint64"),
        ({"x": np.zeros(2, "c16")}, TypeError, "'x' has dtype complex128"),
        ({"x": np.array(["a"])}, TypeError, "'x' has dtype <U1, which no device"),
        ({"x": np.array([None])}, TypeError, "'x' has dtype object"),
        ({"x": np.zeros(2, "V4")}, TypeError, "which no device holds"),
        ({"x": np.zeros(2, "M8[s]")}, TypeError, "which no device holds"),
        (
            {"x": np.zeros(2, "u1"), "y": np.zeros(3, "u1")},
            ValueError,
            "one length, got {'x': 2, 'y': 3}",
        ),
    ],
)
def test_bad_batches_come_after_the_good_ones_and_stay(batch, error, words):
    good = {"x": np.zeros(2, np.uint8)}
    with to_device(iter([good, good, batch, good])) as batches:
        next(batches), next(batches)  # pyright: ignore[reportUnusedExpression]
        for _ in range(2):
            with pytest.raises(error, match=words):
                next(batches)


def test_wide_types_pass_where_jax_keeps_them():
    with jax.enable_x64(True):
        with to_device([{"x": np.zeros(2), "y": np.zeros(2, np.int64)}]) as batches:
            batch = next(batches)
        assert batch["x"].dtype == np.float64 and batch["y"].dtype == np.int64


def test_device_arrays_and_bfloat16_pass():
    batch = {"x": jnp.arange(3), "y": np.zeros(3, jnp.bfloat16)}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    for where in (None, sharding):
        with to_device([batch], sharding=where) as batches:
            moved = next(batches)
        assert moved["x"].tolist() == [0, 1, 2] and moved["y"].dtype == jnp.bfloat16


def test_an_error_of_the_loader_comes_in_its_turn_and_can_be_retried():
    fail = [True]

    def transform(batch, rng):
        if 5 in batch["x"] and fail[0]:
            raise OSError("disk gone")
        return batch

    store = ArrayStore({"x": np.arange(8, dtype=np.uint8)})
    plan = BatchPlan(8, 2, epochs=1, shuffle=False)
    with to_device(Loader(store, plan, transform=transform), depth=3) as batches:
        assert [next(batches)["x"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="disk gone"):
            next(batches)
        assert batches.get_state()["step"] == 2
        fail[0] = False
        batches.set_state(batches.get_state())
        assert [b["x"].tolist() for b in batches] == [[4, 5], [6, 7]]


def test_length_stats_state_and_closing():
    store = ArrayStore({"x": np.arange(8, dtype=np.uint8)})
    loader = Loader(store, BatchPlan(8, 2, epochs=1))
    with to_device(loader, depth=1) as batches:
        assert len(batches) == 4 and batches
        next(batches)
        assert batches.stats.batches == 2 and batches.get_state()["step"] == 1
        assert loader.get_state()["step"] == 2
    with pytest.raises(ValueError, match="closed"):
        next(loader)
    plain = to_device(iter([]))
    with pytest.raises(TypeError, match="no state"):
        plain.get_state()
    with pytest.raises(TypeError, match="no len|len()"):
        len(plain)
    with pytest.raises(ValueError, match="depth must be at least 0, got -1"):
        to_device([], depth=-1)


def test_transfers_are_annotated(tmp_path):
    with jax.profiler.trace(str(tmp_path)):
        with to_device([{"x": np.zeros(4, np.uint8)}]) as batches:
            jax.block_until_ready(next(batches))
    recorded = b"".join(p.read_bytes() for p in tmp_path.rglob("*.xplane.pb"))
    assert b"jaxaccel.put" in recorded and b"jaxaccel.load" in recorded


def test_the_time_of_putting_is_a_stage_of_the_loaders_stats():
    store = ArrayStore({"x": np.zeros((8, 1000), np.uint8)})
    with to_device(Loader(store, BatchPlan(8, 2, epochs=1)), depth=0) as batches:
        seen = []
        for _ in batches:
            seen.append(batches.stats.seconds["put"])
    # It grows with every batch.
    assert len(seen) == 4 and 0 < seen[0] < seen[1] < seen[2] < seen[3]


def test_two_processes_share_every_batch():
    """Two real processes of two devices each, joined by jax.distributed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    script = pathlib.Path(__file__).with_name("two_processes.py")
    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(process)],
            env=environment | {"JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        done = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], done
    seen = [json.loads(output.splitlines()[-1]) for output, _ in done]
    image = np.random.default_rng(0).integers(0, 256, (24, 3), dtype=np.uint8)
    order = [BatchPlan(24, 8, epochs=1).indices(step) for step in range(3)]
    weight = np.arange(8)[:, None] + 1
    sums = [int((image[rows].astype(int) * weight).sum()) for rows in order]
    for process, part in enumerate(seen):
        assert part["shapes"] == [[8]] * 3
        mine = slice(4 * process, 4 * process + 4)
        assert part["local"] == [rows[mine].tolist() for rows in order]
        assert part["sums"] == part["resident"] == sums
        # Each process holds its half of the resident data, no more.
        assert part["held"] == 12 * 3
