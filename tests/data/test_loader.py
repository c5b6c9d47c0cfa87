"""Loader: what the contract suite does not say for every loader."""

import gc
import json
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from jaxaccel.data import ArrayStore, BatchPlan, Loader, LoaderStats


def make_store(n=12):
    return ArrayStore(
        {
            "image": np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2, 1),
            "label": np.arange(n, dtype=np.uint8),
        }
    )


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


def prefetch_threads():
    return [t for t in threading.enumerate() if "prefetch" in t.name]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_closing_leaves_no_thread(prefetch):
    with Loader(make_store(), BatchPlan(12, 2), prefetch=prefetch) as loader:
        next(loader)
        assert len(prefetch_threads()) == (1 if prefetch else 0)
    assert not prefetch_threads()
    loader.close()
    for use in (iter, next, lambda x: x.set_state(x.get_state())):
        with pytest.raises(ValueError, match="closed .after 1 batches.; build a new"):
            use(loader)


def test_the_end_closes_and_a_second_pass_is_an_error():
    loader = Loader(make_store(), BatchPlan(12, 4, epochs=1))
    assert len(list(loader)) == len(loader) == 3
    assert not prefetch_threads()
    assert next(loader, None) is None
    assert loader.get_state()["step"] == 3
    with pytest.raises(ValueError, match="closed"):
        list(loader)


def test_a_dropped_loader_ends_its_thread():
    loader = Loader(make_store(), BatchPlan(12, 2))
    next(loader)
    del loader
    gc.collect()
    assert not prefetch_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_leaving_a_loop_and_entering_again_continues(prefetch):
    plan = BatchPlan(12, 4, epochs=1, shuffle=False)
    with Loader(make_store(), plan, prefetch=prefetch) as loader:
        for _ in loader:
            break
        assert labels(loader) == [[4, 5, 6, 7], [8, 9, 10, 11]]


def test_no_noise_at_exit_without_close():
    code = (
        "import numpy as np\n"
        "from jaxaccel.data import ArrayStore, BatchPlan, Loader\n"
        "store = ArrayStore({'x': np.zeros((64, 8), np.uint8)})\n"
        "loader = Loader(store, BatchPlan(64, 2))\n"
        "next(loader)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_keeps_its_type_names_its_step_and_can_be_retried(prefetch):
    broken = threading.Event()
    broken.set()

    def transform(batch, rng):
        if 9 in batch["label"] and broken.is_set():
            raise KeyError("no such picture")
        return batch

    plan = BatchPlan(12, 4, epochs=1, shuffle=False)
    with Loader(make_store(), plan, prefetch=prefetch, transform=transform) as loader:
        assert labels([next(loader), next(loader)])[1] == [4, 5, 6, 7]
        with pytest.raises(KeyError, match="no such picture") as caught:
            next(loader)
        assert "step 2" in caught.value.__notes__[0]
        assert loader.get_state()["step"] == 2
        broken.clear()
        assert labels(loader) == [[8, 9, 10, 11]]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("error", [StopIteration, SystemExit, GeneratorExit])
def test_an_exception_that_would_end_the_run_silently_does_not(prefetch, error):
    def transform(batch, rng):
        raise error

    plan = BatchPlan(12, 4)
    with Loader(make_store(), plan, prefetch=prefetch, transform=transform) as loader:
        with pytest.raises(RuntimeError, match=f"{error.__name__} in the batch"):
            next(loader)


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (None, TypeError, "return a dict of arrays, got NoneType"),
        ({}, TypeError, "return a dict of arrays"),
        ({"x": [1], "mask": np.ones(1)}, TypeError, "column 'x' is list"),
        ({"x": np.array(1)}, TypeError, "column 'x'"),
        ({"x": np.ones(2), "mask": np.ones(3)}, ValueError, "different lengths"),
        ({"x": np.ones(2)}, ValueError, "dropped the 'mask'"),
    ],
)
def test_bad_results_of_a_transform(result, error, words):
    plan = BatchPlan(12, 5, remainder="pad")
    loader = Loader(make_store(), plan, transform=lambda batch, rng: result)
    with loader, pytest.raises(error, match=words):
        next(loader)


def test_transform_streams_differ_by_step_seed_and_process():
    def draw(plan, step):
        loader = Loader(
            make_store(),
            plan,
            transform=lambda batch, rng: {"x": rng.integers(0, 2**62, 4)},
        )
        with loader:
            loader.set_state({**loader.get_state(), "step": step})
            return tuple(next(loader)["x"].tolist())

    plans = [
        BatchPlan(12, 4, seed=seed, process_index=k, process_count=2)
        for seed in (0, 1, 2)
        for k in (0, 1)
    ]
    draws = {draw(plan, step) for plan in plans for step in range(4)}
    assert len(draws) == len(plans) * 4
    assert draw(plans[0], 2) == draw(plans[0], 2)


