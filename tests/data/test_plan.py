"""The order of examples."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel.data import BatchPlan


@hypothesis.given(
    n=st.integers(1, 60),
    shards=st.sampled_from([1, 2, 3, 8]),
    rows=st.integers(1, 7),
    seed=st.integers(0, 2**32 - 1),
    remainder=st.sampled_from(["drop", "pad"]),
    shuffle=st.booleans(),
)
def test_every_example_once_an_epoch_whatever_the_processes(
    n, shards, rows, seed, remainder, shuffle
):
    batch = rows * shards
    hypothesis.assume(batch <= n)
    options = {"seed": seed, "epochs": 2, "remainder": remainder, "shuffle": shuffle}
    whole = BatchPlan(n, batch, **options)
    parts = [
        BatchPlan(n, batch, process_index=k, process_count=shards, **options)
        for k in range(shards)
    ]
    seen = [[], []]
    for step in range(len(whole)):
        indices, mask = whole.indices(step), whole.mask(step)
        np.testing.assert_array_equal(
            np.concatenate([p.indices(step) for p in parts]), indices
        )
        np.testing.assert_array_equal(
            np.concatenate([p.mask(step) for p in parts]), mask
        )
        assert len(indices) == batch and indices.dtype == np.int64
        seen[whole.epoch(step)].extend(indices[mask].tolist())
    expected = n if remainder == "pad" else n - n % batch
    for epoch in seen:
        assert len(epoch) == len(set(epoch)) == expected
        assert set(epoch) <= set(range(n))
    if not shuffle:
        assert seen[0] == seen[1] == list(range(expected))


def epoch_order(plan, epoch):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    return tuple(int(i) for step in steps for i in plan.indices(step))


def test_no_two_seeds_share_an_epoch():
    orders = [
        epoch_order(BatchPlan(50, 10, seed=seed), epoch)
        for seed in range(6)
        for epoch in range(6)
    ]
    assert len(set(orders)) == 36


def test_the_permutation_is_the_documented_one():
    words = np.random.SeedSequence([7, 3])
    expected = np.random.Generator(np.random.Philox(words)).permutation(20)
    assert epoch_order(BatchPlan(20, 5, seed=7), 3) == tuple(expected.tolist())


def test_dropped_examples_vary_by_epoch():
    plan = BatchPlan(11, 5)
    dropped = {frozenset(range(11)) - set(epoch_order(plan, e)) for e in range(20)}
    assert len(dropped) > 3


def test_plan_is_pure_under_any_order_of_calls_and_threads(rng):
    steps = rng.integers(0, 60, 200)
    fresh = [BatchPlan(30, 5, seed=1).indices(int(s)) for s in steps]
    plan = BatchPlan(30, 5, seed=1)
    with ThreadPoolExecutor(4) as pool:
        shared = list(pool.map(lambda s: plan.indices(int(s)), steps))
    for one, other in zip(fresh, shared, strict=True):
        np.testing.assert_array_equal(one, other)
    plan.indices(3)[:] = 0
    np.testing.assert_array_equal(plan.indices(3), BatchPlan(30, 5, seed=1).indices(3))


def test_plan_pickles_and_compares_by_its_fields():
    plan = BatchPlan(30, 5, seed=1, epochs=2)
    plan.indices(0)
    again = pickle.loads(pickle.dumps(plan))
    assert again == plan and hash(again) == hash(plan)
    assert again != BatchPlan(30, 5, seed=2, epochs=2)
    np.testing.assert_array_equal(again.indices(4), plan.indices(4))


def test_padding_repeats_the_epochs_first_examples():
    plan = BatchPlan(7, 4, remainder="pad", epochs=1)
    first, last = plan.indices(0), plan.indices(1)
    assert plan.mask(1).tolist() == [True, True, True, False]
    assert last[3] == first[0]


def test_length_and_steps():
    assert BatchPlan(10, 3).num_steps is None
    assert BatchPlan(10, 3).indices(10**6).shape == (3,)
    with pytest.raises(TypeError, match="never ends"):
        len(BatchPlan(10, 3))
    assert len(BatchPlan(10, 3, epochs=2)) == 6
    assert len(BatchPlan(10, 3, epochs=2, remainder="pad")) == 8
    assert BatchPlan(10, 10, remainder="pad").steps_per_epoch == 1


@pytest.mark.parametrize("call", ["indices", "mask", "epoch"])
@pytest.mark.parametrize("step", [-1, 6])
def test_step_out_of_range(call, step):
    plan = BatchPlan(10, 3, epochs=2)
    with pytest.raises(IndexError, match=f"below 6, got {step}"):
        getattr(plan, call)(step)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((10, 11), {}, "batch_size 11 is larger than the 10 examples; use"),
        ((10, 0), {}, "batch_size must be at least 1, got 0"),
        ((0, 1), {}, "num_examples must be at least 1, got 0"),
        ((10, 4), {"epochs": 0}, "epochs must be at least 1, got 0"),
        ((10, 4), {"seed": -1}, "seed must be at least 0, got -1"),
        ((10, 4), {"seed": 2**32}, "seed must be below"),
        ((10, 4), {"remainder": "keep"}, r"\('drop', 'pad'\), got 'keep'"),
        ((10, 4), {"process_count": 3}, "4 is not divisible by process_count 3"),
        ((10, 4), {"process_count": 2, "process_index": 2}, "process_index 2"),
    ],
)
def test_bad_plans(args, options, words):
    with pytest.raises(ValueError, match=words):
        BatchPlan(*args, **options)


def test_a_boolean_is_no_seed():
    with pytest.raises(TypeError, match="seed must be an integer, got True"):
        BatchPlan(10, 2, seed=True)
