"""Meters, writers and the progress line."""

import io
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import train


def events_of(logdir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logdir))
    events.Reload()
    return events


class Outputs:
    """Stands for a device result that is ready after a while."""

    def __init__(self, seconds):
        self.ready_at = time.perf_counter() + seconds

    def block_until_ready(self):
        time.sleep(max(0.0, self.ready_at - time.perf_counter()))
        return self


def slow_batches(n, seconds):
    for i in range(n):
        time.sleep(seconds)
        yield i


@pytest.mark.parametrize(
    ("load", "compute", "starvation"),
    [(0.04, 0.01, 0.8), (0.0, 0.03, 0.0), (0.03, 0.03, 0.5)],
)
def test_starvation_of_a_loop_that_waits_for_its_step(load, compute, starvation):
    """Serial load and compute: the device idles load / (load + compute)."""
    with train.Meter() as meter:
        for _ in meter.watch(slow_batches(12, load)):
            meter.update(Outputs(compute), examples=10)
            meter.drain()
    reading = meter.reading()
    assert reading.steps == 11 and reading.examples == 110
    assert reading.starvation == pytest.approx(starvation, abs=0.2)
    # A busy machine wakes late, never early; exact times have a test with a clock.
    assert 0.9 * compute <= reading.step_seconds <= reading.seconds / reading.steps


def test_loading_that_hides_behind_the_step_is_no_starvation():
    with train.Meter() as meter:
        for _ in meter.watch(slow_batches(10, 0.02)):
            meter.update(Outputs(0.06), examples=1)
            # The device works one step after the other.
            time.sleep(0.04)
    assert meter.reading().starvation < 0.25


def test_the_loop_runs_at_most_max_in_flight_steps_ahead():
    started = time.perf_counter()
    with train.Meter(max_in_flight=2) as meter:
        for _ in meter.watch(range(4)):
            meter.update(Outputs(0.05), examples=1)
            assert len(meter._in_flight) <= 2
    assert time.perf_counter() - started >= 0.05


def test_pauses_do_not_count():
    with train.Meter(skip=0) as meter:
        for i in meter.watch(range(6)):
            meter.update(Outputs(0.01), examples=1)
            if i == 3:
                with meter.paused():
                    time.sleep(0.5)
    assert meter.reading().seconds < 0.4


def test_a_failed_step_is_raised_in_the_loop():
    class Broken:
        def block_until_ready(self):
            raise RuntimeError("out of memory")

    with train.Meter() as meter:
        with pytest.raises(RuntimeError, match="out of memory"):
            for _ in range(3):
                meter.update(Broken(), examples=1)
                meter.drain()


def test_the_meter_ends_its_thread_and_refuses_use_outside():
    before = threading.active_count()
    with train.Meter() as meter:
        meter.update(jnp.ones(()), examples=1)
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="inside its context"):
        meter.update(jnp.ones(()), examples=1)
    with pytest.raises(ValueError, match="at least 1.*got 0"):
        train.Meter(max_in_flight=0)


def test_metric_buffer_reads_the_device_at_log_steps_only(monkeypatch):
    reads = []
    real = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: reads.append(1) or real(x))
    written = {}

    class Writer:
        def scalars(self, step, values):
            written[step] = values

    with train.MetricBuffer(Writer(), every=4) as buffer:
        logged = [
            buffer.append(i, {"loss": jnp.array(i / 2), "norms": {"a": jnp.array(1.0)}})
            for i in range(10)
        ]
        assert len(reads) == 2
    assert logged == [i in (3, 7) for i in range(10)]
    assert len(reads) == 3
    assert written == {i: {"loss": i / 2, "norms/a": 1.0} for i in range(10)}
    assert buffer.latest == {"loss": 4.5, "norms/a": 1.0}


def test_tensorboard_files_hold_what_was_written(tmp_path, rng):
    images = rng.integers(0, 256, (2, 5, 4, 1)).astype(np.uint8)
    with train.TensorBoardWriter(tmp_path) as writer:
        for step in range(3):
            writer.scalars(step, {"loss": 1.0 / (step + 1), "norm": {"a": step}})
        writer.images(0, "samples", images)
        writer.text(0, "note", "hello")
    events = events_of(tmp_path)
    assert set(events.Tags()["scalars"]) == {"loss", "norm/a"}
    assert [e.value for e in events.Scalars("norm/a")] == [0, 1, 2]
    assert len(events.Tags()["images"]) == 1


def test_logs_are_complete_after_an_interrupt(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with (
            train.TensorBoardWriter(tmp_path) as writer,
            train.MetricBuffer(writer, every=100) as buffer,
        ):
            for step in range(7):
                buffer.append(step, {"loss": jnp.array(float(step))})
            raise KeyboardInterrupt
    losses = [e.value for e in events_of(tmp_path).Scalars("loss")]
    assert losses == [0, 1, 2, 3, 4, 5, 6]


def test_unwritable_log_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match="file/logs.*cannot be written.*choose another"
    ):
        train.TensorBoardWriter(tmp_path / "file" / "logs")


def test_images_are_checked(tmp_path):
    with train.TensorBoardWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="uint8.*got float32"):
            writer.images(0, "x", np.zeros((1, 2, 2, 1), np.float32))


def test_progress_in_a_file_is_one_line_now_and_then():
    out = io.StringIO()
    with train.ProgressLine(100, "run", file=out) as progress:
        for step in range(1, 101):
            reading = train.MeterReading(
                steps=step,
                examples=step * 10,
                seconds=step * 0.1,
                examples_per_second=100.0,
                starvation=0.25,
            )
            progress.update(step, reading, {"loss": 0.5})
    lines = out.getvalue().splitlines()
    assert lines == [
        "run 1/100 steps, 100 examples/s, 9.9 s left, 25.0% starved, loss 0.500",
        "run 100/100 steps, 100 examples/s, 0.0 s left, 25.0% starved, loss 0.500",
    ]


def test_progress_names_the_extra_when_rich_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "rich", None)
    with pytest.raises(ImportError, match=r"jaxaccel\[examples\]"):
        train.ProgressLine(1, "run")


def test_compile_counter_counts_by_name_and_stops():
    @jax.jit
    def triple(x):
        return 3 * x

    with train.CompileCounter() as compiles:
        for n in (2, 2, 3):
            triple(jnp.zeros(n))
    triple(jnp.zeros(4))
    assert compiles.counts["triple"] == 2
