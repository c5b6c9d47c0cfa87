"""The order of examples."""

import dataclasses
import itertools
import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel import data
from jaxaccel.data import BatchPlan, _permute, _plan

WEIGHTS = np.arange(1, 25)
LABELS = np.arange(24) ** 2 % 7

# One of each kind, over 24 examples in batches of 8.
PLANS = {
    "batch": lambda **kw: BatchPlan(24, 8, **kw),
    "batch_padded": lambda **kw: BatchPlan(24, 8, remainder="pad", **kw),
    "weighted": lambda **kw: data.WeightedPlan(WEIGHTS, 8, **kw),
    "class_balanced": lambda **kw: data.ClassBalancedPlan(LABELS, 8, **kw),
    "mixture": lambda **kw: data.MixturePlan((9, 13, 2), (0.5, 0.3, 0.2), 8, **kw),
    "stream": lambda **kw: data.StreamPlan(24, 8, remainder="pad", **kw),
}
every_plan = pytest.mark.parametrize("make", PLANS.values(), ids=PLANS)


@every_plan
def test_processes_share_the_batches_of_one(make):
    whole = make(seed=5)
    for count in (2, 4):
        parts = [
            make(seed=5, process_index=k, process_count=count) for k in range(count)
        ]
        for step in (0, 1, 2, 3, 50, 10**6):
            indices = np.concatenate([part.indices(step) for part in parts])
            np.testing.assert_array_equal(indices, whole.indices(step))
            for name, column in whole.extras(step).items():
                shares = [part.extras(step)[name] for part in parts]
                np.testing.assert_array_equal(np.concatenate(shares), column)


@every_plan
def test_every_plan_yields_rows_of_the_store(make):
    plan = make(epochs=4)
    assert plan.num_examples == 24 and plan.local_batch_size == 8
    assert plan.steps_per_epoch == 3 and len(plan) == plan.num_steps == 12
    for step in range(len(plan)):
        rows = plan.indices(step)
        assert rows.shape == (8,) and rows.dtype == np.int64
        assert rows.min() >= 0 and rows.max() < 24 and plan.epoch(step) == step // 3
        extras = plan.extras(step)
        assert tuple(extras) == plan.extra_columns
        assert all(len(column) == 8 for column in extras.values())
        if "mask" in extras:
            np.testing.assert_array_equal(extras["mask"], plan.mask(step))
        else:
            assert plan.remainder == "drop" and plan.mask(step).all()
    with pytest.raises(IndexError, match="below 12, got 12"):
        plan.extras(12) if plan.extra_columns else plan.indices(12)


@every_plan
def test_every_plan_is_pure_under_any_order_of_calls_and_threads(make, rng):
    steps = rng.integers(0, 40, 60)
    fresh = [make(seed=1).indices(int(s)) for s in steps]
    plan = pickle.loads(pickle.dumps(make(seed=1)))
    with ThreadPoolExecutor(4) as pool:
        shared = list(pool.map(lambda s: plan.indices(int(s)), steps))
    np.testing.assert_array_equal(fresh, shared)
    plan.indices(3)[:] = 0
    np.testing.assert_array_equal(plan.indices(3), make(seed=1).indices(3))


@pytest.mark.parametrize("name", sorted(set(PLANS) - {"stream"}))
def test_neighbouring_seeds_and_steps_share_no_batch(name):
    batches = [
        tuple(PLANS[name](seed=seed).indices(step).tolist())
        for seed, step in itertools.product(range(8), range(8))
    ]
    assert len(set(batches)) == len(batches)


@every_plan
def test_a_fingerprint_leaves_out_epochs_and_processes_only(make):
    plan = make(seed=3)
    text = json.dumps(plan.fingerprint())
    for change in ({"epochs": 2}, {"process_index": 1, "process_count": 2}):
        other = make(seed=3, **change)
        assert json.dumps(other.fingerprint()) == text
        assert other != plan
    assert json.loads(text) == plan.fingerprint()
    assert make(seed=4).fingerprint() != plan.fingerprint()
    assert make(seed=3) == plan and hash(make(seed=3)) == hash(plan)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (BatchPlan(24, 8), BatchPlan(24, 8, shuffle=False)),
        (BatchPlan(24, 8), BatchPlan(24, 8, remainder="pad")),
        (BatchPlan(24, 8), data.StreamPlan(24, 8)),
        (PLANS["weighted"](), data.WeightedPlan(WEIGHTS[::-1], 8)),
        (PLANS["class_balanced"](), data.ClassBalancedPlan(LABELS[::-1], 8)),
        (PLANS["mixture"](), data.MixturePlan((9, 13, 2), (1, 1, 1), 8)),
        (PLANS["mixture"](), data.MixturePlan((13, 9, 2), (0.5, 0.3, 0.2), 8)),
        (PLANS["mixture"](), PLANS["mixture"](shuffle=False)),
    ],
)
def test_fingerprints_of_other_orders_differ(one, other):
    assert one.fingerprint() != other.fingerprint()


