"""Loader: what the contract suite does not say for every loader."""

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    ConcatStore,
    DeviceDataset,
    Loader,
    StreamPlan,
    memory_cache,
    open_store,
)


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


def test_state_survives_json_other_epochs_and_other_process_counts():
    store = make_store()
    with Loader(store, BatchPlan(12, 4, seed=3, epochs=1)) as loader:
        next(loader)
        state = json.loads(json.dumps(loader.get_state()))
    assert len(json.dumps(state)) < 400
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
            ("{", "is no JSON"),
        ]:
            with pytest.raises(ValueError, match=words):
                loader.set_state(bad)
        loader.set_state({**state, "step": 3})
        assert list(loader) == []
    other = ArrayStore({"image": np.zeros((12, 2, 3, 1), np.uint8)})
    with Loader(other, plan) as loader:
        with pytest.raises(ValueError, match=r"uint8\[2, 2, 1\].*uint8\[2, 3, 1\]"):
            loader.set_state(state)


def test_a_state_of_other_data_of_the_same_shape_is_refused(tmp_path):
    plan = BatchPlan(12, 4, epochs=1)
    whole = {"image": np.arange(12 * 4).reshape(12, 4).astype(np.uint8)}
    arrays = {**whole, "x": np.linspace(0, 1, 12)}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    store = ArrayStore(arrays)
    with Loader(store, plan) as loader:
        state = json.loads(json.dumps(loader.get_state()))
    # The last bits of floats may differ between machines.
    floats = ArrayStore({**whole, "x": arrays["x"] + 1e-16})
    concat = ConcatStore([store[:5], store[5:]])
    same = [open_store(tmp_path), floats, memory_cache(store, max_bytes=10**4), concat]
    for one in same:
        with Loader(one, plan) as loader:
            loader.set_state(state)
    other = ArrayStore({**arrays, "image": 1 + whole["image"]})
    with Loader(other, plan) as loader:
        with pytest.raises(ValueError, match="content of .*: saved [0-9]+, now [0-9]+"):
            loader.set_state(state)
        del state["fingerprint"]["content"]
        loader.set_state(state)


def test_resident_data_and_loader_agree_on_the_content():
    plan, store = BatchPlan(12, 4, epochs=1), make_store()
    other = ArrayStore({name: 1 + x for name, x in store.columns.items()})
    with Loader(store, plan) as loader:
        state = loader.get_state()
        with DeviceDataset(store).batches(plan) as batches:
            assert batches.get_state() == state
        with DeviceDataset(other).batches(plan) as batches:
            with pytest.raises(ValueError, match="content of .*: saved"):
                batches.set_state(state)
        # Rebuilt, as by a transformation, it does not know any more.
        rebuilt = jax.tree.map(lambda x: x, DeviceDataset(store))
        with rebuilt.batches(plan) as batches:
            batches.set_state(state)
            loader.set_state(batches.get_state())


def test_bad_arguments():
    with pytest.raises(ValueError, match="for 13 examples, but the store holds 12"):
        Loader(make_store(), BatchPlan(13, 4))
    for name, least in [("prefetch", 0), ("prefetch_bytes", 1), ("workers", 0)]:
        with pytest.raises(ValueError, match=f"{name} must be at least {least}, got"):
            Loader(make_store(), BatchPlan(12, 4), **{name: least - 1})  # type: ignore
    masked = ArrayStore({"mask": np.ones(12, bool)})
    with pytest.raises(ValueError, match="column 'mask'"):
        Loader(masked, BatchPlan(12, 5, remainder="pad"))
    with Loader(masked, BatchPlan(12, 5)) as loader:
        assert next(loader)["mask"].all() and loader


def counted(taken, grow=1):
    def transform(batch, rng):
        taken.append(1)
        return {name: np.repeat(x, grow, axis=-1) for name, x in batch.items()}

    return transform


def made_ahead(loader, taken, expected):
    """Batches made before the second is asked for, given time to settle."""
    next(loader)
    end = time.monotonic() + 5
    while len(taken) < 1 + expected and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(0.05)
    return len(taken) - 1


