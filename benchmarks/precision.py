"""Claim: bfloat16 and float16 steps end within half a point of float32's accuracy.

    python benchmarks/precision.py --epochs 3 --record

The main job's run b (examples/trainers/image_classifier.py: uint8 input, SGD with
momentum, augmentation, all in the step) with one thing changed: `precision=` of the
step. Parameters, batches, augmentation and learning rate are the same; float16 scales
its loss dynamically. On CPU both 16-bit formats are emulated, so time says nothing.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from jaxaccel.records import Headline, Record

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PRECISIONS = ("float32", "bfloat16", "float16")
BOUND = 0.5


def main(arguments: list[str] | None = None) -> Record:
    options = parse(arguments)
    accuracies = {
        f"{name}, seed {seed}": 100 * accuracy(options, name, seed)
        for seed in range(options.seeds)
        for name in PRECISIONS
    }
    record = describe(options, accuracies)
    print(record.to_json() if options.json else record.table())
    if options.record:
        record.write(RESULTS)
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="accuracy by precision of the step")
    parser.add_argument("--dataset", default="fashion_mnist")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--record", action="store_true", help="write to results/")
    options = parser.parse_args(arguments)
    if options.epochs < 1 or options.seeds < 1:
        parser.error("--epochs and --seeds must be at least 1")
    return options


def accuracy(options: argparse.Namespace, precision: str, seed: int) -> float:
    """Trains run b as a user would, and returns its test accuracy."""
    trainer = load_trainer()
    with tempfile.TemporaryDirectory() as logdir:
        arguments = f"--transform none --dataset {options.dataset} --precision "
        arguments += f"{precision} --epochs {options.epochs} --seed {seed}"
        args = trainer.parse_arguments([*arguments.split(), "--logdir", logdir])
        dataset = trainer.load(args.dataset)
        run = next(run for run in trainer.make_runs(args) if run.name[0] == "b")
        with trainer.train.SafeInterrupt() as interrupt:
            # Its progress line is not what this prints.
            with contextlib.redirect_stderr(io.StringIO()):
                result = trainer.train_once(
                    run, args, dataset, dataset.train, dataset.test, interrupt
                )
    print(f"{precision}, seed {seed}: {result.accuracies[-1]:.2%}", file=sys.stderr)
    return result.accuracies[-1]


def load_trainer() -> Any:
    folder = str(ROOT / "examples" / "trainers")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import image_classifier  # type: ignore[import-not-found]

    return image_classifier


def describe(options: argparse.Namespace, accuracies: dict[str, float]) -> Record:
    figures: dict[str, str | int | float] = {
        f"{name}: test accuracy, %": round(x, 2) for name, x in accuracies.items()
    }
    worst = 0.0
    for name in PRECISIONS[1:]:
        gaps = [
            accuracies[f"{name}, seed {seed}"] - accuracies[f"float32, seed {seed}"]
            for seed in range(options.seeds)
        ]
        mean = sum(gaps) / len(gaps)
        figures[f"{name} - float32, points, mean"] = f"{mean:+.2f}"
        worst = max(worst, abs(mean))
    return Record.create(
        "precision",
        f"Training in 16 bits ends within {BOUND} points of float32 (mean over seeds)",
        verdict="no evidence",
        parameters={k: getattr(options, k) for k in ("dataset", "epochs", "seeds")}
        | {"within the bound": worst <= BOUND},
        figures=figures,
        headline=[
            Headline(
                f"Points of test accuracy, {options.dataset}, {options.epochs} epochs: "
                f"`precision='{name}'`",
                "float32",
                f"{name} - float32, points, mean",
            )
            for name in PRECISIONS[1:]
        ],
    )


if __name__ == "__main__":
    main()
