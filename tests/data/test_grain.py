import pickle

import grain
import numpy as np
import pytest

from jaxaccel.data import ArrayStore, BatchPlan, Loader, StreamPlan, as_grain

OPTIONS = grain.ReadOptions(num_threads=2, prefetch_buffer_size=3)
PLANS = {
    "drop": BatchPlan(11, 4, seed=3, epochs=2),
    "pad": BatchPlan(11, 4, seed=3, epochs=2, remainder="pad"),
    "streams": StreamPlan(11, 2, epochs=2),
}


def add_noise(batch, rng):
    return {**batch, "x": batch["x"] + rng.integers(100, dtype=np.uint8)}


@pytest.fixture
def store(rng):
    return ArrayStore({"x": rng.integers(100, size=(11, 3), dtype=np.uint8)})


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("transform", [None, add_noise])
def test_the_batches_are_those_of_a_loader(store, plan, transform):
    with Loader(store, plan, transform=transform) as loader:
        expected = list(loader)
    dataset = as_grain(store, plan, transform=transform)
    assert len(dataset) == len(plan)
    assert_equal(list(dataset.to_iter_dataset(OPTIONS)), expected)
    assert_equal([dataset[3], dataset[1]], [expected[3], expected[1]])
    assert_equal(list(dataset[1:3]), expected[1:3])
    assert_equal([pickle.loads(pickle.dumps(dataset))[2]], [expected[2]])


def test_grain_resumes_and_maps_it(store):
    dataset = as_grain(store, PLANS["drop"]).map(lambda batch: batch["x"].sum())
    whole = list(dataset.to_iter_dataset(OPTIONS))
    iterator = iter(dataset.to_iter_dataset(OPTIONS))
    first = next(iterator)
    state = iterator.get_state()
    resumed = iter(dataset.to_iter_dataset(OPTIONS))
    resumed.set_state(state)
    assert [first, *resumed] == whole


def test_an_endless_plan_goes_on(store):
    dataset = as_grain(store, BatchPlan(11, 4, shuffle=False))
    # Epoch 1000 starts anew, though the store has 11 examples only.
    np.testing.assert_array_equal(dataset[2000]["x"], store.take(range(4))["x"])  # type: ignore


def test_a_plan_for_another_store(store):
    with pytest.raises(ValueError, match="for 10 examples, but the store holds 11"):
        as_grain(store, BatchPlan(10, 2))
