"""Plans that draw by weight and by class."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel.data import (
    BatchPlan,
    ClassBalancedPlan,
    Loader,
    WeightedPlan,
    balanced_weights,
    open_store,
)


def counts(plan, steps, values=None):
    rows = np.concatenate([plan.indices(step) for step in range(steps)])
    return np.bincount(rows if values is None else values[rows])


def test_weighted_draws_have_the_right_frequencies(rng):
    weights = rng.random(200) ** 3
    weights[[0, 7, 199]] = 0
    seen = np.zeros(200)
    seen[: len(found)] = (found := counts(WeightedPlan(weights, 500, seed=2), 200))
    assert not seen[weights == 0].any()
    expected = 100_000 * weights / weights.sum()
    there = expected > 0
    z = (seen - expected)[there] ** 2 / expected[there]
    freedom = there.sum() - 1
    assert abs(z.sum() - freedom) < 4 * np.sqrt(2 * freedom)


def test_weighted_draws_are_independent():
    plan = WeightedPlan(np.ones(2), 1000, seed=0)
    bits = np.concatenate([plan.indices(step) for step in range(50)])
    # A pair of neighbours, or the same place of two steps, is equal half the time.
    for other in (bits[:-1] == bits[1:], bits[:-1000] == bits[1000:]):
        assert abs(other.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(other))


@pytest.mark.parametrize("weights", [[0, 0, 1], [1e-300, 1, 0], [0, 5e-324, 0]])
def test_rows_without_weight_are_never_drawn(weights):
    weights = np.array(weights)
    rows = np.concatenate([WeightedPlan(weights, 256).indices(t) for t in range(8)])
    assert (weights[rows] > 0).all()


def test_balanced_weights_balance_the_classes(rng):
    labels = rng.choice(5, 1000, p=[0.6, 0.25, 0.1, 0.04, 0.01]).astype(np.uint8)
    weights = balanced_weights(labels)
    sums = np.bincount(labels, weights)
    np.testing.assert_allclose(sums, 200, rtol=1e-12)
    np.testing.assert_allclose(weights, (200 / np.bincount(labels))[labels])
    drawn = counts(WeightedPlan(weights, 1000), 20, labels)
    assert np.abs(drawn - 4000).max() < 4 * np.sqrt(20000 * 0.2 * 0.8)


def test_the_plan_keeps_its_own_weights():
    weights = np.ones(4)
    plan = WeightedPlan(weights, 64)
    weights[:] = [0, 0, 0, 1]
    assert set(plan.indices(0)) == {0, 1, 2, 3}
    assert not plan.weights.flags.writeable


def test_an_epoch_of_draws_only_counts_steps():
    short, long = (WeightedPlan(np.ones(10), 4, epoch_size=n) for n in (5, 400))
    assert (short.steps_per_epoch, long.steps_per_epoch) == (2, 100)
    assert WeightedPlan(np.ones(10), 64).steps_per_epoch == 1
    np.testing.assert_array_equal(short.indices(77), long.indices(77))
    assert short.fingerprint() == long.fingerprint() and short != long


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    batch=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_class_gets_its_share_and_every_example_its_turn(sizes, batch, seed):
    labels = np.random.default_rng(0).permutation(
        np.repeat(np.arange(len(sizes)), sizes)
    )
    # The values of the classes do not matter.
    plan = ClassBalancedPlan((labels * 3 + 1).astype(np.uint8), batch, seed=seed)
    drawn = np.zeros(len(sizes), int)
    visits = np.zeros(len(labels), int)
    for step in range(25):
        rows = plan.indices(step)
        share = np.bincount(labels[rows], minlength=len(sizes))
        assert share.max() - share.min() <= 1
        drawn += share
        assert drawn.max() - drawn.min() <= 1
        visits += np.bincount(rows, minlength=len(labels))
    for number in range(len(sizes)):
        mine = visits[labels == number]
        # Each example once before any of them again.
        assert mine.max() - mine.min() <= 1 and mine.sum() == drawn[number]


def test_few_rows_of_many_classes_meet_all_other_classes():
    plan = ClassBalancedPlan(np.arange(12), 4, seed=1)
    pairs = set()
    for step in range(90):
        rows = plan.indices(step)
        assert len(set(rows)) == 4
        pairs |= {(a, b) for a in rows.tolist() for b in rows.tolist() if a < b}
    assert len(pairs) == 12 * 11 // 2


def test_the_place_in_the_batch_does_not_tell_the_class():
    labels = np.array([0, 1])
    plan = ClassBalancedPlan(labels, 2)
    first = np.array([plan.indices(step)[0] for step in range(400)])
    assert abs(first.mean() - 0.5) < 4 * 0.5 / np.sqrt(400)


@pytest.mark.parametrize("kind", [WeightedPlan, ClassBalancedPlan])
def test_a_loader_resumes_a_drawing_plan(kind):
    store = open_store({"label": np.array([0, 0, 0, 1, 1, 2], np.uint8)})
    plan = kind(store.take(np.arange(6))["label"], 4, epochs=3)
    with Loader(store, plan) as loader:
        batches = [next(loader)["label"].tolist() for _ in range(2)]
        state = loader.get_state()
        batches += [batch["label"].tolist() for batch in loader]
    assert len(batches) == len(plan) == 6
    with Loader(store, plan) as loader:
        loader.set_state(state)
        assert [batch["label"].tolist() for batch in loader] == batches[2:]
    with Loader(store, BatchPlan(6, 4)) as loader:
        with pytest.raises(ValueError, match=f"plan: saved '{kind.__name__}', now"):
            loader.set_state(state)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1.0, -1.0], r"not negative, but weights\[1\] is -1.0"),
        ([1.0, np.nan], r"weights\[1\] is nan"),
        ([0.0, 0.0], "positive finite sum, got 0.0"),
        ([1e308, 1e308], "positive finite sum, got inf"),
        ([], r"shape \(0,\)"),
        ([[1.0]], r"shape \(1, 1\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_bad_weights(weights, words):
    with pytest.raises(ValueError, match=words):
        WeightedPlan(np.array(weights), 1)


def test_bad_kinds():
    with pytest.raises(TypeError, match="weights must be numbers, got dtype <U1"):
        WeightedPlan(np.array(["a"]), 1)
    with pytest.raises(TypeError, match="labels must be integers, got dtype float64"):
        ClassBalancedPlan(np.ones(3), 1)
    with pytest.raises(ValueError, match=r"one class for each example, got shape \(0,"):
        balanced_weights(np.zeros(0, int))
    with pytest.raises(ValueError, match="epoch_size must be at least 1, got 0"):
        ClassBalancedPlan(np.ones(3, int), 1, epoch_size=0)
