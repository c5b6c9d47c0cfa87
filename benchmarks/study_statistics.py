"""The study's statistics: means over seeds, paired comparisons, verdicts."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats
from study_data import CLASSES
from study_runs import Outcome, RunList, Spec
from study_training import BASELINE, TRANSFORMS

Setting = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over seeds with its t-interval.

    Half the width is infinite for a single seed: then nothing is known.
    """

    value: float
    half_width: float
    count: int

    @property
    def low(self) -> float:
        """Lower end."""
        return self.value - self.half_width

    @property
    def high(self) -> float:
        """Upper end."""
        return self.value + self.half_width


def mean(values: Sequence[float], level: float = 0.95) -> Mean:
    count = len(values)
    if count < 2:
        return Mean(float(values[0]), math.inf, count)
    quantile = float(stats.t.ppf((1 + level) / 2, count - 1))
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    return Mean(float(np.mean(values)), quantile * error, count)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A transformation in a setting: its finished runs, by seed."""

    transform: str
    rate: float
    outcomes: Mapping[int, Outcome]
    target: float
    """Validation accuracy that the run is to reach."""

    def accuracies(self) -> dict[int, float]:
        """Test accuracy by seed, in percent."""
        found = {s: o.test_accuracy for s, o in self.outcomes.items()}
        return {s: 100 * value for s, value in found.items() if value is not None}

    def epochs(self) -> dict[int, float]:
        """Epochs until the target was reached, of the seeds that reached it."""
        return self._until_target(lambda outcome: [1.0] * len(outcome.seconds))

    def cpu_seconds(self) -> dict[int, float]:
        """CPU seconds until then."""
        return self._until_target(lambda outcome: outcome.cpu_seconds)

    def _until_target(
        self, costs: Callable[[Outcome], Sequence[float]]
    ) -> dict[int, float]:
        found = {
            seed: until(o.validation_accuracies, costs(o), self.target)
            for seed, o in self.outcomes.items()
        }
        return {seed: cost for seed, cost in found.items() if cost is not None}


def until(
    accuracies: Sequence[float], costs: Sequence[float], target: float
) -> float | None:
    """Cost until an accuracy was reached, linear within the epoch; None if never."""
    before, spent = 1 / CLASSES, 0.0
    for accuracy, cost in zip(accuracies, costs, strict=True):
        if accuracy >= target:
            share = (target - before) / (accuracy - before) if target > before else 0.0
            return spent + share * cost
        before, spent = accuracy, spent + cost
    return None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A transformation against none in a setting, on the seeds both have.

    Attributes:
      accuracy: Difference of the test accuracies in points.
      epochs: Difference of the epochs to the target; None unless every run of both
        reached it.
      effect: `"better"`, `"worse"`, `"mixed"` or `"none shown"`, judged by
        intervals that hold for all comparisons of the study together.
    """

    accuracy: Mean
    epochs: Mean | None
    effect: str


def compare(cell: Cell, baseline: Cell, comparisons: int) -> Comparison | None:
    """Compares on common seeds; None where there is none."""
    # Bonferroni: two questions for each comparison of the study.
    strict = 1 - 0.05 / (2 * max(comparisons, 1))
    differences = paired(cell.accuracies(), baseline.accuracies())
    if not differences:
        return None
    signs = [sign(mean(differences, strict))]
    reached = cell.epochs(), baseline.epochs()
    complete = all(
        len(some) == len(c.outcomes)
        for some, c in zip(reached, (cell, baseline), strict=True)
    )
    epochs = None
    if complete:
        sooner = paired(*reached)
        epochs = mean(sooner)
        signs.append(-sign(mean(sooner, strict)))
    better, worse = 1 in signs, -1 in signs
    effect = (
        "mixed"
        if better and worse
        else "better"
        if better
        else "worse"
        if worse
        else "none shown"
    )
    return Comparison(mean(differences), epochs, effect)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    return [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]