def test_stats_count_what_was_yielded():
    plan = BatchPlan(12, 5, epochs=1, remainder="pad")
    with Loader(make_store(), plan) as loader:
        assert loader.stats == LoaderStats()
        next(loader)
        assert loader.stats.batches == 1 and loader.stats.bytes == 5 * (4 + 1 + 1)
        list(loader)
    stats = loader.stats
    assert (stats.batches, stats.examples, stats.bytes) == (3, 12, 90)
    assert stats.wait_seconds > 0


def test_waiting_is_measured():
    def slow(batch, rng):
        time.sleep(0.05)
        return batch

    plan = BatchPlan(12, 4, epochs=1)
    with Loader(make_store(), plan, prefetch=0, transform=slow) as loader:
        list(loader)
    assert loader.stats.wait_seconds >= 0.15


def test_state_survives_json_other_epochs_and_other_process_counts():
    store = make_store()
    with Loader(store, BatchPlan(12, 4, seed=3, epochs=1)) as loader:
        next(loader)
        state = json.loads(json.dumps(loader.get_state()))
    assert len(json.dumps(state)) < 300
    whole = BatchPlan(12, 4, seed=3, epochs=5)
    parts = [
        BatchPlan(12, 4, seed=3, epochs=5, process_index=k, process_count=2)
        for k in (0, 1)
    ]
    resumed = []
    for plan in (whole, *parts):
        with Loader(store, plan) as loader:
            loader.set_state(state)
            resumed.append(labels(loader))
    assert len(resumed[0]) == 14
    assert resumed[0] == [a + b for a, b in zip(*resumed[1:], strict=True)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 1}, "seed: saved 0, now 1"),
        ({"batch_size": 6}, "batch_size: saved 4, now 6"),
        ({"shuffle": False}, "shuffle: saved True, now False"),
        ({"remainder": "pad"}, "remainder: saved 'drop', now 'pad'"),
    ],
)
def test_a_state_of_another_plan_is_refused(change, words):
    store = make_store()
    with Loader(store, BatchPlan(12, 4)) as loader:
        state = loader.get_state()
    options = {"batch_size": 4, **change}
    with Loader(store, BatchPlan(12, **options)) as loader:
        with pytest.raises(ValueError, match=words):
            loader.set_state(state)


def test_a_state_of_another_store_or_past_the_end_is_refused():
    plan = BatchPlan(12, 4, epochs=1)
    with Loader(make_store(), plan) as loader:
        state = loader.get_state()
        for bad, words in [
            ({"step": 1}, "keys 'step' and 'fingerprint'"),
            ({**state, "step": 4}, "step 4, but the plan ends after 3"),
            ({**state, "step": -1}, "integer >= 0, got -1"),
            ({**state, "step": "1"}, "integer >= 0, got '1'"),
            ({**state, "fingerprint": "x"}, "must be a dict"),
        ]:
            with pytest.raises(ValueError, match=words):
                loader.set_state(bad)
        loader.set_state({**state, "step": 3})
        assert list(loader) == []
    other = ArrayStore({"image": np.zeros((12, 2, 3, 1), np.uint8)})
    with Loader(other, plan) as loader:
        with pytest.raises(ValueError, match=r"uint8\[2, 2, 1\].*uint8\[2, 3, 1\]"):
            loader.set_state(state)


def test_bad_arguments():
    with pytest.raises(ValueError, match="for 13 examples, but the store holds 12"):
        Loader(make_store(), BatchPlan(13, 4))
    with pytest.raises(ValueError, match="prefetch must be at least 0, got -1"):
        Loader(make_store(), BatchPlan(12, 4), prefetch=-1)
    masked = ArrayStore({"mask": np.ones(12, bool)})
    with pytest.raises(ValueError, match="column 'mask'"):
        Loader(masked, BatchPlan(12, 5, remainder="pad"))
    with Loader(masked, BatchPlan(12, 5)) as loader:
        assert next(loader)["mask"].all() and loader


def test_one_tenth_of_an_absurd_run_is_not_prefetched():
    taken = []

    def transform(batch, rng):
        taken.append(1)
        return batch

    with Loader(make_store(), BatchPlan(12, 4), transform=transform) as loader:
        next(loader)
        time.sleep(0.1)
        # One yielded, two in the buffer, one in the thread's hand.
        assert len(taken) <= 4
