"""Windows, packed documents, and streams."""

import pickle

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    ConcatStore,
    Loader,
    StreamPlan,
    open_store,
    pack_sequences,
    windows,
)


def everything(store):
    return store.take(np.arange(len(store)))


def sources(array, folder):
    """The same sequence as an array, a mapped file, and a store of several parts."""
    np.save(folder / "tokens.npy", array)
    half = len(array) // 2
    parts = [ArrayStore({"x": array[:half]}), ArrayStore({"x": array[half:]})]
    return [array, open_store(folder / "tokens.npy"), ConcatStore(parts)]


@pytest.mark.parametrize("shape", [(23,), (23, 3)])
@pytest.mark.parametrize("targets", [True, False])
@pytest.mark.parametrize(("length", "stride"), [(4, None), (4, 1), (3, 5), (22, None)])
def test_windows_are_slices(shape, targets, length, stride, tmp_path, rng):
    array = rng.integers(0, 60000, shape).astype(np.uint16)
    step = stride or length
    starts = [s for s in range(0, 23, step) if s + length + targets <= 23]
    for source in sources(array, tmp_path):
        store = windows(source, length, stride=stride, targets=targets)
        assert len(store) == len(starts)
        batch = everything(store)
        assert set(batch) == {"tokens", "targets"} if targets else {"tokens"}
        for shift, column in enumerate(batch.values()):
            assert column.dtype == np.uint16
            expected = [array[s + shift : s + shift + length] for s in starts]
            np.testing.assert_array_equal(column, expected)
        np.testing.assert_array_equal(
            store.take([len(store) - 1])["tokens"][0],
            array[starts[-1] : starts[-1] + length],
        )


@hypothesis.given(
    total=st.integers(1, 40),
    length=st.integers(1, 9),
    stride=st.integers(1, 12),
    targets=st.booleans(),
    features=st.sampled_from([None, 2]),
)
def test_padded_windows_cover_the_sequence(total, length, stride, targets, features):
    hypothesis.assume(total > targets)
    array = np.arange(1, total + 1, dtype=np.uint8)
    array = array if features is None else np.stack([array, array], 1)
    store = windows(
        array, length, stride=stride, targets=targets, remainder="pad", name="x"
    )
    seen = set()
    for row, batch in enumerate(store.scan(1)):
        valid = [row * stride + k < total - targets for k in range(length)]
        assert batch["x_mask"][0].tolist() == valid and any(valid)
        for shift, name in enumerate(["x", "targets"][: 1 + targets]):
            there = [row * stride + k + shift < total for k in range(length)]
            expected = [row * stride + k + shift + 1 for k in range(length)]
            values = batch[name][0] if features is None else batch[name][0][:, 1]
            np.testing.assert_array_equal(values, np.where(there, expected, 0))
        seen |= {row * stride + k for k in range(length) if valid[k]}
    if stride <= length:
        assert seen == set(range(total - targets))


def test_windows_pickle_and_identify_themselves():
    array = np.arange(50, dtype=np.uint8)
    store = windows(array, 8)
    again = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(
        again.take([3])["targets"], store.take([3])["targets"]
    )
    others = [
        windows(array, 7),
        windows(array, 8, stride=7),
        windows(array, 8, targets=False),
        windows(array, 8, remainder="pad"),
        windows(array + np.uint8(1), 8),
    ]
    assert again.fingerprint() == store.fingerprint()
    assert len({other.fingerprint() for other in (store, *others)}) == 6
    store.take([0])["tokens"][:] = 0
    assert array[1] == 1


@pytest.mark.parametrize(
    ("array", "length", "options", "words"),
    [
        (
            np.zeros(4, np.uint8),
            4,
            {},
            "4 elements hold no window of 4 and its targets",
        ),
        (
            np.zeros(3, np.uint8),
            4,
            {"targets": False},
            "3 elements hold no window of 4;",
        ),
        (np.zeros(1, np.uint8), 4, {"remainder": "pad"}, "1 elements hold no window"),
        (np.zeros((2, 2, 2), np.uint8), 1, {}, r"got \(2, 2, 2\)"),
        (np.zeros(9, np.uint8), 0, {}, "length must be at least 1, got 0"),
        (np.zeros(9, np.uint8), 2, {"stride": 0}, "stride must be at least 1, got 0"),
        (np.zeros(9, np.uint8), 2, {"remainder": "keep"}, "got 'keep'"),
        (np.zeros(9, np.uint8), 2, {"name": "targets"}, "name must differ"),
        (ArrayStore({"a": np.zeros(9), "b": np.zeros(9)}), 2, {}, "with one column"),
    ],
)
def test_bad_windows(array, length, options, words):
    with pytest.raises(ValueError, match=words):
        windows(array, length, **options)


