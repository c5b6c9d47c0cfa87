"""The study's report: statistics over seeds, Markdown, figures and records."""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats
from study_data import CLASSES, LOADERS
from study_runs import Outcome, RunList
from study_training import (
    BASELINE,
    MOMENTUM,
    NETWORKS,
    OPTIMIZERS,
    TRANSFORMS,
    WEIGHT_DECAY,
)

from jaxaccel.records import Record

Setting = tuple[str, str, str]

# Okabe and Ito's colours, told apart with any colour vision; black is the baseline.
COLORS = (
    "#000000", "#E69F00", "#0072B2", "#009E73",
    "#D55E00", "#CC79A7", "#56B4E9", "#8A8A00",
)  # fmt: skip
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


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
    for spec in filter(_of_sizes(options), runs):
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


def _of_sizes(options: argparse.Namespace) -> Callable[[Any], bool]:
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
        for spec in filter(_of_sizes(options), runs)
        if (spec.phase, spec.setting, spec.transform) == ("final", setting, name)
        and (spec.learning_rate, spec.call) == (rate, TRANSFORMS[name].call)
        and spec.seed <= options.seeds
    }
    return dict(sorted(found.items()))


def _target(outcomes: Sequence[Outcome]) -> float:
    """The baseline's mean final accuracy less a point, as a whole percentage."""
    final = np.mean([outcome.validation_accuracies[-1] for outcome in outcomes])
    return math.floor(round(100 * float(final), 6) - 1) / 100


# --------------------------------------------------------------------------- output


def write(
    options: argparse.Namespace,
    runs: RunList,
    rates: Mapping[tuple[Setting, str], float],
) -> None:
    """Writes Markdown, figures and records of what has been run."""
    analysis = analyse(options, runs, rates)
    if not analysis.cells:
        print("no setting has a finished baseline yet: there is nothing to report")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    figures = {
        setting: draw(analysis, setting, options.out) for setting in analysis.cells
    }
    records = make_records(analysis)
    for record in records.values():
        record.write(options.out)
    text = markdown(
        analysis, records, figures, len(list(filter(_of_sizes(options), runs)))
    )
    (options.out / "transforms_study.md").write_text(text, encoding="utf-8")
    print(text)


def markdown(
    analysis: Analysis,
    records: Mapping[str, Record],
    figures: Mapping[Setting, Path],
    runs: int,
) -> str:
    options = analysis.options
    any_record = next(iter(records.values()), None)
    where = ""
    if any_record is not None:
        cpu, cores = any_record.hardware["cpu"], any_record.hardware["cores"]
        where = f" on {cpu}, {cores} cores, jax {any_record.versions['jax']}"
    lines = [
        "# Gradient transformations on small ResNets",
        "",
        f"Made by `benchmarks/transforms_study.py`{where}, from {runs} runs in "
        f"[{options.runs.name}]({options.runs.name}).",
        "",
        *_what_was_run(analysis),
        "",
        *_verdicts(analysis, records),
        *_how(options),
    ]
    for setting in analysis.cells:
        lines += ["", *_section(analysis, setting, figures[setting])]
    return "\n".join(lines) + "\n"


def _what_was_run(analysis: Analysis) -> list[str]:
    """Compares with the whole study, whatever was asked for this time."""
    wanted = analysis.options.seeds
    missing, partial = [], []
    for setting in itertools.product(LOADERS, NETWORKS, OPTIMIZERS):
        row = analysis.cells.get(setting, {})
        counts = {n: len(row[n].outcomes) if n in row else 0 for n in TRANSFORMS}
        if not row:
            missing.append(title(setting))
        elif min(counts.values()) < wanted:
            have = ", ".join(f"{name} {count}" for name, count in counts.items())
            partial.append(f"{title(setting)} (seeds finished: {have})")
    lines = [
        "## What was run",
        "",
        f"The whole study is {wanted} seeds of {len(TRANSFORMS)} transformations in "
        f"{len(LOADERS) * len(NETWORKS) * len(OPTIMIZERS)} settings.",
        "",
    ]
    if not missing and not partial:
        return [*lines, "All of it was run."]
    if partial:
        lines.append(f"- Run in part: {'; '.join(partial)}.")
    if missing:
        lines.append(f"- **Not run**: {'; '.join(missing)}.")
    return lines


