"""Columns, slices and batches of a store."""

import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    ColumnSpec,
    ConcatStore,
    Loader,
    Store,
    memory_cache,
    open_store,
)


@hypothesis.given(
    data=st.data(),
    shape=st.lists(st.integers(0, 4), max_size=3),
    dtype=st.sampled_from(["u1", ">u2", "<i4", ">f8", "f2", "?"]),
    layout=st.sampled_from(["plain", "reversed", "strided", "fortran", "unaligned"]),
)
def test_take_equals_fancy_indexing_for_every_layout(data, shape, dtype, layout):
    n = data.draw(st.integers(1, 9))
    rng = np.random.default_rng(n)
    array = rng.integers(0, 50, (n, *shape)).astype(dtype)
    if layout == "reversed":
        array = array[::-1]
    elif layout == "strided":
        array = np.repeat(array, 2, axis=0)[::2]
    elif layout == "fortran":
        array = np.asfortranarray(array)
    elif layout == "unaligned":
        raw = b"x" + array.tobytes()
        array = np.frombuffer(raw, dtype, offset=1).reshape(array.shape)
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=12))
    taken = ArrayStore({"x": array}).take(np.array(rows, int))["x"]
    expected = array[np.array(rows, int)]
    assert taken.dtype == array.dtype.newbyteorder("=") and taken.dtype.isnative
    assert taken.flags.writeable and not np.shares_memory(taken, array)
    np.testing.assert_array_equal(taken, expected)


def test_slices_share_memory_and_scans_cover_everything(rng):
    images = rng.integers(0, 256, (10, 2, 2, 1), dtype=np.uint8)
    store = open_store({"image": images, "label": jnp.arange(10, dtype=jnp.uint8)})
    part = store[2:9]
    assert len(part) == 7 and np.shares_memory(part.columns["image"], images)
    batches = list(part.scan(3))
    assert [len(b["label"]) for b in batches] == [3, 3, 1]
    np.testing.assert_array_equal(
        np.concatenate([b["image"] for b in batches]), images[2:9]
    )
    assert [int(x) for b in store[::-3].scan(9) for x in b["label"]] == [9, 6, 3, 0]
    assert "10 examples" in repr(store) and "uint8[2, 2, 1]" in repr(store)


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        ({}, ValueError, "at least one column"),
        ({"x": np.zeros((0, 2), np.uint8)}, ValueError, "'x' is empty"),
        ({"x": np.array(3)}, ValueError, "'x' is a scalar"),
        ({"x": np.array([{}], object)}, TypeError, "'x' has dtype object"),
        ({"x": np.array(["a"])}, TypeError, "'x' has dtype <U1"),
        ({"x": np.zeros(2, "c8")}, TypeError, "'x' has dtype complex64"),
        ({"": np.zeros(2)}, TypeError, "non-empty string"),
        (
            {"image": np.zeros((3, 2), np.uint8), "label": np.zeros(4, np.uint8)},
            ValueError,
            "'image' has 3, 'label' has 4",
        ),
    ],
)
def test_bad_columns(columns, error, words):
    with pytest.raises(error, match=words):
        open_store(columns)


@pytest.mark.parametrize(
    ("indices", "error", "words"),
    [
        ([0, 5], IndexError, "index 5 is out of range.*0 to 4"),
        ([-1], IndexError, "index -1"),
        ([0.0], TypeError, "float64"),
        ([True] * 5, TypeError, "flatnonzero"),
        ([[0]], ValueError, "one-dimensional"),
        (2, ValueError, "one-dimensional"),
    ],
)
def test_bad_indices(indices, error, words):
    store = ArrayStore({"x": np.arange(5)})
    with pytest.raises(error, match=words):
        store.take(indices)


def test_bad_slices_and_scans():
    store = ArrayStore({"x": np.arange(5)})
    with pytest.raises(ValueError, match=r"store\[5:None:None\] holds no example"):
        store[5:]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        store.scan(0)


class Own(Store):
    """A user's store, which reads what it is told to."""

    def __init__(self, read):
        columns = {"x": ColumnSpec((2,), np.dtype(np.uint8))}
        super().__init__({**columns, "y": ColumnSpec((), np.dtype(np.int32))})
        self.read = read

    def __len__(self):
        return 8

    def fingerprint(self):
        return "own"

    def _read(self, rows):
        return self.read(rows)


