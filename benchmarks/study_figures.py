"""The study's figures: learning curves and differences of a setting."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from study_statistics import Analysis, Cell, Setting, mean, title
from study_training import BASELINE, TRANSFORMS

# Okabe and Ito's colours, told apart with any colour vision; black is the baseline.
COLORS = (
    "#000000", "#E69F00", "#0072B2", "#009E73",
    "#D55E00", "#CC79A7", "#56B4E9", "#8A8A00",
)  # fmt: skip
STYLES = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


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