def _verdicts(analysis: Analysis, records: Mapping[str, Record]) -> list[str]:
    if not records:
        return []
    lines = [
        "## Verdicts",
        "",
        "| transformation | verdict | effect, by setting |",
        "|---|---|---|",
    ]
    for name, record in records.items():
        effects = "; ".join(
            f"{title(setting)}: {row[name].effect}"
            for setting, row in analysis.comparisons.items()
            if name in row
        )
        lines.append(f"| `{TRANSFORMS[name].call}` | {record.verdict} | {effects} |")
    return [*lines, ""]


def _how(options: argparse.Namespace) -> list[str]:
    widths = "/".join(map(str, options.widths))
    return [
        "## How",
        "",
        f"ResNet of widths {widths}, {options.blocks} blocks each, batch norm; the "
        "plain network is the same without skip connections. "
        f"{options.train_images:,} training images, {options.epochs} epochs of batches "
        f"of {options.batch_size}, random crop and flip. SGD with momentum "
        f"{MOMENTUM:g} and no weight decay; AdamW with decoupled decay "
        f"{WEIGHT_DECAY:g}. Cosine decay to 0. Learning rates were tuned for each "
        f"transformation on {options.validation_images:,} validation images with one "
        "seed, along one grid until both neighbours of the best were worse; that seed "
        f"is not among the compared ones. Test accuracy: {options.test_images:,} "
        "images, looked at once at the end.",
        "",
        "Intervals are 95 % t-intervals over seeds. Differences are paired: the same "
        "seed means the same initial weights, batches and augmentation. The target is "
        "the baseline's mean final validation accuracy less one point, rounded down to "
        "a whole percentage; epochs to it are interpolated within an epoch. Time is "
        "CPU time of the steps until then, all threads, without compilation and "
        "evaluation: other load on the machine disturbs it less than wall time. "
        "An effect is called better or worse only where an interval that holds for "
        "all comparisons together (Bonferroni) excludes 0, for the accuracy or for the "
        "epochs.",
    ]


