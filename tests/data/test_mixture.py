"""Stores mixed by ratios."""

import fractions
import pickle

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel.data import ArrayStore, Loader, Mixture, MixturePlan


def part(start, size, dtype="uint8"):
    return ArrayStore({"label": np.arange(start, start + size).astype(dtype)})


def parts_of(rows, sizes):
    return np.searchsorted(np.cumsum(sizes), rows, side="right")


RATIOS = st.one_of(
    st.integers(1, 400),
    st.floats(0.01, 1),
    st.sampled_from([0.1, 0.25, 1 / 3, 0.7]),
)


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    ratios=st.lists(RATIOS, min_size=1, max_size=6),
    batch=st.sampled_from([17, 64, 500]),
)
def test_counts_keep_within_one_of_the_ratios(ratios, batch):
    sizes = tuple(range(3, 3 + len(ratios)))
    plan = MixturePlan(sizes, tuple(ratios), batch)
    steps = -(-2000 // batch)
    rows = np.concatenate([plan.indices(step) for step in range(steps)])
    counts = np.cumsum(parts_of(rows, sizes)[:, None] == np.arange(len(sizes)), axis=0)
    shares = plan.fingerprint()["shares"]
    after = np.arange(1, len(rows) + 1)
    for number, share in enumerate(shares):
        # In whole numbers, so that no rounding hides or makes an excess.
        excess = np.abs(counts[:, number] * sum(shares) - share * after)
        assert (excess < sum(shares)).all()
        exact = ratios[number] / sum(ratios)
        assert abs(share / sum(shares) - exact) <= 1 / 65536


@pytest.mark.parametrize(
    ("ratios", "shares"),
    [
        ((3, 1), [3, 1]),
        ((0.7, 0.2, 0.1), [7, 2, 1]),
        ((1 / 3, 2 / 3), [1, 2]),
        ((60000, 10000), [6, 1]),
        ((5,), [1]),
    ],
)
def test_simple_ratios_are_exact(ratios, shares):
    plan = MixturePlan((4,) * len(ratios), ratios, 2)
    assert plan.fingerprint()["shares"] == shares


def test_ratios_without_a_short_turn_are_rounded_to_the_nearest():
    plan = MixturePlan((1, 1), (2**0.5, 1.0), 1)
    shares = plan.fingerprint()["shares"]
    assert sum(shares) == 65536
    assert abs(fractions.Fraction(shares[0], 65536) - 2**0.5 / (1 + 2**0.5)) < 2**-17


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_part_is_visited_in_epochs_of_its_own(shuffle):
    sizes = (5, 11)
    plan = MixturePlan(sizes, (0.3, 0.7), 10, seed=4, shuffle=shuffle)
    rows = np.concatenate([plan.indices(step) for step in range(44)])
    for start, size, share in ((0, 5, 132), (5, 11, 308)):
        mine = rows[(rows >= start) & (rows < start + size)] - start
        assert len(mine) == share
        epochs = mine[: share // size * size].reshape(-1, size)
        np.testing.assert_array_equal(
            np.sort(epochs), np.tile(np.arange(size), (share // size, 1))
        )
        orders = {tuple(epoch) for epoch in epochs.tolist()}
        if shuffle:
            assert len(orders) > 0.7 * len(epochs)
        else:
            assert orders == {tuple(range(size))}


def test_a_mixture_is_a_store_and_makes_its_plan():
    mixture = Mixture({"a": part(0, 6), "b": part(100, 3)}, {"b": 1, "a": 3})
    assert len(mixture) == 9 and mixture.ratios == {"a": 0.75, "b": 0.25}
    plan = mixture.plan(8, seed=2, epochs=2)
    assert plan.steps_per_epoch == 2 and len(plan) == 4
    halves = [
        mixture.plan(8, seed=2, epochs=2, process_index=k, process_count=2)
        for k in range(2)
    ]
    with Loader(pickle.loads(pickle.dumps(mixture)), plan) as loader:
        labels = [batch["label"] for batch in loader]
    assert [int((batch >= 100).sum()) for batch in labels] == [2] * 4
    for step, batch in enumerate(labels):
        local = [mixture.take(half.indices(step))["label"] for half in halves]
        np.testing.assert_array_equal(np.concatenate(local), batch)
        # Every process gets the ratios, too.
        assert [int((rows >= 100).sum()) for rows in local] == [1, 1]


def test_a_mixture_resumes_anywhere():
    mixture = Mixture({"a": part(0, 6), "b": part(100, 4)}, {"a": 0.6, "b": 0.4})
    plan = mixture.plan(4, epochs=3)
    with Loader(mixture, plan) as loader:
        states, labels = [], []
        for batch in loader:
            labels.append(batch["label"].tolist())
            states.append(loader.get_state())
    assert len(labels) == 9
    for done in (0, 3, 7):
        with Loader(mixture, plan) as loader:
            loader.set_state(states[done])
            rest = [batch["label"].tolist() for batch in loader]
        assert rest == labels[done + 1 :]


def test_without_ratios_the_sizes_count():
    mixture = Mixture({"a": part(0, 6), "b": part(100, 3)})
    assert mixture.ratios == {"a": 2 / 3, "b": 1 / 3}
    rows = np.concatenate([mixture.plan(3).indices(step) for step in range(3)])
    assert sorted(rows.tolist()) == list(range(9))


@pytest.mark.parametrize(
    ("stores", "ratios", "words"),
    [
        ({}, None, "at least one store, got none"),
        ({"a": part(0, 2)}, {"b": 1}, r"got \['b'\] and \['a'\]"),
        ({"a": part(0, 2), "b": part(0, 2, "int32")}, None, "same columns, but 'a'"),
        ({"a": part(0, 2)}, {"a": 0}, "positive and finite, got 0; leave out"),
        ({"a": part(0, 2)}, {"a": -1.5}, "positive and finite, got -1.5"),
        ({"a": part(0, 2)}, {"a": float("nan")}, "positive and finite, got nan"),
        ({"a": part(0, 2), "b": part(0, 2)}, {"a": 1e-9, "b": 1.0}, "1e-09 is less"),
    ],
)
def test_bad_mixtures(stores, ratios, words):
    with pytest.raises(ValueError, match=words):
        Mixture(stores, ratios)


def test_bad_mixture_plans():
    with pytest.raises(ValueError, match="got 1 ratios for 2 parts"):
        MixturePlan((3, 4), (1,), 2)
    with pytest.raises(ValueError, match="part's size must be at least 1, got 0"):
        MixturePlan((3, 0), (1, 1), 2)


@pytest.mark.usefixtures("unchecked")
def test_wrong_types():
    with pytest.raises(TypeError, match="part 'a' must be a Store, got ndarray"):
        Mixture({"a": np.zeros(3)})  # type: ignore[dict-item]
    ratios = (np.float32(0.5), np.int64(1))
    assert MixturePlan((4, 4), ratios, 2).fingerprint()["shares"] == [1, 2]  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ratios must be numbers, got 'x'"):
        Mixture({"a": part(0, 2)}, {"a": "x"})  # type: ignore[dict-item]
