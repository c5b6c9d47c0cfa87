"""The study's report: Markdown and records of what has been run."""

import argparse
import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from study_data import LOADERS
from study_figures import draw
from study_runs import RunList
from study_statistics import (
    Analysis,
    Comparison,
    Mean,
    Setting,
    analyse,
    matches_sizes,
    mean,
    sizes,
    title,
    verdict,
)
from study_training import (
    BASELINE,
    MOMENTUM,
    NETWORKS,
    OPTIMIZERS,
    TRANSFORMS,
    WEIGHT_DECAY,
)

from jaxaccel.records import Record


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
        analysis, records, figures, len(list(filter(matches_sizes(options), runs)))
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
    return [
        *lines,
        "",
        "`python benchmarks/transforms_study.py` with the same sizes goes on from the "
        "run list.",
    ]


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
        "seed, along one grid of half decades until both neighbours of the best were "
        "worse; that seed "
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
