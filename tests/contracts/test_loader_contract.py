"""What every way of loading must hold, as one table."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    ClassBalancedPlan,
    ConcatStore,
    DeviceDataset,
    Loader,
    Mixture,
    StreamPlan,
    WeightedPlan,
    open_store,
    to_device,
)

EXAMPLES = 23
BATCH = 4


def noisy(batch, rng):
    batch["image"] = batch["image"] ^ rng.integers(0, 256, (), dtype=np.uint8)
    return batch


# name -> (maker of an iterator over (store, plan), whether labels alone decide
# the images, so that another number of processes gives the same ones)
LOADERS = {
    "loader": (lambda s, p: Loader(s, p), True),
    "loader without thread": (lambda s, p: Loader(s, p, prefetch=0), True),
    "loader with transform": (lambda s, p: Loader(s, p, transform=noisy), False),
    "to_device": (lambda s, p: to_device(Loader(s, p)), True),
    "to_device ahead by 5": (lambda s, p: to_device(Loader(s, p), depth=5), True),
    "to_device at once": (
        lambda s, p: to_device(Loader(s, p, prefetch=0), depth=0),
        True,
    ),
    "to_device of a transform": (
        lambda s, p: to_device(Loader(s, p, transform=noisy)),
        False,
    ),
    "resident": (lambda s, p: DeviceDataset(s).batches(p), True),
}
MAKERS = {name: maker for name, (maker, _) in LOADERS.items()}


@pytest.fixture(scope="module")
def store():
    rng = np.random.default_rng(0)
    return ArrayStore(
        {
            "image": rng.integers(0, 256, (EXAMPLES, 3, 2, 1), dtype=np.uint8),
            "label": np.arange(EXAMPLES, dtype=np.uint16),
        }
    )


def plan(remainder, **options):
    return BatchPlan(EXAMPLES, BATCH, seed=5, epochs=2, remainder=remainder, **options)


def host(batches):
    return [{name: np.asarray(x) for name, x in batch.items()} for batch in batches]


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("name", MAKERS)
def test_two_runs_are_equal_and_dtypes_are_kept(store, name, remainder):
    runs = [host(MAKERS[name](store, plan(remainder))) for _ in range(2)]
    assert_equal(*runs)
    first = runs[0][0]
    assert first["image"].dtype == np.uint8 and first["image"].shape == (4, 3, 2, 1)
    assert first["label"].dtype == np.uint16
    assert ("mask" in first) == (remainder == "pad")
    assert len(runs[0]) == len(plan(remainder))


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("name", MAKERS)
def test_every_example_once_an_epoch_with_its_own_image(store, name, remainder):
    batches = host(MAKERS[name](store, plan(remainder)))
    steps = plan(remainder).steps_per_epoch
    for epoch in (batches[:steps], batches[steps:]):
        masks = [b.get("mask", np.ones(BATCH, bool)) for b in epoch]
        seen = [
            int(x) for b, m in zip(epoch, masks, strict=True) for x in b["label"][m]
        ]
        assert len(seen) == len(set(seen))
        assert len(seen) == (EXAMPLES if remainder == "pad" else 20)
    if LOADERS[name][1]:
        for batch in batches:
            np.testing.assert_array_equal(
                batch["image"], store.columns["image"][batch["label"]]
            )


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("name", MAKERS)
def test_resuming_at_every_step_of_two_epochs_is_bit_equal(store, name, remainder):
    uninterrupted = host(MAKERS[name](store, plan(remainder)))
    states = []
    with MAKERS[name](store, plan(remainder)) as batches:
        states.append(batches.get_state())
        for _ in batches:
            states.append(batches.get_state())
    assert [state["step"] for state in states] == list(range(len(uninterrupted) + 1))
    for step, state in enumerate(states):
        with MAKERS[name](store, plan(remainder)) as batches:
            batches.set_state(state)
            assert_equal(host(batches), uninterrupted[step:])


@pytest.mark.parametrize("name", MAKERS)
def test_rewinding_a_running_loader(store, name):
    uninterrupted = host(MAKERS[name](store, plan("drop")))
    with MAKERS[name](store, plan("drop")) as batches:
        start = batches.get_state()
        for _ in range(2):
            next(batches)
        middle = batches.get_state()
        next(batches)
        batches.set_state(start)
        assert_equal(host([next(batches)]), uninterrupted[:1])
        batches.set_state(middle)
        assert_equal(host(batches), uninterrupted[2:])


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", [n for n, (_, pure) in LOADERS.items() if pure])
def test_order_does_not_depend_on_the_processes(store, name, processes):
    whole = host(MAKERS[name](store, plan("pad")))
    parts = [
        host(MAKERS[name](store, plan("pad", process_index=k, process_count=processes)))
        for k in range(processes)
    ]
    joined = [
        {column: np.concatenate([b[column] for b in batches]) for column in batches[0]}
        for batches in zip(*parts, strict=True)
    ]
    assert_equal(joined, whole)


def test_states_are_interchangeable(store):
    uninterrupted = host(Loader(store, plan("pad")))
    with MAKERS["to_device"](store, plan("pad")) as batches:
        for _ in range(5):
            next(batches)
        state = batches.get_state()
    for maker, pure in LOADERS.values():
        if pure:
            with maker(store, plan("pad")) as batches:
                batches.set_state(state)
                assert_equal(host(batches), uninterrupted[5:])


@pytest.mark.parametrize(
    ("name", "bytes_an_example"), [("to_device", 3 * 2 + 2), ("resident", 4)]
)
def test_exactly_these_bytes_are_shipped(store, name, bytes_an_example):
    with MAKERS[name](store, plan("drop")) as batches:
        for _ in batches:
            pass
        assert batches.bytes_put == 2 * 20 * bytes_an_example


@pytest.mark.parametrize("name", MAKERS)
def test_after_the_end_or_close_nothing_more_comes(store, name):
    batches = MAKERS[name](store, plan("drop"))
    assert len(list(batches)) == 10
    assert next(batches, None) is None
    with pytest.raises(ValueError, match="closed"):
        iter(batches)
    with MAKERS[name](store, plan("drop")) as batches:
        next(batches)
    with pytest.raises(ValueError, match="closed"):
        next(batches)


@hypothesis.given(
    shape=st.lists(st.integers(1, 3), max_size=3),
    dtype=st.sampled_from(["u1", "i1", "u2", ">u2", "i4", ">f4", "f2", "?"]),
    batch=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_any_narrow_column_arrives_unchanged(shape, dtype, batch, seed):
    rng = np.random.default_rng(seed)
    store = ArrayStore({"x": rng.integers(0, 100, (5, *shape)).astype(dtype)})
    plan = BatchPlan(5, batch, seed=seed, epochs=1, remainder="pad")
    expected = [store.columns["x"][plan.indices(step)] for step in range(len(plan))]
    for name in ("loader", "to_device", "resident"):
        for got, wanted in zip(host(MAKERS[name](store, plan)), expected, strict=True):
            assert got["x"].dtype == np.dtype(dtype).newbyteorder("=")
            np.testing.assert_array_equal(got["x"], wanted)


def folder_of_npy(store, folder):
    for name, array in store.columns.items():
        np.save(folder / f"{name}.npy", array)
    return open_store(folder)


def shards_of(store, count):
    ends = np.linspace(0, EXAMPLES, count + 1).astype(int)
    return ConcatStore([store[a:b] for a, b in zip(ends[:-1], ends[1:], strict=True)])


# name -> maker of a store with the same examples, from the fixture and a folder
STORES = {
    "slice": lambda s, folder: shards_of(s, 1)[:],
    "reversed twice": lambda s, folder: s[::-1][::-1],
    "2 shards": lambda s, folder: shards_of(s, 2),
    "3 shards": lambda s, folder: shards_of(s, 3),
    "8 shards": lambda s, folder: shards_of(s, 8),
    "npy": folder_of_npy,
    "mixture": lambda s, folder: Mixture({"a": s[:9], "b": s[9:]}),
}

# name -> maker of a plan with EXAMPLES examples, in batches of 24 (of 16, where the
# examples are not drawn again) that 1, 2, 4 and 8 processes can share
PLANS = {
    "pad": lambda **o: BatchPlan(EXAMPLES, 16, seed=1, remainder="pad", **o),
    "drop": lambda **o: BatchPlan(EXAMPLES, 16, seed=1, **o),
    "in order": lambda **o: BatchPlan(EXAMPLES, 16, shuffle=False, **o),
    "weighted": lambda **o: WeightedPlan(np.arange(EXAMPLES), 24, seed=2, **o),
    "balanced": lambda **o: ClassBalancedPlan(np.arange(EXAMPLES) % 3, 24, **o),
    "stream": lambda **o: StreamPlan(EXAMPLES, 16, remainder="pad", **o),
    "mixed": lambda **o: mixture().plan(24, seed=3, **o),
}


def mixture():
    labels = np.arange(EXAMPLES, dtype=np.uint8)
    parts = {"a": labels[:9], "b": labels[9:]}
    return Mixture(
        {k: ArrayStore({"x": v}) for k, v in parts.items()}, {"a": 2, "b": 1}
    )


@pytest.mark.parametrize("name", STORES)
def test_a_store_in_any_shape_gives_the_same_batches(store, tmp_path, name):
    other = STORES[name](store, tmp_path)
    assert_equal(host(Loader(other, plan("pad"))), host(Loader(store, plan("pad"))))


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_resumes_at_every_step(store, name, prefetch):
    made = PLANS[name](epochs=3)
    uninterrupted = host(Loader(store, made, transform=noisy, prefetch=prefetch))
    assert len(uninterrupted) == len(made) >= 3
    with Loader(store, made, transform=noisy, prefetch=prefetch) as loader:
        state = loader.get_state()
        for step in reversed(range(len(made) + 1)):
            loader.set_state({**state, "step": step})
            count = len(made) - step if step < 2 else min(2, len(made) - step)
            got = host([next(loader) for _ in range(count)])
            assert_equal(got, uninterrupted[step : step + count])


@pytest.mark.parametrize("processes", [2, 4, 8])
@pytest.mark.parametrize("name", PLANS)
def test_the_order_of_any_plan_is_that_of_one_process(store, name, processes):
    whole = host(Loader(store, PLANS[name](epochs=2)))
    parts = [
        host(
            Loader(
                store,
                PLANS[name](epochs=2, process_index=k, process_count=processes),
                prefetch=0,
            )
        )
        for k in range(processes)
    ]
    joined = [
        {column: np.concatenate([b[column] for b in batches]) for column in batches[0]}
        for batches in zip(*parts, strict=True)
    ]
    assert_equal(joined, whole)


@pytest.mark.parametrize("examples", [23, 24, 48])
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_the_processes_together_see_every_example_once(examples, processes):
    labels = ArrayStore({"x": np.arange(examples, dtype=np.uint8)})
    size = 2 * processes
    for epoch in range(2):
        seen = []
        for k in range(processes):
            plan = BatchPlan(
                examples,
                size,
                epochs=2,
                remainder="pad",
                process_index=k,
                process_count=processes,
            )
            with Loader(labels, plan, prefetch=0) as loader:
                step = epoch * plan.steps_per_epoch
                loader.set_state({**loader.get_state(), "step": step})
                for _ in range(plan.steps_per_epoch):
                    batch = next(loader)
                    seen += batch["x"][batch["mask"]].tolist()
        assert sorted(seen) == list(range(examples))


def test_workers_give_the_same_batches_on_the_device(store):
    whole = host(Loader(store, plan("pad")))
    with to_device(Loader(store, plan("pad"), workers=1)) as batches:
        states = []
        got = []
        for batch in batches:
            got.append(batch)
            states.append(batches.get_state())
        assert_equal(host(got), whole)
    assert [state["step"] for state in states] == list(range(1, len(whole) + 1))
