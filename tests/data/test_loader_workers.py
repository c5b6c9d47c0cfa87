"""Worker processes: the same batches, clear ends, nothing left behind."""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    DataCorruptionError,
    DataWarning,
    Loader,
    open_store,
)

# What a worker imports must lie in a module of its own.
TRANSFORMS = '''
import os, signal, time
import numpy as np
from jaxaccel.data import DataCorruptionError

class Odd(Exception):
    """Cannot be rebuilt from its arguments."""
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")

def noisy(batch, rng):
    # The later of two is done first.
    time.sleep(0.004 * (batch["label"][0] % 2))
    noise = rng.integers(0, 256, batch["image"].shape, dtype=np.uint8)
    return batch | {
        "image": (batch["image"] ^ noise)[:, :, ::-1],
        "pid": np.full(len(noise), os.getpid()),
    }

def fails(batch, rng):
    return visit(batch, {4: key, 8: odd, 12: damaged, 16: stop})

def dies(batch, rng):
    return visit(batch, {8: leave, 24: kill})

def visit(batch, errors):
    for label, error in errors.items():
        if label in batch["label"]:
            error()
    return batch

def odd():
    raise Odd(1, 2)

def key():
    raise KeyError("no such picture")

def damaged():
    raise DataCorruptionError("x.npy", 3, 152, "bits flipped")

def stop():
    raise StopIteration

def leave():
    os._exit(3)

def kill():
    os.kill(os.getpid(), signal.SIGKILL)

def stuck(batch, rng):
    time.sleep(1000)

def on_cpu(batch, rng):
    import jax
    platform = jax.default_backend()
    return {"cpu": np.full(len(batch["label"]), platform == "cpu")}
'''
N = 28


@pytest.fixture(scope="module")
def transforms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("importable")
    (folder / "loader_transforms.py").write_text(TRANSFORMS)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("loader_transforms")
    sys.path.remove(str(folder))
    del sys.modules["loader_transforms"]


def make_store():
    rng = np.random.default_rng(0)
    return ArrayStore(
        {
            "image": rng.integers(0, 256, (N, 5, 3, 1), dtype=np.uint8),
            "label": np.arange(N, dtype=np.uint8),
        }
    )


def plain(batches):
    return [
        {name: x.tolist() for name, x in batch.items() if name != "pid"}
        for batch in batches
    ]


def in_order(workers=0, **options):
    plan = BatchPlan(N, 4, epochs=1, shuffle=False)
    return Loader(make_store(), plan, workers=workers, **options)


@contextlib.contextmanager
def nothing_left():
    def held():
        # Not the whole folder /dev/shm, in which other programs work, too.
        maps = Path("/proc/self/maps")
        lines = maps.read_text().splitlines() if maps.exists() else []
        shared = [line for line in lines if "/dev/shm" in line]
        return shared, len(os.listdir("/dev/fd"))

    # Starts multiprocessing's own helper, which stays.
    multiprocessing.get_context("spawn").Lock()
    before = held()
    yield
    assert not multiprocessing.active_children()
    assert not [t for t in threading.enumerate() if "jaxaccel" in t.name]
    assert held() == before


def test_batches_are_equal_and_resume_at_every_step(transforms):
    plan = BatchPlan(N, 6, seed=5, epochs=2, remainder="pad")
    with Loader(make_store(), plan, transform=transforms.noisy) as loader:
        expected = plain(loader)
        state = loader.get_state()
    assert len(expected) == 10
    with nothing_left():
        # The number of workers is no part of the state.
        for workers, steps in [(2, range(11)), (1, [7])]:
            with Loader(
                make_store(), plan, workers=workers, transform=transforms.noisy
            ) as loader:
                for step in steps:
                    loader.set_state({**state, "step": step})
                    count = len(plan) - step if step in (0, 7) else 1
                    got = [next(loader) for _ in range(min(count, len(plan) - step))]
                    assert plain(got) == expected[step : step + count]
                    if step in (0, 7):
                        pids = {int(pid) for batch in got for pid in batch["pid"]}
                        assert os.getpid() not in pids
                        assert all(batch["image"].flags.writeable for batch in got)
                assert loader.stats.seconds["receive"] > 0
                assert next(loader, None) is None or steps == [7]


def test_errors_keep_their_type_and_name_their_step(transforms):
    with nothing_left(), in_order(2, transform=transforms.fails) as loader:
        state = loader.get_state()
        assert next(loader)["label"].tolist() == [0, 1, 2, 3]
        with pytest.raises(KeyError, match="no such picture") as caught:
            next(loader)
        first, second = caught.value.__notes__
        assert first == "while preparing the batch of step 1"
        assert "in worker process" in second and "loader_transforms.py" in second
        # Any step can be tried again, or passed over.
        assert loader.get_state()["step"] == 1
        with pytest.raises(KeyError, match="no such picture"):
            next(loader)
        loader.set_state({**state, "step": 2})
        with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
            next(loader)
        loader.set_state({**state, "step": 3})
        with pytest.raises(DataCorruptionError, match="bits flipped") as corrupt:
            next(loader)
        assert (corrupt.value.record, corrupt.value.offset) == (3, 152)
        loader.set_state({**state, "step": 4})
        with pytest.raises(RuntimeError, match="StopIteration in the batch of step 4"):
            next(loader)


