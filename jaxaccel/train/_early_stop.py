"""When to give up on a run that no longer improves."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """Says whether a metric has stopped improving; a pure function of its history.

    An evaluation is an improvement if it beats the best one before it by more than
    `min_delta`. NaN never is one.

    Args:
      metric: Name of the metric in the evaluations.
      patience: Number of evaluations in a row without improvement that are endured;
        the next one without stops.
      mode: Whether smaller (`"min"`) or larger (`"max"`) is better.
      min_delta: Smallest change that counts.

    Raises:
      ValueError: If a number is negative or the mode unknown.

    Examples:
      >>> from jaxaccel import train
      >>> stop = train.EarlyStop("loss", patience=1)
      >>> losses = [0.9, 0.5, 0.6, 0.4, 0.4, 0.5]
      >>> [stop([{"loss": x} for x in losses[:n]]) for n in range(1, 7)]
      [False, False, False, False, False, True]
    """

    metric: str
    patience: int = 3
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0

    def __post_init__(self):
        if self.patience < 0 or not self.min_delta >= 0:
            raise ValueError(
                "patience and min_delta must be at least 0; got "
                f"{self.patience} and {self.min_delta}"
            )
        if self.mode not in ("min", "max"):
            raise ValueError(f"mode must be 'min' or 'max'; got {self.mode!r}")

    def __call__(self, evaluations: Sequence[Mapping[str, float]]) -> bool:
        """Returns whether to stop after these evaluations, the last one included."""
        sign = 1.0 if self.mode == "min" else -1.0
        best, since = math.inf, 0
        for evaluation in evaluations:
            if self.metric not in evaluation:
                raise ValueError(
                    f"the evaluation has no metric {self.metric!r}; it has "
                    f"{sorted(evaluation)}"
                )
            value = sign * evaluation[self.metric]
            if value < best - (self.min_delta if best < math.inf else 0.0):
                best, since = value, 0
            else:
                since += 1
        return since > self.patience