def sign(interval: Mean) -> int:
    return (interval.low > 0) - (interval.high < 0)


def verdict(effects: Sequence[str]) -> str:
    """What a method card may say: worse anywhere never counts as help."""
    better = any(effect in ("better", "mixed") for effect in effects)
    worse = any(effect in ("worse", "mixed") for effect in effects)
    if better:
        return "trade-off" if worse else "helps"
    return "no evidence"


# ------------------------------------------------------------------------- analysis


@dataclasses.dataclass(frozen=True)
class Analysis:
    """All that the report shows."""

    options: argparse.Namespace
    cells: dict[Setting, dict[str, Cell]]
    comparisons: dict[Setting, dict[str, Comparison]]
    tuning: dict[Setting, dict[str, dict[float, float]]]
    """Validation accuracy of the tuning runs, by learning rate."""


def analyse(
    options: argparse.Namespace,
    runs: RunList,
    rates: Mapping[tuple[Setting, str], float],
) -> Analysis:
    cells: dict[Setting, dict[str, Cell]] = {}
    tuning: dict[Setting, dict[str, dict[float, float]]] = {}
    wanted = {setting for setting, _ in rates}
    for spec in filter(matches_sizes(options), runs):
        if spec.phase == "tune" and spec.transform in options.transforms:
            found = tuning.setdefault(spec.setting, {}).setdefault(spec.transform, {})
            found[spec.learning_rate] = runs[spec].validation_accuracies[-1]
    for setting in sorted(wanted):
        outcomes = {
            name: _outcomes(options, runs, setting, name, rate)
            for name in options.transforms
            if (rate := rates.get((setting, name))) is not None
        }
        if outcomes.get(BASELINE):
            target = _target(list(outcomes[BASELINE].values()))
            cells[setting] = {
                name: Cell(name, rates[setting, name], found, target)
                for name, found in outcomes.items()
                if found
            }
    count = sum(len(row) - 1 for row in cells.values())
    comparisons = {
        setting: {
            name: comparison
            for name, cell in row.items()
            if name != BASELINE
            and (comparison := compare(cell, row[BASELINE], count)) is not None
        }
        for setting, row in cells.items()
    }
    return Analysis(options, cells, comparisons, tuning)


def matches_sizes(options: argparse.Namespace) -> Callable[[Spec], bool]:
    """Whether a run has the sizes of these options."""

    def matches(spec):
        return all(
            getattr(spec, name) == value for name, value in sizes(options).items()
        )

    return matches


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    names = (
        "epochs", "train_images", "validation_images", "test_images", "batch_size",
        "blocks",
    )  # fmt: skip
    chosen = {name: getattr(options, name) for name in names}
    return {**chosen, "widths": tuple(options.widths)}


def _outcomes(
    options: argparse.Namespace, runs: RunList, setting: Setting, name: str, rate: float
) -> dict[int, Outcome]:
    found = {
        spec.seed: runs[spec]
        for spec in filter(matches_sizes(options), runs)
        if (spec.phase, spec.setting, spec.transform) == ("final", setting, name)
        and (spec.learning_rate, spec.call) == (rate, TRANSFORMS[name].call)
        and spec.seed <= options.seeds
    }
    return dict(sorted(found.items()))


def _target(outcomes: Sequence[Outcome]) -> float:
    """The baseline's mean final accuracy less a point, as a whole percentage."""
    final = np.mean([outcome.validation_accuracies[-1] for outcome in outcomes])
    return math.floor(round(100 * float(final), 6) - 1) / 100


def title(setting: Setting) -> str:
    dataset, network, optimizer = setting
    names = {
        "fashion_mnist": "Fashion-MNIST",
        "photo_patches": "PhotoPatch-10",
        "sgd": "SGD",
        "adamw": "AdamW",
    }
    return f"{names.get(dataset, dataset)}, {network}, {names[optimizer]}"