@pytest.mark.usefixtures("unchecked")
def test_a_list_is_no_sequence():
    with pytest.raises(TypeError, match="array or a store, got list; convert it"):
        windows([1, 2, 3], 2)  # type: ignore[arg-type]
    for source in ("tokens.npy", {"tokens": np.arange(9)}):
        with pytest.raises(TypeError, match=r"open it: open_store\(tokens\)"):
            windows(source, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["best_fit", "sequential"])
@hypothesis.given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=30),
    length=st.integers(1, 12),
)
def test_packing_keeps_every_token_once(strategy, lengths, length):
    hypothesis.assume(sum(lengths) > 0)
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint16)
    document = np.repeat(np.arange(len(lengths)), lengths)
    store = pack_sequences(tokens, np.array(lengths), length, strategy=strategy)
    batch = everything(store)
    assert batch["tokens"].shape == (len(store), length)
    filled = batch["segment_ids"] > 0
    np.testing.assert_array_equal(np.sort(batch["tokens"][filled]), tokens)
    assert not batch["tokens"][~filled].any() and not batch["positions"][~filled].any()
    assert store.efficiency == pytest.approx(filled.mean())
    for row in range(len(store)):
        ids = batch["segment_ids"][row]
        # Padding only at the end, no empty row, ids 1, 2, ... in order.
        np.testing.assert_array_equal(np.sort(~filled[row]), ~filled[row])
        assert np.unique(ids[filled[row]]).tolist() == list(range(1, ids.max() + 1))
        for number in range(1, ids.max() + 1):
            mine = np.flatnonzero(ids == number)
            run = batch["tokens"][row][mine].astype(int)
            np.testing.assert_array_equal(np.diff(mine), 1)
            np.testing.assert_array_equal(run, run[0] + np.arange(len(run)))
            assert len(set(document[run - 1])) == 1
            np.testing.assert_array_equal(
                batch["positions"][row][mine], np.arange(len(run))
            )
    if strategy == "sequential":
        np.testing.assert_array_equal(batch["tokens"].ravel()[: len(tokens)], tokens)


@hypothesis.given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    length=st.integers(1, 25),
)
def test_best_fit_is_that_of_the_textbook(lengths, length):
    pieces = [length] * sum(n // length for n in lengths)
    pieces += [n % length for n in lengths if n % length]
    rooms = []
    for piece in sorted(pieces, reverse=True):
        fitting = [room for room in rooms if room >= piece]
        if fitting:
            rooms[rooms.index(min(fitting))] -= piece
        else:
            rooms.append(length - piece)
    tokens = np.ones(sum(lengths), np.uint8)
    batch = everything(pack_sequences(tokens, np.array(lengths), length))
    rest = length - batch["tokens"].sum(1, dtype=np.int64)
    assert sorted(rest.tolist()) == sorted(rooms)
    # No document is cut but into whole rows and a rest.
    begins = np.count_nonzero((batch["positions"] == 0) & (batch["segment_ids"] > 0))
    assert begins == len(pieces)


def test_packed_rows_come_from_any_source_in_narrow_dtypes(tmp_path, rng):
    tokens = rng.integers(1, 250, 3000).astype(np.uint8)
    lengths = rng.multinomial(3000, np.ones(90) / 90)
    stores = [
        pack_sequences(source, lengths, 300, name="ids")
        for source in sources(tokens, tmp_path)
    ]
    batches = [store.take([3, 0, 3]) for store in stores]
    for batch in batches:
        dtypes = {name: column.dtype for name, column in batch.items()}
        assert dtypes == {
            "ids": np.uint8,
            "segment_ids": np.uint8,
            "positions": np.uint16,
        }
        for name, column in batch.items():
            np.testing.assert_array_equal(column, batches[0][name])
            np.testing.assert_array_equal(column[0], column[2])
    again = pickle.loads(pickle.dumps(stores[0]))
    np.testing.assert_array_equal(again.take([1])["ids"], stores[0].take([1])["ids"])
    assert again.fingerprint() == stores[0].fingerprint()
    assert pack_sequences(tokens, lengths, 299).fingerprint() != again.fingerprint()
    assert again.take([])["ids"].shape == (0, 300)
    assert stores[0].efficiency > 0.9


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([4, 4], {}, "add up to the 9 tokens, but their sum is 8"),
        ([-1, 10], {}, "must not be negative, got -1"),
        ([[9]], {}, r"got shape \(1, 1\)"),
        ([9], {"strategy": "none"}, r"\('best_fit', 'sequential'\), got 'none'"),
        ([9], {"length": 0}, "length must be at least 1, got 0"),
        ([9], {"name": "positions"}, "name must differ"),
    ],
)
def test_bad_packing(lengths, options, words):
    options = {"length": 4, **options}
    with pytest.raises(ValueError, match=words):
        pack_sequences(np.zeros(9, np.uint8), np.array(lengths), **options)