def sound(rows):
    return {"x": np.ones((len(rows), 2), np.uint8), "y": np.arange(8, dtype="i4")[rows]}


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda batch: None, TypeError, "dict of arrays, one row.*got NoneType"),
        (lambda batch: {}, ValueError, r"columns \['x', 'y'\].*got \[\]; correct"),
        (lambda batch: {**batch, "z": batch["y"]}, ValueError, "'x', 'y', 'z'"),
        (lambda batch: {**batch, "y": [0] * 4}, TypeError, "'y'.*got list"),
        (
            lambda batch: {**batch, "y": np.ma.masked_equal(batch["y"], 1)},
            TypeError,
            "'y'.*got MaskedArray",
        ),
        (
            lambda batch: {name: array[:1] for name, array in batch.items()},
            ValueError,
            r"'x' as uint8\[4, 2\].*got uint8\[1, 2\]",
        ),
        (
            lambda batch: {**batch, "y": batch["y"].astype(np.int64)},
            ValueError,
            r"'y' as int32\[4\].*got int64\[4\]",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_a_users_store_reads_is_compared_with_its_columns(change, error, words):
    own = Own(lambda rows: change(sound(rows)))
    both = ConcatStore([Own(sound), own])
    calls = [
        lambda: own.take(np.arange(4)),
        lambda: next(own.scan(4)),
        lambda: own[2:].take(np.arange(4)),
        lambda: both.take([0, 8, 9, 10, 11]),
        lambda: memory_cache(own, max_bytes=1000).take(np.arange(4)),
        lambda: next(Loader(own, BatchPlan(8, 4), prefetch=0)),
    ]
    for call in calls:
        with pytest.raises(error, match=words):
            call()


def test_a_users_scan_must_cover_the_store():
    class Scans(Own):
        def _scan(self, size):
            for i in range(count):
                yield sound(np.arange(4) + 4 * (i % 2))

    count = 1
    with pytest.raises(TypeError, match="got NoneType"):
        list(Scans(sound).scan(4))
    count = 3
    with pytest.raises(ValueError, match=r"_scan\(4\) goes on after the store's 8"):
        list(Scans(sound).scan(4))
    count = 2
    assert [batch["y"].tolist() for batch in Scans(sound).scan(4)][1] == [4, 5, 6, 7]


def test_batches_do_not_change_with_what_a_users_store_keeps():
    kept = sound(np.arange(8))
    views = Own(lambda rows: {name: array[: len(rows)] for name, array in kept.items()})
    whole = Own(lambda rows: kept)
    with Loader(views, BatchPlan(8, 4, epochs=1)) as loader:
        batches = [
            *loader,
            *views.scan(4),
            whole.take(np.arange(8)),
            views[:3].take([0]),
        ]
    for array in kept.values():
        array[:] = 77
    for batch in batches:
        assert not any((array == 77).any() for array in batch.values())
        batch["x"][:] = 5
    assert (kept["x"] == 77).all()


# Without the annotations being executed, as users run the package.
UNCHECKED = """
import numpy as np
import jaxaccel.data as d

def message(call):
    try:
        call()
    except TypeError as error:
        return str(error)

store = d.ArrayStore({"x": np.arange(5)})
plan = d.BatchPlan(5, 2)
calls = [
    (lambda: d.open_store([1, 2]), "mapping of columns"),
    (lambda: d.open_store({"x": [1]}), "'x' must be an array or a path, got list"),
    (lambda: d.open_store({"x": np.uint8(3)}), "'x' must be an array or a path"),
    (lambda: d.open_store({"": np.zeros(2)}), "non-empty string"),
    (lambda: store[2], "store.take([index])"),
    (lambda: d.BatchPlan(5, 2.0), "batch_size must be an integer, got 2.0"),
    (lambda: d.BatchPlan(5, 2, seed="a"), "seed must be an integer, got 'a'"),
    (lambda: d.Loader(store, plan, prefetch=0.5), "prefetch must be an int"),
]
for call, words in calls:
    assert words in (message(call) or "no error"), (words, message(call))
assert d.BatchPlan(np.int64(5), np.uint8(2)).steps_per_epoch == 2
print("fine")
"""


def test_type_errors_that_annotations_would_hide():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", UNCHECKED], capture_output=True, text=True
    )
    assert done.stdout == "fine\n", done.stderr