@every_plan
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"seed": 2**32}, "seed must be below"),
        ({"process_count": 3}, "8 is not divisible by process_count 3"),
        ({"process_count": 2, "process_index": 2}, "process_index 2"),
    ],
)
def test_every_plan_checks_what_all_share(make, options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)


def test_a_plan_of_ones_own():
    @dataclasses.dataclass(frozen=True, eq=False)
    class Backwards(data.Plan):
        num_examples: int
        batch_size: int
        seed: int = 0
        epochs: int | None = None
        process_index: int = 0
        process_count: int = 1

        @property
        def steps_per_epoch(self):
            return self.num_examples // self.batch_size

        def _rows(self, step, rows):
            batch = step % self.steps_per_epoch
            return self.num_examples - 1 - (batch * self.batch_size + rows)

        def _order(self):
            return {}

    store = data.ArrayStore({"label": np.arange(6, dtype=np.uint8)})
    with data.Loader(store, Backwards(6, 2, epochs=2)) as loader:
        labels = [batch["label"].tolist() for batch in loader]
    assert labels == [[5, 4], [3, 2], [1, 0]] * 2
    with pytest.raises(ValueError, match="5 is not divisible by process_count 2"):
        Backwards(6, 5, process_count=2)
    with pytest.raises(TypeError, match="abstract"):
        data.Plan()  # type: ignore[abstract]


def test_large_permutations_need_no_table(monkeypatch):
    monkeypatch.setattr(_plan, "_TABLE_LIMIT", 10)
    orders = set()
    for seed, n in itertools.product(range(3), (10, 37, 64)):
        plan = BatchPlan(n, 5, seed=seed, remainder="pad")
        for epoch in range(3):
            order = epoch_order(plan, epoch)[:n]
            assert sorted(order) == list(range(n))
            orders.add(order)
        assert plan.__dict__["_recent"] == ()
    assert len(orders) == 27


def test_a_plan_over_a_million_million_examples():
    plan = BatchPlan(10**12, 4096, seed=1)
    rows = np.concatenate([plan.indices(step) for step in (0, 1, 10**9)])
    assert len(np.unique(rows)) == 3 * 4096 and rows.min() >= 0 and rows.max() < 10**12
    # The mean of n uniform numbers has the deviation 1 / sqrt(12 n).
    assert abs(rows.mean() / 1e12 - 0.5) < 4 / np.sqrt(12 * len(rows))


@hypothesis.given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_permute_is_a_permutation_for_every_size_at_once(sizes):
    places = np.concatenate([np.arange(size) for size in sizes])
    each = np.repeat(sizes, sizes)
    keys = _permute.keys_for(7, np.repeat(np.arange(len(sizes)), sizes))
    rows = np.split(_permute.permute(places, each, keys), np.cumsum(sizes)[:-1])
    for number, (size, part) in enumerate(zip(sizes, rows, strict=True)):
        np.testing.assert_array_equal(np.sort(part), np.arange(size))
        alone = _permute.permute(np.arange(size), size, _permute.keys_for(7, number))
        np.testing.assert_array_equal(part, alone)


@pytest.mark.parametrize("size", [2**62, 2**62 - 1, (2**31 - 1) ** 2 + 1, 2**53 + 1])
def test_permute_stays_in_huge_ranges(size):
    places = np.concatenate([np.arange(100), size - 1 - np.arange(100)])
    rows = _permute.permute(places, size, 3)
    assert len(np.unique(rows)) == 200 and rows.min() >= 0 and rows.max() < size


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_permutations_are_equally_likely(size):
    draws = 20000
    keys = _permute.keys_for(1, np.arange(draws))
    columns = [_permute.permute(np.full(draws, i), size, keys) for i in range(size)]
    _, counts = np.unique(np.stack(columns), axis=1, return_counts=True)
    number = len(list(itertools.permutations(range(size))))
    assert len(counts) == number
    chi_square = np.sum((counts - draws / number) ** 2) / (draws / number)
    assert chi_square < number - 1 + 5 * np.sqrt(2 * (number - 1))


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
