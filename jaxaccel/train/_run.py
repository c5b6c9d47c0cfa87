"""The loop: a generator over steps, with what long runs need around them."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxaccel.train._checkpoint import Checkpoints
from jaxaccel.train._evaluate import check_batches
from jaxaccel.train._interrupt import SafeInterrupt
from jaxaccel.train._meter import Meter
from jaxaccel.train._progress import ProgressLine
from jaxaccel.train._run_checks import (
    check_edit,
    check_loss,
    check_start,
    read_evaluation,
    total_steps,
)
from jaxaccel.train._trees import PyTree
from jaxaccel.train._watch import Watch, stacked_steps
from jaxaccel.train._writers import MetricBuffer

Evaluation = dict[str, float]


def run(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: PyTree,
    batches: Iterable[Any],
    *,
    until: int | None = None,
    checkpoints: Checkpoints | None = None,
    checkpoint_every: int | None = None,
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    evaluate_every: int | None = None,
    early_stop: Callable[[Sequence[Evaluation]], bool] | None = None,
    time_budget: float | None = None,
    meter: Meter | None = None,
    buffer: MetricBuffer | None = None,
    progress: ProgressLine | str | None = None,
    interrupt: SafeInterrupt | None = None,
    check_first_loss: bool = True,
) -> Generator[tuple[int, Any, Any], Any, str]:
    """Trains, and yields `(i, state, metrics)` after every call of the step.

    It is a plain generator: the body of the `for` loop is the place for everything
    else, and `break` ends the training. `i` counts the steps that the state has
    done, those before a resumption included.

    **Lifetime.** The yielded state is valid until the loop goes on: then the next
    step may reuse its memory. What shall live longer must be copied
    (`jax.tree.map(jnp.copy, state.params)`), saved or read in the body. The state of
    the last iteration stays valid after the loop, whichever way it ended; the one
    that `run` was given does not. Metrics stay valid.

    **Edits.** `loop.send(state)` in the body of `for ... in loop` makes the next step
    take that state instead. It must have the structure, shapes and dtypes of the
    yielded one, which would compile the step again, and its `step`. `send` returns
    None; the loop goes on as if nothing had happened.

    **Order.** After a call: metrics are buffered; if due, the state is evaluated, and
    the results become `metrics["evaluation"]`; the body runs and may edit; if due, or
    if this is the end, the state is saved. So edits are saved, and a resumed run,
    whose loop body sees the later steps only, goes on with them.

    **Ends.** `until`, the end of the batches, `early_stop` and `time_budget` end the
    loop after a complete step, which `checkpoints` then hold. Ctrl-C and
    SIGTERM do the same, and then raise KeyboardInterrupt or SystemExit, so that
    what follows a complete training does not run. After `break`, or an error in the
    body, nothing is saved; a loop kept in a variable holds Ctrl-C back until
    `loop.close()`.

    **Resuming.** Go to the latest checkpoint before the loop, which then finds the
    evaluations of before on its own:

        state = checkpoints.resume(state, loader=batches)
        for i, state, metrics in train.run(step, state, batches, until=1000,
                                           checkpoints=checkpoints):

    Start the interrupted program again, and it ends with the bits that it would have
    had (where the step is deterministic, as it is on CPU). With a meter, add
    `meter=meter` to `resume`.

    Args:
      step: From `make_train_step`, or any `(state, batch) -> (state, metrics)`.
      state: The state to start from, with an attribute `step`.
      batches: Device batches, such as those of `jaxaccel.data.to_device`. With
        `checkpoints` they need `get_state` and `set_state`.
      until: Number of steps at which the run is complete, from step 0; None goes on
        to the end of the batches. A call of several steps is never cut.
      checkpoints: Where to save; None does not save.
      checkpoint_every: Number of steps between two checkpoints; None saves after
        every evaluation, and at the end.
      evaluate: `evaluate(state) -> dict of floats`, usually with
        `jaxaccel.train.evaluate`. It must not keep the state.
      evaluate_every: Number of steps between two evaluations.
      early_stop: Takes the list of all evaluations so far, those before a resumption
        included, and returns whether to stop: `EarlyStop`, or any function.
      time_budget: Seconds from the first iteration, after which the loop ends.
      meter: A `Meter` inside its context. Evaluations and saving pause it.
      buffer: A `MetricBuffer`, which gets the metrics of all steps. Evaluations are
        for the body to write.
      progress: A `ProgressLine` inside its context, or the description for one; None
        shows nothing.
      interrupt: A `SafeInterrupt` inside its context, where it spans several runs;
        None makes one for this loop.
      check_first_loss: Whether to stop if the loss of the first step is NaN or
        infinite. Later ones are left to the step's own options, since reading them
        would make the host wait.

    Returns:
      A generator of `(i, state, metrics)`: `metrics` are those of the step, still on
      the device. Its return value says why it ended: `"until"`, `"batches"`,
      `"early stop"` or `"time budget"`.

    Raises:
      TypeError: If the step or `evaluate` is not callable, the state has no `step`,
        or there are checkpoints and the batches have no state.
      ValueError: If a number is not positive, an option lacks the one it needs, or
        state, batches and checkpoints do not stand at one step; while iterating, if
        the first loss is not finite, or a sent state does not fit.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxaccel import train
      >>> def loss_fn(params, model_state, batch, key):
      ...     return jnp.mean((params["w"] - batch["x"]) ** 2), (model_state, {})
      >>> tx = optax.sgd(0.25)
      >>> step = train.make_train_step(loss_fn, tx)
      >>> state = train.TrainState.create(
      ...     {"w": jnp.array(0.0)}, tx, key=jax.random.key(0))
      >>> loop = train.run(step, state, [{"x": jnp.array([8.0])}] * 9, until=4)
      >>> for i, state, metrics in loop:
      ...     print(i, state.params["w"], metrics["loss"])
      ...     if i == 2:
      ...         loop.send(state.replace(params={"w": jnp.array(0.0)}))
      1 4.0 64.0
      2 6.0 16.0
      3 4.0 64.0
      4 6.0 16.0
    """
    for name, function in (("step", step), ("evaluate", evaluate or step)):
        if not callable(function):
            raise TypeError(f"{name} must be a function; got {function!r}")
    options = _Options(
        until,
        checkpoints,
        checkpoint_every,
        evaluate,
        evaluate_every,
        early_stop,
        time_budget,
        check_first_loss,
    )
    total = total_steps(until, batches) if isinstance(progress, str) else until
    check_batches(batches)
    check_start(state, batches, checkpoints)

    def watch(stack: contextlib.ExitStack) -> Watch:
        return Watch(stack, meter, buffer, progress, total)

    return _loop(step, state, batches, options, watch, meter, interrupt)


@dataclasses.dataclass(frozen=True)
class _Options:
    until: int | None
    checkpoints: Checkpoints | None
    checkpoint_every: int | None
    evaluate: Callable[[Any], Mapping[str, float]] | None
    evaluate_every: int | None
    early_stop: Callable[[Sequence[Evaluation]], bool] | None
    time_budget: float | None
    check_first_loss: bool

    def __post_init__(self):
        for name in ("until", "checkpoint_every", "evaluate_every", "time_budget"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0; got {value}")
        for name, needed in (
            ("checkpoint_every", "checkpoints"),
            ("evaluate", "evaluate_every"),
            ("evaluate_every", "evaluate"),
            ("early_stop", "evaluate"),
        ):
            if getattr(self, name) is not None and getattr(self, needed) is None:
                raise ValueError(f"{name} does nothing without {needed}; give both")


class _Evaluations:
    """Those of a run so far, as a part of its checkpoints."""

    def __init__(self, checkpoints: Checkpoints | None):
        self.all: list[Evaluation] = []
        if checkpoints is not None and checkpoints.current_step is not None:
            saved = checkpoints.saved_parts(checkpoints.current_step)
            self.set_state(saved.get("evaluations", {"all": []}))

    def get_state(self) -> dict[str, Any]:
        return {"all": self.all}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.all = list(state["all"])


def _loop(
    step: Any,
    state: Any,
    batches: Any,
    options: _Options,
    make_watch: Callable[[contextlib.ExitStack], Watch],
    meter: Meter | None,
    interrupt: SafeInterrupt | None,
) -> Generator[Any, Any, str]:
    started, i = time.monotonic(), int(jax.device_get(state.step))
    evaluations = _Evaluations(options.checkpoints)

    def save(results: Evaluation) -> None:
        if options.checkpoints is not None:
            parts = {} if meter is None else {"meter": meter}
            options.checkpoints.save(
                state,
                metrics=results or None,
                loader=batches,
                evaluations=evaluations,
                **parts,
            )

    def reason() -> str | None:
        if options.until is not None and i >= options.until:
            return "until"
        stop = options.early_stop
        if stop is not None and evaluations.all and stop(evaluations.all):
            return "early stop"
        budget = options.time_budget
        if budget is not None and time.monotonic() - started >= budget:
            return "time budget"
        return None

    with contextlib.ExitStack() as stack:
        if interrupt is None:
            interrupt = stack.enter_context(SafeInterrupt())
        watch = make_watch(stack)
        source, first, end = watch.batches(batches), True, reason()
        results: Evaluation = {}
        while end is None:
            batch = next(source, None)
            if batch is None:
                end = "batches"
                break
            state, metrics = step(state, batch)
            before, i = i, i + (stacked_steps(metrics) or 1)
            if first and options.check_first_loss:
                check_loss(i, metrics)
            first = False
            watch.update(i, metrics, batch)
            results = {}
            if options.evaluate and _due(before, i, options.evaluate_every):
                with watch.paused():
                    results = read_evaluation(options.evaluate(state))
                evaluations.all.append(results)
                watch.show(i, {f"evaluation/{k}": x for k, x in results.items()})
                metrics = {**metrics, "evaluation": results}

            # `send` is answered at once; the loop's own `next` comes after it.
            edited = yield i, state, metrics
            while edited is not None:
                check_edit(state, edited)
                state = edited
                edited = yield None

            end = reason()
            if (
                results
                and options.checkpoint_every is None
                or _due(before, i, options.checkpoint_every)
            ):
                with watch.paused():
                    save(results)
            if interrupt.pending:
                break
        save(results)
        if options.checkpoints is not None:
            options.checkpoints.wait()
        interrupt.check()
    return str(end)


def _due(before: int, now: int, every: int | None) -> bool:
    """Whether a multiple of `every` lies in the steps of a call."""
    return every is not None and now // every > before // every
