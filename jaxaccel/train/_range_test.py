"""The learning-rate range test: one short run over rising rates."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import optax

from jaxaccel.train._state import TrainState
from jaxaccel.train._step import make_train_step
from jaxaccel.train._task import LossFn

# Losses are read together, so that the host seldom waits.
_READ_EVERY = 10


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """What `learning_rate_range_test` found.

    Attributes:
      learning_rates: Those of the steps that were done, float64.
      losses: The loss of each step, computed before its update, float64.
      smoothed: Their exponential average, bias-corrected.
      suggestion: The learning rate at which the smoothed loss falls fastest; None if
        it never falls.
      diverged: Whether the loss grew beyond bounds before the last rate.
    """

    learning_rates: np.ndarray
    losses: np.ndarray
    smoothed: np.ndarray
    suggestion: float | None
    diverged: bool


def learning_rate_range_test(
    loss_fn: LossFn,
    make_tx: Callable[[optax.Schedule], optax.GradientTransformation],
    params: Any,
    batches: Iterable[Any],
    *,
    key: jax.Array,
    model_state: Any = None,
    low: float = 1e-6,
    high: float = 10.0,
    steps: int = 100,
    smoothing: float = 0.9,
    diverged_at: float = 4.0,
    **options: Any,
) -> RangeTest:
    r"""Trains over exponentially rising learning rates and watches the loss.

    .. math:: \eta_t = \eta_{low} (\eta_{high} / \eta_{low})^{t / (T - 1)}

    The suggestion is where the smoothed loss falls fastest per factor of the rate: a
    value to start a search with, not one to trust. The largest stable rate lies
    above; where the curve turns up depends on the number of steps, and momentum and
    smoothing shift it to the right. The parameters are copied, and the run is thrown
    away.

    Args:
      loss_fn: As for `make_train_step`.
      make_tx: Makes the transformation from a schedule of learning rates:
        `lambda rate: optax.sgd(rate, momentum=0.9)`.
      params: Initial parameters; left as they are.
      batches: At least `steps` batches, or the test ends with them.
      key: PRNG key of the run.
      model_state: As for `TrainState.create`.
      low: First learning rate.
      high: Last learning rate.
      steps: Number of steps from one to the other.
      smoothing: Weight of the past in the smoothed loss, 0 to below 1.
      diverged_at: The test ends when the smoothed loss exceeds its smallest value
        by so many times the first loss, or is not finite.
      **options: More options of `make_train_step` (`preprocess`, `precision`, ...);
        those that `TrainState.create` needs as well are given to both.

    Returns:
      The rates, losses and a suggestion.

    Raises:
      ValueError: If a number is out of range, or there are fewer than 3 batches.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxaccel import train
      >>> def loss_fn(params, model_state, batch, key):
      ...     return jnp.sum(batch["scale"] * params["w"] ** 2), (model_state, {})
      >>> found = train.learning_rate_range_test(
      ...     loss_fn, optax.sgd, {"w": jnp.ones(1)}, [{"scale": jnp.ones(1)}] * 60,
      ...     key=jax.random.key(0), low=1e-4, high=10.0, steps=60, smoothing=0.0)
      >>> print(round(found.suggestion, 2), found.diverged)
      0.05 True
    """
    _check(low, high, steps, smoothing, diverged_at)
    if options.get("steps_per_call", 1) != 1:
        raise ValueError(
            "a range test changes the rate at every step; leave out steps_per_call"
        )
    schedule = optax.exponential_decay(low, steps - 1, high / low)
    tx = make_tx(schedule)
    shared = ("precision", "finite_guard", "ema", "sharding")
    state = TrainState.create(
        params,
        tx,
        key=key,
        model_state=model_state,
        **{name: options[name] for name in shared if name in options},
    )
    step = make_train_step(loss_fn, tx, **options)

    losses, pending, iterator = [], [], iter(batches)
    while len(losses) + len(pending) < steps:
        batch = next(iterator, None)
        if batch is not None:
            state, metrics = step(state, batch)
            pending.append(metrics["loss"])
        last = batch is None or len(losses) + len(pending) == steps
        if last or len(pending) == _READ_EVERY:
            losses += [float(x) for x in jax.device_get(pending)]
            pending.clear()
            if last or _length(losses, smoothing, diverged_at) < len(losses):
                break
    return _summarize(losses, low, high, steps, smoothing, diverged_at)


def _summarize(
    losses: list[float],
    low: float,
    high: float,
    steps: int,
    smoothing: float,
    diverged_at: float,
) -> RangeTest:
    if len(losses) < 3:
        raise ValueError(
            f"a range test needs at least 3 batches, and got {len(losses)}; give the "
            "batches more epochs"
        )
    length = _length(losses, smoothing, diverged_at)
    rates = low * (high / low) ** (np.arange(length) / (steps - 1))
    smoothed = _smooth(losses, smoothing)[:length]
    suggestion = None
    if length >= 3:
        # Behind the minimum the loss may fall again, from where it had no business.
        slopes = np.gradient(smoothed, np.log(rates))[: np.argmin(smoothed) + 1]
        steepest = int(np.argmin(slopes))
        if slopes[steepest] < 0:
            suggestion = float(rates[steepest])
    return RangeTest(
        learning_rates=rates,
        losses=np.asarray(losses[:length]),
        smoothed=smoothed,
        suggestion=suggestion,
        diverged=length < len(losses),
    )


def _smooth(losses: list[float], smoothing: float) -> np.ndarray:
    average, smoothed = 0.0, []
    for n, loss in enumerate(losses, 1):
        average = smoothing * average + (1 - smoothing) * loss
        smoothed.append(average / (1 - smoothing**n))
    return np.asarray(smoothed)


def _length(losses: list[float], smoothing: float, diverged_at: float) -> int:
    """Number of steps before the loss diverges."""
    smoothed = _smooth(losses, smoothing)
    smallest = math.inf
    for n, value in enumerate(smoothed):
        smallest = min(smallest, value)
        if not value <= smallest + diverged_at * abs(smoothed[0]) < math.inf:
            return n
    return len(losses)


def _check(
    low: float, high: float, steps: int, smoothing: float, diverged_at: float
) -> None:
    if not 0 < low < high < math.inf:
        raise ValueError(f"low must be above 0 and below high; got {low} and {high}")
    if steps < 3:
        raise ValueError(f"a range test needs at least 3 steps; got {steps}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1); got {smoothing}")
    if not diverged_at > 0:
        raise ValueError(f"diverged_at must be above 0; got {diverged_at}")
