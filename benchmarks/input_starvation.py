"""How long a simulated step waits, for `input_pipeline.py --part starvation`."""

import argparse
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxaccel.data import ArrayStore, BatchPlan, Loader, to_device
from jaxaccel.records import Headline, Record

MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)
STD = np.array([0.2470, 0.2435, 0.2616], np.float32)
SIZE = 32
OURS, UNTHREADED = "jaxaccel, uint8, thread", "jaxaccel, uint8, no thread"
CONTROL, CONTROL_THREAD = "float32 on the host", "float32 on the host, thread"
MOST, LEAST_CONTROL = 10.0, 50.0


def measure(options: argparse.Namespace) -> Record:
    examples = options.examples or 50_000
    batch_size = options.batch_size or 1024
    steps = options.batches or 40
    rng = np.random.default_rng(0)
    shape = (examples, SIZE, SIZE, 3)
    store = ArrayStore(
        {
            "image": rng.integers(256, size=shape, dtype=np.uint8),
            "label": rng.integers(10, size=examples, dtype=np.uint8),
        }
    )
    plan = BatchPlan(examples, batch_size)
    rounds = {name: [] for name in CONTENDERS}
    names = list(CONTENDERS)
    for index in range(options.rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            with contextlib.ExitStack() as stack:
                batches = CONTENDERS[name](store, plan, stack)
                rounds[name].append(waiting(batches, steps, options.step_ms / 1e3))
    parameters = {"batch_size": batch_size, "examples": examples, "steps": steps}
    parameters |= {"step_ms": options.step_ms, "rounds": options.rounds}
    return describe(rounds, parameters)


def waiting(batches: Iterator[Any], steps: int, seconds: float) -> float:
    """Percent of the time that steps of so many seconds wait for their batch."""
    jax.block_until_ready(next(batches))
    waited, start = 0.0, time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        jax.block_until_ready(next(batches))
        waited += time.perf_counter() - asked
        time.sleep(seconds)
    return 100 * waited / (time.perf_counter() - start)


def ours(prefetch: int, depth: int):
    def batches(store: ArrayStore, plan: BatchPlan, stack: contextlib.ExitStack):
        loader = Loader(store, plan, prefetch=prefetch)
        return iter(stack.enter_context(to_device(loader, depth=depth)))

    return batches


def control(store: ArrayStore, plan: BatchPlan, stack: contextlib.ExitStack):
    del stack
    images, labels = store.columns["image"], store.columns["label"]
    step = 0
    while True:
        rows = plan.indices(step)
        image = (images[rows].astype(np.float32) / 255 - MEAN) / STD
        yield jax.device_put((image, labels[rows].astype(np.int32)))
        step += 1


def control_thread(store: ArrayStore, plan: BatchPlan, stack: contextlib.ExitStack):
    """The same with two batches prepared ahead by a thread."""
    ready: queue.Queue[Any] = queue.Queue(2)
    stop = threading.Event()

    def work():
        for batch in control(store, plan, stack):
            while not stop.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(batch, timeout=0.05)
                    break
            if stop.is_set():
                return

    thread = threading.Thread(target=work)
    thread.start()
    stack.callback(thread.join)
    stack.callback(stop.set)
    return iter(ready.get, None)


CONTENDERS: dict[str, Callable[..., Iterator[Any]]] = {
    OURS: ours(prefetch=2, depth=2),
    UNTHREADED: ours(prefetch=0, depth=0),
    CONTROL: control,
    CONTROL_THREAD: control_thread,
}


def describe(rounds: dict[str, list[float]], parameters: dict[str, Any]) -> Record:
    medians = {name: float(np.median(values)) for name, values in rounds.items()}
    held = medians[OURS] <= MOST and medians[CONTROL] > LEAST_CONTROL
    shape = f"{parameters['batch_size']}x{SIZE}x{SIZE}x3"
    figures = {
        f"starvation, %: {name}": round(value, 1) for name, value in medians.items()
    }
    step = f"step of {parameters['step_ms']:g} ms"
    return Record.create(
        "input_pipeline_starvation",
        f"A {step} waits at most {MOST:g} % of the time for batches of {shape}; with "
        f"float32 made on the host it waits more than {LEAST_CONTROL:g} %",
        verdict="helps" if held else "no evidence",
        parameters=parameters,
        unit="% of the time",
        rounds=rounds,
        ratios=[f"{CONTROL} / {OURS}", f"{CONTROL_THREAD} / {OURS}"],
        figures=figures,
        headline=[
            Headline(
                f"Percent of the time that a {step} waits for {shape}",
                f"{medians[CONTROL]:.0f} % with float32 made on the host",
                f"starvation, %: {OURS}",
            )
        ],
    )
