"""The loop: what it yields, where it ends, and what it saves."""

import io
import itertools
import signal
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxaccel import data, train

TX = optax.sgd(0.25, momentum=0.5)


def loss_fn(params, model_state, batch, key):
    return jnp.mean((params["w"] - batch["x"]) ** 2), (model_state, {})


# Compiled once for all tests.
STEP = train.make_train_step(loss_fn, TX)
STACKED = train.make_train_step(loss_fn, TX, steps_per_call=3)


def make_state(w=0.0):
    return train.TrainState.create({"w": jnp.float32(w)}, TX, key=jax.random.key(0))


def make_batches(epochs: int | None = 2, rows=12, **options):
    store = data.ArrayStore({"x": np.arange(rows, dtype=np.float32)})
    plan = data.BatchPlan(rows, 2, seed=0, epochs=epochs)
    return data.to_device(data.Loader(store, plan), **options)


def by_hand(xs, w=0.0):
    """The same steps in float64: losses and parameters."""
    trace, rows = 0.0, []
    for x in xs:
        loss = np.mean((w - np.asarray(x, np.float64)) ** 2)
        trace = 2 * np.mean(w - np.asarray(x, np.float64)) + 0.5 * trace
        w -= 0.25 * trace
        rows.append((loss, w))
    return rows


def exhaust(loop):
    """Returns the rows and the reason of a loop."""
    rows = []
    while True:
        try:
            i, state, metrics = next(loop)
        except StopIteration as stop:
            return rows, stop.value
        rows.append((i, float(state.params["w"]), metrics))


def ws(rows):
    return [w for _, w, _ in rows]


def test_it_yields_every_step_like_a_loop_by_hand():
    with make_batches() as batches:
        xs = [np.asarray(batch["x"]) for batch in batches]
    with make_batches() as batches:
        rows, why = exhaust(train.run(STEP, make_state(), batches))
    assert why == "batches"
    assert [i for i, *_ in rows] == list(range(1, 13))
    np.testing.assert_allclose(
        [(m["loss"], w) for _, w, m in rows], by_hand(xs), rtol=1e-5
    )


def test_states_live_until_the_loop_goes_on_and_the_last_one_stays():
    first, kept, state = make_state(), [], None
    with make_batches() as batches:
        for i, state, _ in train.run(STEP, first, batches, until=3):
            assert not state.params["w"].is_deleted()
            kept.append(state)
            if i == 2:
                copy = jax.tree.map(jnp.copy, state.params)
    assert first.params["w"].is_deleted()
    assert [s.params["w"].is_deleted() for s in kept] == [True, True, False]
    assert state is kept[-1] and not copy["w"].is_deleted()


def test_send_edits_the_state_and_the_loop_goes_on():
    batches = [{"x": jnp.full(2, 8.0)}] * 5
    loop, seen = train.run(STEP, make_state(), batches), []
    for i, state, _ in loop:
        if i == 2:
            assert loop.send(state.replace(params={"w": jnp.float32(3)})) is None
            # The last edit counts.
            assert loop.send(make_state(1.0).replace(step=state.step)) is None
        seen.append((i, float(state.params["w"])))
    before, after = by_hand([8.0] * 2), by_hand([8.0] * 3, w=1.0)
    want = list(enumerate([w for _, w in before + after], 1))
    np.testing.assert_allclose(seen, want, rtol=1e-6)


def test_an_edit_that_would_compile_again_is_refused():
    def send(edit):
        loop = train.run(STEP, make_state(), [{"x": jnp.ones(2)}] * 2)
        _, state, _ = next(loop)
        loop.send(edit(state))

    with pytest.raises(
        ValueError, match=r"params\['w'\]: before float32\[\], now fl.*1"
    ):
        send(lambda s: s.replace(params={"w": jnp.ones((1,))}))
    with pytest.raises(ValueError, match="only now: .params..v.."):
        send(lambda s: s.replace(params={**s.params, "v": jnp.ones(())}))
    with pytest.raises(ValueError, match="other containers"):
        send(lambda s: s.replace(model_state=[]))
    with pytest.raises(ValueError, match="keep state.step.* was 1 and is 0"):
        send(lambda s: s.replace(step=jnp.int32(0)))


