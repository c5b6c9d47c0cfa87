"""The loader's state through orbax, beside a train state."""

import json
from typing import Any

import grain.checkpoint
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from jaxaccel.data import ArrayStore, BatchPlan, DeviceDataset, Loader, to_device


def make_loader(seed=3, **options):
    store = ArrayStore({"label": np.arange(12, dtype=np.uint8)})
    return Loader(store, BatchPlan(12, 4, epochs=2, seed=seed), **options)


def make_device_batches(seed=3):
    return to_device(make_loader(seed))


def make_resident_batches(seed=3):
    store = ArrayStore({"label": np.arange(12, dtype=np.uint8)})
    return DeviceDataset(store).batches(BatchPlan(12, 4, epochs=2, seed=seed))


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


def save(folder, loader, state):
    with ocp.CheckpointManager(folder) as manager:
        data = grain.checkpoint.CheckpointSave(loader)
        state = ocp.args.StandardSave(state)
        manager.save(2, args=ocp.args.Composite(state=state, data=data))
        manager.wait_until_finished()


def restore(folder, loader, like):
    with ocp.CheckpointManager(folder) as manager:
        data = grain.checkpoint.CheckpointRestore(loader)
        state = ocp.args.StandardRestore(like)
        restored = manager.restore(2, args=ocp.args.Composite(state=state, data=data))
    assert restored["data"] is loader
    return restored["state"]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_round_trip_with_a_train_state(tmp_path, prefetch):
    state = {"w": jnp.arange(3.0), "step": jnp.int32(2)}
    with make_loader(prefetch=prefetch) as loader:
        for _ in range(2):
            next(loader)
        save(tmp_path, loader, state)
        rest = labels(loader)
    assert len(rest) == 4
    with make_loader(prefetch=prefetch) as loader:
        restored = restore(tmp_path, loader, state)
        assert labels(loader) == rest
    np.testing.assert_array_equal(restored["w"], [0, 1, 2])
    assert int(restored["step"]) == 2
    # Another seed is another order, through orbax as without.
    with make_loader(seed=4) as loader:
        with pytest.raises(ValueError, match="seed: saved 3, now 4"):
            restore(tmp_path, loader, state)
        assert loader.get_state()["step"] == 0


def test_the_file_is_the_state(tmp_path):
    with make_loader() as loader:
        next(loader)
        handler: Any = grain.checkpoint.CheckpointHandler()
        handler.save(epath.Path(tmp_path), loader)
        state = loader.get_state()
        rest = labels(loader)
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == state == json.loads(json.dumps(state))
    with make_loader() as loader:
        loader.set_state(file.read_bytes())
        assert labels(loader) == rest


def test_the_state_as_plain_json_in_orbax(tmp_path):
    with make_loader() as loader:
        next(loader)
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(1, args=ocp.args.JsonSave(loader.get_state()))
            manager.wait_until_finished()
            state = manager.restore(1, args=ocp.args.JsonRestore())
        rest = labels(loader)
    with make_loader() as loader:
        loader.set_state(state)
        assert labels(loader) == rest


@pytest.mark.parametrize("make", [make_device_batches, make_resident_batches])
def test_device_batches_count_what_they_handed_out(tmp_path, make):
    state = {"w": jnp.arange(3.0)}
    with make() as batches:
        next(batches)
        # Two more are under way.
        save(tmp_path, batches, state)
        rest = labels(batches)
    assert len(rest) == 5
    with make() as batches:
        restored = restore(tmp_path, batches, state)
        assert batches.get_state()["step"] == 1
        assert labels(batches) == rest
    np.testing.assert_array_equal(restored["w"], [0, 1, 2])
    with make(seed=4) as batches:
        with pytest.raises(ValueError, match="seed: saved 3, now 4"):
            restore(tmp_path, batches, state)