@pytest.mark.parametrize(
    ("prefetch", "prefetch_bytes", "grow", "expected"),
    [
        (3, 1 << 20, 1, 3),
        # A batch has 4 * 16 = 64 bytes.
        (9, 256, 1, 4),
        (9, 255, 1, 3),
        (9, 1, 1, 1),
        # What the transform returns counts: 128 bytes.
        (9, 256, 2, 2),
    ],
)
def test_no_more_is_prefetched_than_allowed(prefetch, prefetch_bytes, grow, expected):
    taken = []
    store = ArrayStore({"x": np.zeros((12, 16), np.uint8)})
    with Loader(
        store,
        BatchPlan(12, 4),
        prefetch=prefetch,
        prefetch_bytes=prefetch_bytes,
        transform=counted(taken, grow),
    ) as loader:
        assert made_ahead(loader, taken, expected) == expected
        next(loader)


def test_start_prefetch_does_not_wait_for_the_first_call():
    taken = []
    with Loader(make_store(), BatchPlan(12, 4), transform=counted(taken)) as loader:
        assert not taken
        loader.start_prefetch()
        end = time.monotonic() + 5
        while len(taken) < 2 and time.monotonic() < end:
            time.sleep(0.002)
        assert len(taken) == 2
        assert labels([next(loader)])[0] == [
            int(i) for i in BatchPlan(12, 4).indices(0)
        ]


def test_closing_in_another_thread_ends_a_wait():
    started, release = threading.Event(), threading.Event()

    def transform(batch, rng):
        started.set()
        release.wait(20)
        return batch

    def close():
        started.wait(20)
        loader.close()

    loader = Loader(make_store(), BatchPlan(12, 4), transform=transform)
    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed while a batch was waited for"):
        next(loader)
    release.set()
    closer.join()
    assert not prefetch_threads()


@pytest.mark.parametrize("options", [{}, {"workers": 1}])
def test_what_is_closed_does_not_start_again(options):
    loader = Loader(make_store(), BatchPlan(12, 4), **options)
    loader.close()
    # As a consumer would that had looked just before.
    with pytest.raises(RuntimeError, match="closed while a batch was waited for"):
        loader._source.start(0)
    assert not prefetch_threads()


def test_a_plan_adds_its_columns_and_a_transform_must_keep_them():
    plan = StreamPlan(12, 3, epochs=1)
    with Loader(make_store(), plan) as loader:
        batches = list(loader)
    assert labels(batches)[1] == [1, 5, 9]
    firsts = [batch["is_first"].tolist() for batch in batches]
    assert firsts == [[True] * 3] + [[False] * 3] * 3

    def drops(batch, rng):
        return {"label": batch["label"]}

    with Loader(make_store(), plan, transform=drops) as loader:
        with pytest.raises(ValueError, match="dropped the 'is_first' that the plan"):
            next(loader)
    clash = ArrayStore({"is_first": np.zeros(12, bool)})
    with pytest.raises(ValueError, match="'is_first', which the plan would hide"):
        Loader(clash, plan)


def resident_bytes():
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_hundred_epochs_keep_no_memory(prefetch):
    # 1.2 MB an epoch: keeping a sixth of the batches would already show.
    store = ArrayStore({"image": np.ones((400, 32, 32, 3), np.uint8)})
    with Loader(store, BatchPlan(400, 40, epochs=110), prefetch=prefetch) as loader:
        for _ in range(100):
            next(loader)
        before = resident_bytes()
        assert sum(1 for _ in loader) == 1000
    assert resident_bytes() - before < 20e6


def test_the_first_batch_waits_for_no_start_up():
    # Structure, not time: no grain, no process, and no thread but the one.
    code = (
        "import sys, threading, multiprocessing\n"
        "import numpy as np\n"
        "from jaxaccel.data import ArrayStore, BatchPlan, Loader\n"
        "store = ArrayStore({'x': np.zeros((64, 8), np.uint8)})\n"
        "with Loader(store, BatchPlan(64, 2)) as loader:\n"
        "    next(loader)\n"
        "    print('grain' in sys.modules, len(multiprocessing.active_children()),\n"
        "          threading.active_count())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["False", "0", "2"], "")