def _section(analysis: Analysis, setting: Setting, figure: Path) -> list[str]:
    row = analysis.cells[setting]
    target = row[BASELINE].target
    lines = [
        f"## {title(setting)}",
        "",
        f"![Learning curves and differences]({figure.name})",
        "",
        f"Target: {target:.0%} validation accuracy.",
        "",
        "| transformation | learning rate | seeds | test accuracy [%] | difference to "
        "none | reached the target | epochs to it | difference to none | CPU seconds "
        "to it | effect |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in row.items():
        comparison = analysis.comparisons[setting].get(name)
        epochs, seconds = cell.epochs(), cell.cpu_seconds()
        cells = [
            name,
            f"{cell.rate:g}",
            str(len(cell.outcomes)),
            interval(mean(list(cell.accuracies().values()))),
            interval(comparison.accuracy, "+") if comparison else "",
            f"{len(epochs)} of {len(cell.outcomes)}",
            interval(mean(list(epochs.values()))) if epochs else "never",
            interval(comparison.epochs, "+")
            if comparison and comparison.epochs
            else "",
            interval(mean(list(seconds.values()))) if seconds else "never",
            comparison.effect if comparison else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Tuning, validation accuracy [%] by learning rate: "
        + "; ".join(
            f"{name} "
            + ", ".join(f"{rate:g}: {100 * found[rate]:.1f}" for rate in sorted(found))
            for name, found in analysis.tuning[setting].items()
        )
        + ".",
    ]
    return lines


def title(setting: Setting) -> str:
    dataset, network, optimizer = setting
    names = {
        "fashion_mnist": "Fashion-MNIST",
        "photo_patches": "PhotoPatch-10",
        "sgd": "SGD",
        "adamw": "AdamW",
    }
    return f"{names.get(dataset, dataset)}, {network}, {names[optimizer]}"


def interval(value: Mean, plus: str = "") -> str:
    text = f"{value.value:{plus}.2f}"
    if math.isinf(value.half_width):
        return f"{text} (one seed)"
    return f"{text} ({value.low:{plus}.2f} to {value.high:{plus}.2f})"


# -------------------------------------------------------------------------- records


def make_records(analysis: Analysis) -> dict[str, Record]:
    """A record of each transformation that was compared on at least two seeds."""
    records = {}
    for name in analysis.options.transforms:
        found = {
            setting: row[name]
            for setting, row in analysis.comparisons.items()
            if name in row and row[name].accuracy.count >= 2
        }
        if found:
            records[name] = _record(analysis, name, found)
    return records


def _record(
    analysis: Analysis, name: str, comparisons: Mapping[Setting, Comparison]
) -> Record:
    call = TRANSFORMS[name].call
    rounds, ratios, rates, figures = {}, [], {}, {}
    common = set.intersection(
        *(
            set(analysis.cells[setting][which].accuracies())
            for setting in comparisons
            for which in (name, BASELINE)
        )
    )
    for setting, comparison in comparisons.items():
        row, what = analysis.cells[setting], title(setting)
        rates[what] = {which: row[which].rate for which in (name, BASELINE)}
        figures[f"{what}: accuracy, points"] = interval(comparison.accuracy, "+")
        if comparison.epochs is not None:
            figures[f"{what}: epochs to target"] = interval(comparison.epochs, "+")
        figures[f"{what}: reached target"] = (
            f"{len(row[name].epochs())} of {len(row[name].outcomes)}, without it "
            f"{len(row[BASELINE].epochs())} of {len(row[BASELINE].outcomes)}"
        )
        figures[f"{what}: effect"] = comparison.effect
        for which in (name, BASELINE):
            accuracies = row[which].accuracies()
            rounds[f"{what}: {which}"] = [accuracies[s] for s in sorted(common)]
        if len(common) > 1:
            ratios.append(f"{what}: {name} / {what}: {BASELINE}")
    return Record.create(
        f"transforms_study_{name}",
        f"{call} before the optimizer makes a small ResNet better, or sooner as good, "
        "than no transformation, each at its own tuned learning rate",
        verdict=verdict([c.effect for c in comparisons.values()]),
        parameters={
            **sizes(analysis.options),
            "transformation": call,
            "learning rates": rates,
            "seeds of the rounds": sorted(common),
        },
        unit="% test accuracy",
        rounds=rounds if common else {},
        ratios=ratios,
        figures=figures,
    )


# -------------------------------------------------------------------------- figures


def draw(analysis: Analysis, setting: Setting, folder: Path) -> Path:
    """Learning curves with 95 % bands, and the differences to no transformation."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "the report's figures need matplotlib: pip install 'jaxaccel[study]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4.4), layout="constrained", width_ratios=(3, 2)
    )
    row = analysis.cells[setting]
    looks = {
        name: (COLORS[i % len(COLORS)], STYLES[i % len(STYLES)], MARKERS[i % 8])
        for i, name in enumerate(TRANSFORMS)
    }
    for name, cell in row.items():
        _draw_curve(left, cell, *looks[name])
    target = 100 * row[BASELINE].target
    left.axhline(target, color="0.5", linewidth=0.8, label=f"target, {target:.0f} %")
    left.set(xlabel="epoch", ylabel="validation accuracy [%], mean and 95 % band")
    left.set_ylim(*_limits(row))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(fontsize=8)
    compared = analysis.comparisons[setting]
    for position, (name, comparison) in enumerate(compared.items()):
        color, _, marker = looks[name]
        error = comparison.accuracy.half_width
        right.errorbar(
            comparison.accuracy.value,
            -position,
            xerr=error if math.isfinite(error) else None,
            color=color,
            marker=marker,
            capsize=4,
        )
    labels = [f"{name}\n{comparison.effect}" for name, comparison in compared.items()]
    right.set_yticks([-i for i in range(len(labels))], labels, fontsize=8)
    right.axvline(0, color="0.5", linewidth=0.8)
    right.set_ylim(-len(labels) + 0.4, 0.6)
    right.set(xlabel="test accuracy less that of none [points], 95 % interval")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(title(setting))
    path = folder / f"transforms_study_{'_'.join(setting)}.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_curve(axes: Any, cell: Cell, color: str, style: str, marker: str) -> None:
    length = min(len(o.validation_accuracies) for o in cell.outcomes.values())
    curves = np.array(
        [o.validation_accuracies[:length] for o in cell.outcomes.values()]
    )
    points = [mean((100 * column).tolist()) for column in curves.T]
    epochs = range(1, length + 1)
    values = [point.value for point in points]
    label = f"{cell.transform}, lr {cell.rate:g}, {len(curves)} seeds"
    axes.plot(epochs, values, style, color=color, marker=marker, ms=4, label=label)
    if len(curves) > 1:
        low, high = ([getattr(p, end) for p in points] for end in ("low", "high"))
        axes.fill_between(epochs, low, high, color=color, alpha=0.12, linewidth=0)


def _limits(row: Mapping[str, Cell]) -> tuple[float, float]:
    """Ends of the axis: neither early epochs nor wide bands may flatten the rest."""
    runs = [outcome for cell in row.values() for outcome in cell.outcomes.values()]
    lowest = min(100 * outcome.validation_accuracies[-1] for outcome in runs)
    highest = max(100 * max(outcome.validation_accuracies) for outcome in runs)
    return max(0.0, lowest - 25), min(100.0, highest + 3)