def test_stacked_steps_count_and_are_never_cut():
    one = [{"x": jnp.full(2, float(x))} for x in range(7)]
    stacks = list(train.stack_batches([jax.device_get(b) for b in one], 3))
    single, _ = exhaust(train.run(STEP, make_state(), one))
    calls = []
    rows, why = exhaust(
        train.run(
            STACKED,
            make_state(),
            stacks,
            until=5,
            evaluate=lambda state: calls.append(int(state.step)) or {"x": 0.0},
            evaluate_every=2,
        )
    )
    assert why == "until" and [i for i, *_ in rows] == [3, 6] == calls
    np.testing.assert_allclose(ws(rows), ws(single)[2:6:3], rtol=1e-6)
    assert rows[0][2]["loss"].shape == (3,)


def test_probes_of_stacked_steps_are_written_one_by_one():
    """Scalars as metrics, arrays as histograms, each with the number of its step."""

    def probe(params, grads, updates, batch):
        return {"w": params["w"], "row": jnp.stack([grads["w"], updates["w"]])}

    step = train.make_train_step(loss_fn, TX, steps_per_call=3, probes={"mine": probe})
    seen = {}

    class Histograms:
        def scalars(self, step, values):
            seen.setdefault(step, {}).update(values)

        def histograms(self, step, values):
            seen[step].update(values)

    one = [{"x": np.full(2, x, np.float32)} for x in range(6)]
    with train.MetricBuffer(Histograms(), every=4) as buffer:
        loop = train.run(step, make_state(), train.stack_batches(one, 3), buffer=buffer)
        for _ in loop:
            pass
    single, _ = exhaust(train.run(STEP, make_state(), one))
    assert list(seen) == [1, 2, 3, 4, 5, 6]
    before = [0.0, *ws(single)[:-1]]
    got = [seen[i]["probes/mine/w"] for i in seen]
    np.testing.assert_allclose(got, before, rtol=1e-6)
    for i, (_, _, metrics) in zip(seen, single, strict=True):
        assert seen[i]["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-6)
        assert seen[i]["probes/mine/row"].shape == (2,)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (None, "evaluate must return a dict of floats; got NoneType"),
        ({"a": np.ones(2)}, "dict of floats; got {'a': array"),
    ],
)
def test_evaluations_are_dicts_of_floats(results, message):
    loop = train.run(
        STEP,
        make_state(),
        [{"x": jnp.ones(2)}],
        evaluate=lambda state: results,
        evaluate_every=1,
    )
    with pytest.raises(TypeError, match=message):
        next(loop)


def test_evaluations_come_with_the_metrics_and_end_the_loop():
    losses = iter([3.0, 2.0, 2.5, 2.0, 2.2, 1.0])
    rows, why = exhaust(
        train.run(
            STEP,
            make_state(),
            itertools.repeat({"x": jnp.ones(2)}),
            evaluate=lambda state: {"loss": next(losses), "w": state.params["w"]},
            evaluate_every=2,
            early_stop=train.EarlyStop("loss", patience=1),
        )
    )
    assert why == "early stop" and len(rows) == 8
    results = [m.get("evaluation") for *_, m in rows]
    assert (
        results[0] is None and results[1]["loss"] == 3.0 and results[7]["loss"] == 2.0
    )
    assert results[3]["w"] == rows[3][1]


@pytest.mark.parametrize(
    ("options", "values", "stops"),
    [
        ({}, [3, 2, 1, 0, 5, 5, 5], []),
        ({}, [1, 1, 1, 1, 1], [5]),
        ({"mode": "max", "patience": 1}, [1, 2, 1, 3, 2, 3], [6]),
        ({"min_delta": 0.5, "patience": 0}, [3, 2, 1.6], [3]),
        ({"patience": 1}, [np.nan, 1, np.nan, np.nan, 0.5], [4]),
        ({"patience": 1}, [np.nan, np.nan], [2]),
    ],
)
def test_early_stop(options, values, stops):
    stop = train.EarlyStop("a", **options)
    history = [{"a": float(x)} for x in values]
    found = [n for n in range(1, len(values) + 1) if stop(history[:n])]
    assert found[:1] == stops


def test_a_time_budget_ends_the_loop():
    loop = train.run(
        STEP, make_state(), itertools.repeat({"x": jnp.ones(2)}), time_budget=0.2
    )
    begun, count = time.monotonic(), 0
    for _ in loop:
        count += 1
    assert count > 1 and 0.2 <= time.monotonic() - begun < 30


