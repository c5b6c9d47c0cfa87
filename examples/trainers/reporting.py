"""What the image classifier's trainer prints, draws and stores."""

import dataclasses
import pathlib
import sys
from typing import Any

from jaxaccel import records, train


@dataclasses.dataclass(frozen=True)
class Run:
    """One row of the table."""

    name: str
    ships_uint8: bool
    transform: str
    learning_rate: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run measured."""

    run: Run
    bytes_per_epoch: int
    compilations: int
    reading: train.MeterReading
    losses: list[float]
    """Mean training loss of each epoch."""
    accuracies: list[float]
    """Accuracy on the held-out set after each epoch."""


def print_table(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = "run|MB shipped/epoch|examples/s|starved|step ms|compiled|lr".split("|")
    table = Table(*columns, "test accuracy % after each epoch")
    for result in results:
        reading = result.reading
        table.add_row(
            result.run.name,
            f"{result.bytes_per_epoch / 1e6:.2f}",
            f"{reading.examples_per_second:,.0f}",
            f"{reading.starvation:.1%}",
            f"{reading.step_seconds * 1e3:.2f}",
            f"{result.compilations}x",
            f"{result.run.learning_rate:g}",
            " ".join(f"{100 * accuracy:.1f}" for accuracy in result.accuracies),
        )
    # A file has no width of its own; rows must not be cut there.
    wide = None if sys.stdout.isatty() else 200
    Console(width=wide).print(table)
    if len(results) > 1:
        ratio = results[0].bytes_per_epoch / results[1].bytes_per_epoch
        print(f"bytes handed to device_put, a / b: {ratio:.2f}x")


def draw_curves(results: list[Result], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for result, style in zip(results, ("-", "--", "-."), strict=False):
        epochs = range(1, len(result.losses) + 1)
        label = f"{result.run.name} (lr {result.run.learning_rate:g})"
        left.plot(epochs, result.losses, style, marker="o", label=label)
        accuracies = [100 * x for x in result.accuracies]
        right.plot(epochs, accuracies, style, marker="o", label=label)
    left.set(xlabel="epoch", ylabel="mean training loss", yscale="log")
    right.set(xlabel="epoch", ylabel="test accuracy [%]")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    right.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write_records(
    results: list[Result], dataset: str, settings: dict[str, Any], folder: pathlib.Path
) -> None:
    """Stores what each change brought; one seed proves no gain in accuracy."""
    for name, before, after in zip(
        ("uint8", settings["transform"]), results, results[1:], strict=False
    ):
        points = 100 * (after.accuracies[-1] - before.accuracies[-1])
        bytes_ratio = before.bytes_per_epoch / after.bytes_per_epoch
        if abs(points) <= 0.5:
            verdict = "helps" if bytes_ratio > 1 else "no evidence"
        else:
            verdict = "no evidence" if points > 0 else "trade-off"
        figures = {}
        for row in (before, after):
            key = row.run.name
            figures |= {
                f"{key}: bytes shipped an epoch": row.bytes_per_epoch,
                f"{key}: compilations of the step": row.compilations,
                f"{key}: learning rate": row.run.learning_rate,
                f"{key}: starvation": round(row.reading.starvation, 4),
                f"{key}: test accuracy": f"{row.accuracies[-1]:.2%}",
            }
        accuracy = f"{after.accuracies[-1]:.1%} against {before.accuracies[-1]:.1%}"
        figures |= {"bytes ratio": f"{bytes_ratio:.2f}x", "accuracy": accuracy}
        what = f"{dataset}, {settings['epochs']} epochs"
        records.Record.create(
            f"image_classifier_{name}",
            f"Training on {dataset}: {after.run.name}, against {before.run.name}",
            verdict=verdict,
            parameters=settings,
            figures=figures,
            headline=[
                records.Headline(
                    f"Bytes shipped, {what}: {after.run.name}",
                    before.run.name,
                    "bytes ratio",
                ),
                records.Headline(
                    f"Test accuracy, {what}: {after.run.name}",
                    before.run.name,
                    "accuracy",
                ),
            ][slice(1) if bytes_ratio > 1 else slice(1, None)],
        ).write(folder)