def test_a_worker_that_dies_is_reported_at_once_and_can_be_replaced(transforms):
    with nothing_left(), in_order(2, transform=transforms.dies) as loader:
        state = loader.get_state()
        for step, words in [(2, "ended with exit code 3"), (6, "signal 9 .Killed.")]:
            loader.set_state({**state, "step": step - 1})
            # What was made before the loss still arrives.
            next(loader)
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=words) as caught:
                next(loader)
            assert time.monotonic() - start < 10
            assert f"preparing the batch of step {step}" in str(caught.value)


def test_killed_from_outside_while_waiting(transforms):
    with nothing_left(), in_order(1, transform=transforms.stuck) as loader:
        timer = threading.Timer(1.5, kill_one)
        timer.start()
        with pytest.raises(RuntimeError, match="jaxaccel-worker-.*signal 9"):
            next(loader)
        timer.join()
        start = time.monotonic()
        loader.close()
        assert time.monotonic() - start < 5


def kill_one():
    pid = multiprocessing.active_children()[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_closing_ends_what_is_stuck(transforms):
    with nothing_left():
        loader = in_order(2, transform=transforms.stuck)
        loader.start_prefetch()
        time.sleep(1)
        start = time.monotonic()
        loader.close()
        loader.close()
        assert time.monotonic() - start < 5
        with pytest.raises(ValueError, match="closed"):
            next(loader)


def test_a_dropped_loader_ends_its_workers_which_saw_no_accelerator(
    transforms, monkeypatch
):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with nothing_left():
        loader = in_order(1, transform=transforms.on_cpu)
        assert next(loader)["cpu"].all()
        del loader


def test_no_more_is_ahead_than_allowed(transforms):
    # A batch has 4 * 16 bytes; three fit.
    with in_order(1, prefetch=9, prefetch_bytes=200) as loader:
        next(loader)
        time.sleep(0.3)
        pool = loader._source._pool  # type: ignore[attr-defined]
        assert pool._asked == 4 and len(pool._results) == 3


def test_what_cannot_be_sent_is_named_at_once():
    with nothing_left():
        with pytest.raises(TypeError, match="transform cannot be sent.*top level"):
            in_order(1, transform=lambda batch, rng: batch)
        store = ArrayStore({"x": np.zeros(8, np.uint8)})
        store.lock = threading.Lock()  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="store cannot be sent.*lock"):
            Loader(store, BatchPlan(8, 4), workers=1)


def test_copies_of_large_data_in_memory_are_pointed_out(tmp_path):
    image = np.zeros((1 << 10, 1 << 16), np.uint8)
    plan = BatchPlan(1 << 10, 4)
    with nothing_left():
        with pytest.raises(DataWarning, match="each of 1 workers gets .* 67.1 MB"):
            Loader(ArrayStore({"image": image}), plan, workers=1)
    np.save(tmp_path / "image.npy", image)
    store = open_store(tmp_path / "image.npy")
    assert len(pickle.dumps(store)) < 4096
    with Loader(store, plan, workers=1) as loader:
        assert next(loader)["image"].shape == (4, 1 << 16)


SCRIPT = """
import numpy as np
from jaxaccel.data import ArrayStore, BatchPlan, Loader

def transform(batch, rng):
    return {"x": batch["x"] + np.uint8(1)}

def main():
    store = ArrayStore({"x": np.zeros((8, 4), np.uint8)})
    loader = Loader(store, BatchPlan(8, 4), workers=1, transform=transform)
    for batch in loader:
        print("got", batch["x"].max(), flush=True)
        BODY
"""


def start_script(tmp_path, body, guard="if __name__ == '__main__':\n    "):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("BODY", body) + guard + "main()\n")
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_group_is_gone(process):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail("a process of the script is still running")


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    with start_script(tmp_path, "break", guard="") as process:
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and "got" not in out
    last = errors.strip().splitlines()[-1]
    assert "ended with exit code 1 before it could begin" in last
    assert "under `if __name__ == '__main__':`" in last
    assert_group_is_gone(process)


def test_leaving_without_close_ends_quietly(tmp_path):
    with start_script(tmp_path, "break") as process:
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, errors) == (0, "got 1\n", "")
    assert_group_is_gone(process)


@pytest.mark.parametrize("whom", ["group", "parent killed"])
def test_ctrl_c_and_a_killed_parent_leave_no_worker(tmp_path, whom):
    with start_script(tmp_path, "import time; time.sleep(100)") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "got 1\n"
        if whom == "group":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.kill()
        _, errors = process.communicate(timeout=10)
    assert process.returncode == (-2 if whom == "group" else -9)
    # The parent's traceback alone.
    assert errors.count("Traceback") == (1 if whom == "group" else 0)
    assert_group_is_gone(process)