def test_the_host_does_not_run_ahead_of_the_device():
    class Slow:
        waited = False

        def block_until_ready(self):
            self.waited = True
            return self

    made = []

    def step(state, batch):
        made.append(Slow())
        return state, {"x": made[-1]}

    loop = train.run(step, make_state(), range(6))
    for _ in loop:
        assert sum(not x.waited for x in made) <= 2
    assert len(made) == 6


def test_meter_buffer_and_progress_get_every_step():
    written: dict[int, Any] = {}

    class Writer:
        def scalars(self, step, values):
            written[step] = values

    out = io.StringIO()
    with (
        make_batches() as batches,
        train.MetricBuffer(Writer(), every=5) as buffer,
        train.ProgressLine(12, "run", file=out) as progress,
        train.Meter() as meter,
    ):
        rows, _ = exhaust(
            train.run(
                STEP,
                make_state(),
                batches,
                meter=meter,
                buffer=buffer,
                progress=progress,
                evaluate=lambda state: {"accuracy": 0.5},
                evaluate_every=6,
            )
        )
    assert list(written) == list(range(1, 13))
    assert [written[i]["loss"] for i in written] == [float(m["loss"]) for *_, m in rows]
    assert meter.reading().steps == 11 and meter.reading().examples == 22
    assert ", evaluation/accuracy 0.500" in out.getvalue().splitlines()[-1]


def test_a_description_alone_makes_a_progress_line(capsys):
    exhaust(
        train.run(STEP, make_state(), [{"x": jnp.ones(2)}] * 51, progress="some run")
    )
    assert "some run 50/51 steps" in capsys.readouterr().err


def resumed(folder, until, **options):
    """Trains with checkpoints and returns rows, reason and checkpoints."""
    with train.Checkpoints(folder, keep_last=9) as saved, make_batches() as batches:
        state = saved.resume(make_state(), loader=batches)
        loop = train.run(
            STEP, state, batches, until=until, checkpoints=saved, **options
        )
        return *exhaust(loop), saved.steps


def test_a_resumed_run_is_that_of_one_process_bit_for_bit(tmp_path):
    with make_batches() as batches:
        whole, _ = exhaust(train.run(STEP, make_state(), batches))
    rows, why, steps = resumed(tmp_path, 5, checkpoint_every=2)
    assert why == "until" and steps == [2, 4, 5]
    more, why, steps = resumed(tmp_path, None, checkpoint_every=4)
    assert why == "batches" and steps == [2, 4, 5, 8, 12]
    assert [(i, w) for i, w, _ in rows + more] == [(i, w) for i, w, _ in whole]
    # Complete: nothing is left to do.
    assert resumed(tmp_path, 12) == ([], "until", steps)


def test_edits_are_saved_and_evaluations_remembered(tmp_path):
    stop = train.EarlyStop("w", patience=2)
    options = {
        "evaluate": lambda state: {"w": 1.0},
        "evaluate_every": 1,
        "early_stop": stop,
    }
    with train.Checkpoints(tmp_path, best="w") as saved, make_batches() as batches:
        loop = train.run(
            STEP, make_state(), batches, until=2, checkpoints=saved, **options
        )
        for i, state, _ in loop:
            if i == 2:
                loop.send(state.replace(params={"w": jnp.float32(100)}))
        assert saved.steps == [1, 2] and saved.best_step == 1
        assert saved.restore(state).params["w"] == 100
    rows, why, _ = resumed(tmp_path, 12, **options)
    # Three evaluations without improvement, two of them in this process.
    assert why == "early stop" and [i for i, *_ in rows] == [3, 4]
    assert resumed(tmp_path, 12, **options)[:2] == ([], "early stop")


def test_break_saves_nothing_more(tmp_path):
    with train.Checkpoints(tmp_path) as saved, make_batches() as batches:
        loop = train.run(
            STEP, make_state(), batches, checkpoints=saved, checkpoint_every=2
        )
        for i, _, _ in loop:
            if i == 4:
                break
        loop.close()
    assert saved.steps == [2]


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)],
)
def test_a_signal_ends_the_step_saves_and_is_raised(tmp_path, number, error, capsys):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    reached = []
    with train.Checkpoints(tmp_path) as saved, make_batches() as batches:
        with pytest.raises(error) as raised:
            for i, _, _ in train.run(
                STEP, make_state(), batches, checkpoints=saved, checkpoint_every=100
            ):
                if i == 3:
                    signal.raise_signal(number)
                reached.append(i)
        # Not only begun: complete.
        assert saved.steps == [3] == reached[-1:]
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert "again stops at once" in capsys.readouterr().err
    if error is SystemExit:
        assert raised.value.code == 143


