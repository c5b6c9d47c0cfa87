"""Interleaved rounds, and the ratio of contenders that took turns in them."""

import dataclasses
import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

_RESAMPLES = 2000


def interleave(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Times functions in turns, so that all meet the same load of the machine.

    Each round calls every contender once and waits for the jax arrays in its
    result. The order rotates by one from round to round.

    Args:
      contenders: Functions without arguments, by name.
      rounds: Timed calls of each.
      warmup: Untimed calls of each before, for compilation and caches.
      clock: `time.perf_counter` for wall time, `time.process_time` for the CPU
        time of all threads of the process, or any function that returns seconds.

    Returns:
      Seconds of each round, by name.

    Raises:
      TypeError: If a contender is not callable, or a number is not an integer.
      ValueError: If there is no contender, `rounds` is less than 1 or `warmup`
        negative.

    Examples:
      >>> from jaxaccel.records import interleave
      >>> ticks = iter(range(100))
      >>> calls = []
      >>> interleave(
      ...     {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
      ...     rounds=2, warmup=0, clock=lambda: float(next(ticks)))
      {'a': [1.0, 1.0], 'b': [1.0, 1.0]}
      >>> calls
      ['a', 'b', 'b', 'a']
    """
    rounds, warmup = operator.index(rounds), operator.index(warmup)
    if not contenders:
        raise ValueError("there is nothing to measure; pass {'name': function, ...}")
    if rounds < 1 or warmup < 0:
        raise ValueError(
            f"rounds must be at least 1 and warmup at least 0, got {rounds} and "
            f"{warmup}"
        )
    for name, run in contenders.items():
        if not callable(run):
            raise TypeError(
                f"contender {name!r} must be a function without arguments, got "
                f"{type(run).__name__}"
            )
    for _ in range(warmup):
        for run in contenders.values():
            jax.block_until_ready(run())
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            jax.block_until_ready(contenders[name]())
            times[name].append(clock() - start)
    return times


@dataclasses.dataclass(frozen=True)
class Ratio:
    """A ratio with its spread.

    Args:
      median: Median over the rounds.
      low: Lower end of the 95 % interval of the median.
      high: Upper end.

    Raises:
      ValueError: Unless `0 < low <= median <= high`, all finite.

    Examples:
      >>> from jaxaccel.records import Ratio
      >>> print(Ratio(4.0, 3.914, 4.151))
      4.00x (3.91 to 4.15)
    """

    median: float
    low: float
    high: float

    def __post_init__(self):
        if not 0 < self.low <= self.median <= self.high < math.inf:
            raise ValueError(
                "a ratio needs 0 < low <= median <= high, all finite, got "
                f"low={self.low}, median={self.median}, high={self.high}"
            )

    def __str__(self) -> str:
        low, high = three_digits(self.low), three_digits(self.high)
        return f"{three_digits(self.median)}x ({low} to {high})"


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Ratio:
    r"""Computes the median of the rounds' ratios, with a bootstrap interval.

    $\mathrm{median}_i\, a_i / b_i$: both times of a round met the same load,
    which cancels. The 95 % interval is the percentile bootstrap of the rounds
    (2000 resamples, fixed seed).

    Args:
      numerator: Times of one contender, one a round.
      denominator: Times of the other in the same rounds.

    Returns:
      The ratio; above 1 where the denominator is the faster one.

    Raises:
      ValueError: If the lengths differ, there are fewer than 2 rounds, or a time is
        not positive and finite.

    Examples:
      >>> from jaxaccel.records import paired_ratio
      >>> print(paired_ratio([2.0, 4.2, 8.0], [1.0, 2.0, 4.0]))
      2.00x (2.00 to 2.10)
    """
    a, b = np.asarray(numerator, np.float64), np.asarray(denominator, np.float64)
    if a.ndim != 1 or a.shape != b.shape or a.size < 2:
        raise ValueError(
            "a paired ratio needs the same rounds of both contenders, at least 2, got "
            f"shapes {a.shape} and {b.shape}"
        )
    if not (np.all(np.isfinite(a) & (a > 0)) and np.all(np.isfinite(b) & (b > 0))):
        raise ValueError(
            "every time must be positive and finite; let a round do more work where "
            f"the clock is too coarse, got {a.tolist()} and {b.tolist()}"
        )
    ratios = a / b
    rows = np.random.default_rng(0).integers(a.size, size=(_RESAMPLES, a.size))
    low, high = np.percentile(np.median(ratios[rows], axis=1), [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high))


def three_digits(value: float) -> str:
    """Writes a number with three significant digits: 4.00, 15.8, 1234."""
    if abs(value) >= 999.5:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")
