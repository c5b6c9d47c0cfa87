"""LoaderStats: against counts made by hand and sleeps of known length."""

import re
import time

import numpy as np
import pytest

from jaxaccel.data import ArrayStore, BatchPlan, Loader, LoaderStats, Store, to_device


def make_store(n=12):
    return ArrayStore({"label": np.arange(n, dtype=np.uint8)})


def slow(seconds):
    def transform(batch, rng):
        time.sleep(seconds)
        return batch

    return transform


def test_counts_are_those_of_what_was_yielded():
    plan = BatchPlan(12, 5, epochs=1, remainder="pad")
    with Loader(make_store(), plan) as loader:
        stats = loader.stats
        assert (stats.batches, stats.first_batch_seconds) == (0, None)
        next(loader)
        assert (stats.batches, stats.bytes) == (1, 5 * (1 + 1))
        list(loader)
    assert (stats.batches, stats.examples, stats.bytes) == (3, 12, 30)
    assert stats.first_batch_seconds and stats.wait_seconds > 0
    assert set(stats.seconds) == {"gather"} and stats.seconds["gather"] > 0


def timed_sleep(seconds, log):
    start = time.perf_counter()
    time.sleep(seconds)
    log.append(time.perf_counter() - start)


@pytest.mark.parametrize(("made", "step"), [(0.02, 0.01), (0.01, 0.03)])
def test_starvation_agrees_with_known_sleeps(made, step):
    makes, steps = [], []

    def transform(batch, rng):
        timed_sleep(made, makes)
        return batch

    plan = BatchPlan(120, 8, epochs=1)
    with Loader(make_store(120), plan, prefetch=0, transform=transform) as loader:
        for _ in loader:
            timed_sleep(step, steps)
    stats = loader.stats
    # The first wait is start-up.
    expected = sum(makes[1:]) / (sum(makes[1:]) + sum(steps))
    assert stats.starvation == pytest.approx(expected, rel=0.2)
    assert stats.step_ms == pytest.approx(1e3 * np.mean(steps), rel=0.2)
    assert stats.host_ms_p50 == pytest.approx(1e3 * np.median(makes), rel=0.2)
    rate = 120 / (sum(makes[1:]) + sum(steps))
    assert stats.examples_per_second == pytest.approx(rate, rel=0.2)


def test_starvation_with_a_thread_is_what_the_consumer_waited():
    steps, waits = [], []
    plan = BatchPlan(120, 8, epochs=1)
    with Loader(make_store(120), plan, transform=slow(0.03)) as loader:
        for _ in range(len(plan)):
            start = time.perf_counter()
            next(loader)
            waits.append(time.perf_counter() - start)
            timed_sleep(0.01, steps)
        assert next(loader, None) is None
    expected = sum(waits[1:]) / (sum(waits[1:]) + sum(steps))
    assert loader.stats.starvation == pytest.approx(expected, rel=0.2)


def test_data_that_is_ahead_starves_nobody():
    plan = BatchPlan(120, 8, epochs=1)
    with Loader(make_store(120), plan) as loader:
        for _ in loader:
            time.sleep(0.01)
    assert loader.stats.starvation < 0.5
    # Two are ahead whenever one is asked for, but for the last and the first.
    assert 0.5 < loader.stats.queue_depth <= 2


def clocked(*visits):
    """Statistics of made-up (wait, put, step) seconds, and one batch before them."""
    stats, now = LoaderStats(), 0.0
    for wait, put, step in [(1.0, 0.0, 0.0), *visits, (0.0, 0.0, 0.0)]:
        stats.begin(now)
        now += wait
        stats.end(now, wait, 1, (10, 100), {"read": 0.5 * wait, "decode": wait})
        if put:
            stats.add("put", put)
        now += put + step
    return stats


def test_figures_of_made_up_times():
    stats = clocked((0.3, 0.1, 0.6), (0.1, 0.1, 0.8))
    assert (stats.batches, stats.first_batch_seconds) == (4, 1.0)
    assert stats.starvation == pytest.approx(0.6 / 2.0)
    assert stats.examples_per_second == pytest.approx(30 / 2.0)
    assert stats.step_seconds == pytest.approx(1.4)
    assert stats.wait_ms == pytest.approx(400 / 3)
    assert stats.seconds["put"] == pytest.approx(0.2)
    summary = stats.summary()
    assert summary["starvation"] == stats.starvation
    assert summary["decode_seconds"] == pytest.approx(1.4)
    assert all(type(value) is float for value in summary.values())


def test_percentiles_look_back_on_a_bounded_window():
    stats = LoaderStats()
    for number in range(2000):
        stats.begin(float(number))
        stats.end(float(number), 0.0, 0, (1, 1), {"read": number / 1e3})
    assert stats.host_ms_p50 == pytest.approx(np.percentile(np.arange(1488, 2000), 50))
    assert stats.host_ms_p95 == pytest.approx(np.percentile(np.arange(1488, 2000), 95))
    assert stats.batches == 2000


@pytest.mark.parametrize(
    ("visits", "words"),
    [
        ([(0.3, 0.1, 0.6)] * 3, "decode: .*starvation 40 %.*convert"),
        ([(0.01, 0.5, 0.4)] * 9, "put: .*normalize inside the jitted step"),
        ([(0.001, 0.0, 0.5)] * 9, "step: a step takes 450.0 ms.*starvation 0 %"),
    ],
)
def test_the_bottleneck_is_named(visits, words):
    line = clocked(*visits).bottleneck()
    assert re.match(words, line), line


def test_before_the_second_batch_nothing_is_said():
    assert "before the second batch" in LoaderStats().bottleneck()
    assert LoaderStats().starvation == LoaderStats().host_ms_p95 == 0


def test_a_slow_transform_is_named():
    with Loader(make_store(), BatchPlan(12, 4, epochs=2), transform=slow(0.01)) as x:
        list(x)
    assert x.stats.bottleneck().startswith("transform: ")
    assert x.stats.seconds["transform"] >= 0.06


def test_putting_on_the_device_is_a_stage():
    with to_device(Loader(make_store(), BatchPlan(12, 4, epochs=2))) as batches:
        list(batches)
    stats = batches.stats
    assert stats.batches == 6 and stats.seconds["put"] > 0


class Decoding(Store):
    """A store that says how long it has read and decoded."""

    def __init__(self):
        super().__init__(make_store().spec)
        self.spent = {"read": 0.0, "decode": 0.0}

    def __len__(self):
        return 12

    def fingerprint(self):
        return "decoding"

    def stage_seconds(self):
        return self.spent

    def _read(self, rows):
        time.sleep(0.005)
        self.spent = {
            "read": self.spent["read"] + 0.001,
            "decode": self.spent["decode"] + 0.004,
        }
        return {"label": rows.astype(np.uint8)}


def test_a_store_may_tell_its_stages_apart():
    with Loader(Decoding(), BatchPlan(12, 4, epochs=2), prefetch=0) as loader:
        list(loader)
    seconds = loader.stats.seconds
    assert set(seconds) == {"read", "decode"}
    assert seconds["decode"] == pytest.approx(6 * 0.004)
    # What the store does not account for was spent on reading, too.
    assert 6 * 0.001 <= seconds["read"]
    assert sum(seconds.values()) >= 6 * 0.005