def test_an_interrupt_of_the_caller_is_used():
    with pytest.raises(KeyboardInterrupt):
        with train.SafeInterrupt() as interrupt:
            for i, _, _ in train.run(
                STEP, make_state(), [{"x": jnp.ones(2)}] * 4, interrupt=interrupt
            ):
                assert i < 3 and not interrupt.pending
                if i == 2:
                    signal.raise_signal(signal.SIGINT)


def exhaust_unread(loop):
    """The step numbers and the reason of a loop whose state nobody reads."""
    rows = []
    while True:
        try:
            rows.append(next(loop)[0])
        except StopIteration as stop:
            return rows, stop.value


def test_a_thousand_steps_compile_once_and_transfers_nothing_on_its_own(tmp_path):
    state = make_state()
    step = train.make_train_step(loss_fn, TX)
    with (
        make_batches(epochs=None) as batches,
        train.Checkpoints(tmp_path) as saved,
        train.MetricBuffer(every=50) as buffer,
        train.Meter() as meter,
        train.CompileCounter() as compiles,
        jax.transfer_guard("disallow"),
    ):
        loop = train.run(
            step,
            state,
            batches,
            until=1000,
            checkpoints=saved,
            checkpoint_every=300,
            evaluate=lambda state: {"w": jax.device_get(state.params["w"])},
            evaluate_every=100,
            buffer=buffer,
            meter=meter,
        )
        rows, reason = exhaust_unread(loop)
    assert reason == "until"
    assert rows == list(range(1, 1001))
    assert compiles.counts["train_step"] == 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_first_loss_that_is_not_finite_stops(value):
    batches = [{"x": jnp.full(2, value)}] * 3
    with pytest.raises(
        ValueError, match=f"loss is {value} in the first .*jax_debug_nan"
    ):
        exhaust(train.run(STEP, make_state(), batches))
    rows, _ = exhaust(train.run(STEP, make_state(), batches, check_first_loss=False))
    assert len(rows) == 3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"until": 0}, ValueError, "until must be above 0; got 0"),
        ({"time_budget": -1.0}, ValueError, "time_budget must be above 0; got -1.0"),
        ({"checkpoint_every": 2}, ValueError, "does nothing without checkpoints"),
        ({"evaluate": len}, ValueError, "does nothing without evaluate_every"),
        ({"evaluate_every": 2}, ValueError, "does nothing without evaluate;"),
        ({"early_stop": len}, ValueError, "early_stop does nothing without evaluate"),
        ({"evaluate": 3, "evaluate_every": 1}, TypeError, "evaluate must be a func.*3"),
        ({"step": None}, TypeError, "step must be a function; got None"),
        ({"state": {}}, TypeError, "needs an attribute `step`.*got dict"),
        ({"progress": "x"}, ValueError, "give `until`"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_mistakes_are_found_before_the_first_step(options, error, message):
    arguments: dict = {"step": STEP, "state": make_state(), "batches": iter([])}
    with pytest.raises(error, match=message):
        train.run(**{**arguments, **options})


def test_mistakes_with_checkpoints(tmp_path):
    with train.Checkpoints(tmp_path) as saved, make_batches() as batches:
        with pytest.raises(TypeError, match="type list cannot continue"):
            train.run(STEP, make_state(), [], checkpoints=saved)
        next(batches)
        with pytest.raises(ValueError, match="handed out 1 batches, .* done 0 steps"):
            train.run(STEP, make_state(), batches, checkpoints=saved)
    resumed(tmp_path, 2)
    with train.Checkpoints(tmp_path) as saved, make_batches() as batches:
        with pytest.raises(ValueError, match="earlier run; continue it by .*resume"):
            train.run(STEP, make_state(), batches, checkpoints=saved)
        saved.resume(make_state(), loader=batches)
        with pytest.raises(ValueError, match="stand at step 2, but the state at 0"):
            train.run(STEP, make_state(), batches, checkpoints=saved)
    with pytest.raises(ValueError, match="must be at least 0; got -1 and 0.0"):
        train.EarlyStop("loss", patience=-1)
    with pytest.raises(ValueError, match=r"no metric 'a'; it has \['b'\]"):
        train.EarlyStop("a")([{"b": 1.0}])