def test_packing_refuses_features_and_fractions():
    with pytest.raises(ValueError, match="one-dimensional to be packed"):
        pack_sequences(np.zeros((9, 2), np.uint8), np.array([9]), 4)
    with pytest.raises(TypeError, match="lengths must be integers, got dtype float64"):
        pack_sequences(np.zeros(9, np.uint8), np.array([9.0]), 4)


@hypothesis.given(
    n=st.integers(1, 60),
    shards=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 5),
    remainder=st.sampled_from(["drop", "pad"]),
)
def test_streams_are_contiguous_and_complete(n, shards, rows, remainder):
    batch = rows * shards
    hypothesis.assume(batch <= n)
    plans = [
        StreamPlan(
            n,
            batch,
            epochs=2,
            remainder=remainder,
            process_index=k,
            process_count=shards,
        )
        for k in range(shards)
    ]
    steps = plans[0].steps_per_epoch
    index, mask, first = (
        np.stack(
            [
                np.concatenate([call(plan, t) for plan in plans])
                for t in range(2 * steps)
            ]
        )
        for call in (StreamPlan.indices, StreamPlan.mask, StreamPlan.is_first)
    )
    np.testing.assert_array_equal(index[:steps], index[steps:])
    assert first[[0, steps]].all() and not np.delete(first, [0, steps], 0).any()
    seen = index[:steps].T[mask[:steps].T]
    np.testing.assert_array_equal(seen, np.arange(len(seen)))
    assert len(seen) == (n if remainder == "pad" else n - n % batch)
    # Row b of a step continues row b of the step before, or is padding.
    moved = np.diff(index[:steps], axis=0)
    np.testing.assert_array_equal(moved, mask[1:steps])
    assert mask[:steps].sum(0).min() >= steps - 1


def test_a_state_carried_along_streams_sees_the_whole_sequence():
    tokens = np.arange(50, dtype=np.uint8)
    store = windows(tokens, 5)
    carried = np.zeros(3, int)
    with Loader(store, StreamPlan(len(store), 3, epochs=2)) as loader:
        for batch in loader:
            carried = np.where(batch["is_first"], 0, carried)
            carried = carried + batch["tokens"].sum(1, dtype=int)
            last = batch["targets"][:, -1]
    assert last.tolist() == [15, 30, 45]
    expected = [tokens[s : s + 15].sum(dtype=int) for s in (0, 15, 30)]
    assert carried.tolist() == expected


def test_a_stream_needs_a_window():
    with pytest.raises(
        ValueError, match="7 streams need a window each, but there are 6"
    ):
        StreamPlan(6, 7)
    with pytest.raises(ValueError, match="got 'keep'"):
        StreamPlan(6, 2, remainder="keep")
    assert StreamPlan(6, 2).extra_columns == ("is_first",)
    assert StreamPlan(7, 2, remainder="pad").extra_columns == ("mask", "is_first")


def test_windows_go_through_a_shuffled_loader():
    store = windows(np.arange(101, dtype=np.uint8), 10)
    with Loader(store, BatchPlan(len(store), 5, epochs=1)) as loader:
        tokens, targets = zip(
            *((b["tokens"], b["targets"]) for b in loader), strict=True
        )
    np.testing.assert_array_equal(np.sort(tokens, None), np.arange(100))
    np.testing.assert_array_equal(np.subtract(targets, tokens), np.uint8(1))
