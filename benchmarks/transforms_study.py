"""Does a gradient transformation make a small ResNet better, or sooner as good?

    python benchmarks/transforms_study.py --plan            what is to be run
    python benchmarks/transforms_study.py --budget-minutes 30
    python benchmarks/transforms_study.py --report          only the report

Two data sets (Fashion-MNIST; PhotoPatch-10, patches of real photographs), a ResNet
with and without its skip connections, SGD with momentum and AdamW. In each of these
settings every transformation gets the learning rate that suits it: from a start of
its own it walks along one common grid (1, 3, 10, ...) until both neighbours of the
best are worse, with one seed, on validation images. Then it is trained with that
rate from `--seeds` other seeds, with cosine decay, and compared with no
transformation from the same seeds: the same initial weights, batches, augmentation.

Each finished run is appended to the run list. Interrupted or out of budget, the study
goes on where it was when it is started again with the same sizes. A run keeps one core
busy: start the study once for each core, each with its own --datasets or --optimizers;
they share the run list. The report is
written into `--out`: transforms_study.md, a figure a setting, a record for each
transformation. It says what has not been run.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import study_data
import study_report
from study_runs import Outcome, RunList, Spec
from study_training import (
    BASELINE,
    NETWORKS,
    OPTIMIZERS,
    TRANSFORMS,
    train_once,
)

RESULTS = Path(__file__).parent / "results"
TUNING_SEED = 0
# Grid position i is the rate 10^(i / 2), to one digit: 0.1, 0.3, 1, ...
GRID = range(-12, 3)
# What is assumed where no run has finished yet.
TYPICAL_TUNING_RUNS, TYPICAL_SECONDS = 4, 15.0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    runs = RunList(options.runs)
    print(describe_plan(options, runs), flush=True)
    if not (options.plan or options.report):
        work(options, runs)
    if not options.plan:
        whole = everything(options)
        # Others may have added to the list meanwhile.
        runs = RunList(options.runs)
        study_report.write(whole, runs, tuned_rates(whole, runs))
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, choices in (
        ("datasets", study_data.LOADERS),
        ("networks", NETWORKS),
        ("optimizers", OPTIMIZERS),
        ("transforms", TRANSFORMS),
    ):
        parser.add_argument(
            f"--{name}", nargs="+", choices=choices, default=list(choices)
        )
    parser.add_argument("--seeds", type=_at_least(2), default=5)
    parser.add_argument("--epochs", type=_at_least(1), default=5)
    parser.add_argument("--train-images", type=_at_least(1), default=10_000)
    parser.add_argument("--validation-images", type=_at_least(1), default=2_000)
    parser.add_argument("--test-images", type=_at_least(1), default=10_000)
    parser.add_argument("--batch-size", type=_at_least(1), default=128)
    parser.add_argument("--widths", nargs="+", type=_at_least(1), default=[8, 16, 32])
    parser.add_argument("--blocks", type=_at_least(1), default=2, help="a width")
    parser.add_argument("--budget-minutes", type=float, default=math.inf)
    parser.add_argument("--runs", type=Path, default=RESULTS / "transforms_study.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plan", action="store_true", help="only print the plan")
    parser.add_argument("--report", action="store_true", help="only write the report")
    options = parser.parse_args(arguments)
    if not options.budget_minutes > 0:
        parser.error(f"--budget-minutes must be above 0, got {options.budget_minutes}")
    if options.batch_size > options.train_images:
        parser.error(
            f"--batch-size {options.batch_size} is larger than --train-images "
            f"{options.train_images}"
        )
    missing = [name for name in options.transforms if not TRANSFORMS[name].exported]
    options.transforms = [n for n in options.transforms if n not in missing]
    options.missing = missing
    if BASELINE not in options.transforms:
        options.transforms.insert(0, BASELINE)
    return options


def _at_least(low: int):
    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {text}")
        return value

    parse.__name__ = "integer"
    return parse


# ----------------------------------------------------------------------------- plan


def settings(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Data set, network and optimizer, in the order in which they are run."""
    return [
        (dataset, network, optimizer)
        for optimizer in options.optimizers
        for dataset in options.datasets
        for network in options.networks
    ]


def remaining(options: argparse.Namespace, runs: RunList) -> Iterator[Spec]:
    """Yields what to run next; each is to be added to the list before the next.

    Setting by setting, and in it seed by seed: wherever it is stopped, the seeds of
    the transformations differ by one at most.
    """
    for setting in settings(options):
        rates = {}
        for name in options.transforms:
            while isinstance(found := tune(options, runs, setting, name), Spec):
                yield found
            rates[name] = found
        for seed in seeds(options):
            for name, rate in rates.items():
                spec = make_spec(options, setting, name, "final", rate, seed)
                if spec not in runs:
                    yield spec


def tune(
    options: argparse.Namespace,
    runs: RunList,
    setting: tuple[str, str, str],
    name: str,
) -> Spec | float:
    """The next run of the search for a learning rate, or the rate it has found.

    A walk from the start of the transformation: as long as a neighbour of the best
    rate has not been tried, it is next.
    """
    position = nearest(TRANSFORMS[name].starts[setting[2]])
    while True:
        around = [position, position - 1, position + 1]
        scores = {}
        for place in (place for place in around if place in GRID):
            rate = rate_at(place)
            spec = make_spec(options, setting, name, "tune", rate, TUNING_SEED)
            if spec not in runs:
                return spec
            scores[place] = score(runs[spec], place)
        # The first of equals: the place itself, so that the walk ends.
        best = max(scores, key=scores.__getitem__)
        if best == position:
            return rate_at(position)
        position = best


def score(outcome: Outcome, position: int) -> float:
    # Where all diverge, the walk must lead down to where they do not.
    return -100.0 - position if outcome.diverged else outcome.validation_accuracies[-1]


def rate_at(position: int) -> float:
    return float(f"{10 ** (position / 2):.0e}")


def nearest(rate: float) -> int:
    return round(2 * math.log10(rate))


def seeds(options: argparse.Namespace) -> range:
    return range(TUNING_SEED + 1, TUNING_SEED + 1 + options.seeds)


def make_spec(
    options: argparse.Namespace,
    setting: tuple[str, str, str],
    name: str,
    phase: str,
    rate: float,
    seed: int,
) -> Spec:
    dataset, network, optimizer = setting
    return Spec(
        phase=phase,
        dataset=dataset,
        network=network,
        optimizer=optimizer,
        transform=name,
        call=TRANSFORMS[name].call,
        learning_rate=rate,
        seed=seed,
        epochs=options.epochs,
        train_images=options.train_images,
        validation_images=options.validation_images,
        test_images=options.test_images,
        batch_size=options.batch_size,
        widths=tuple(options.widths),
        blocks=options.blocks,
    )


def everything(options: argparse.Namespace) -> argparse.Namespace:
    """The options of a report: all that the run list may hold."""
    return argparse.Namespace(
        **{
            **vars(options),
            "datasets": list(study_data.LOADERS),
            "networks": list(NETWORKS),
            "optimizers": list(OPTIMIZERS),
            "transforms": [n for n, t in TRANSFORMS.items() if t.exported],
        }
    )


def tuned_rates(
    options: argparse.Namespace, runs: RunList
) -> dict[tuple[tuple[str, str, str], str], float]:
    """The learning rates whose search is complete, by setting and transformation."""
    found = {
        (setting, name): tune(options, runs, setting, name)
        for setting in settings(options)
        for name in options.transforms
    }
    return {key: rate for key, rate in found.items() if isinstance(rate, float)}


def describe_plan(options: argparse.Namespace, runs: RunList) -> str:
    tuning, final = count_remaining(options, runs)
    seconds = (tuning + final) * typical_seconds(options, runs)
    lines = [
        f"{len(settings(options))} settings x {len(options.transforms)} "
        f"transformations: {', '.join(options.transforms)}",
        f"{options.runs.name} holds {len(runs)} finished runs",
        f"to do: about {tuning} runs to tune and {final} to compare, about "
        f"{seconds / 3600:.1f} h at {typical_seconds(options, runs):.0f} s a run",
    ]
    if options.missing:
        lines.append(f"not in this version: {', '.join(options.missing)}")
    return "\n".join(lines)


def count_remaining(options: argparse.Namespace, runs: RunList) -> tuple[int, int]:
    rates = tuned_rates(options, runs)
    tuning = final = 0
    for setting in settings(options):
        for name in options.transforms:
            rate = rates.get((setting, name))
            if rate is None:
                done = sum(
                    s.phase == "tune" and s.setting == setting and s.transform == name
                    for s in runs
                )
                tuning += max(1, TYPICAL_TUNING_RUNS - done)
                final += options.seeds
            else:
                final += sum(
                    make_spec(options, setting, name, "final", rate, seed) not in runs
                    for seed in seeds(options)
                )
    return tuning, final


def typical_seconds(options: argparse.Namespace, runs: RunList) -> float:
    """Median wall time of the runs of these sizes so far."""
    sizes = options.epochs, options.train_images
    times = [runs[s].wall_seconds for s in runs if (s.epochs, s.train_images) == sizes]
    if times:
        return statistics.median(times)
    return TYPICAL_SECONDS * math.prod(sizes) / (5 * 10_000)


# ----------------------------------------------------------------------------- work


def work(options: argparse.Namespace, runs: RunList) -> None:
    """Does what remains, until all is done, the budget is spent, or Ctrl-C."""
    start = time.perf_counter()
    try:
        for number, spec in enumerate(remaining(options, runs), 1):
            spent = time.perf_counter() - start
            if spent + typical_seconds(options, runs) > 60 * options.budget_minutes:
                print(f"out of budget after {number - 1} runs, {spent / 60:.1f} min")
                return
            outcome = train_once(spec)
            runs.add(spec, outcome)
            print(describe_run(number, spec, outcome), flush=True)
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept", file=sys.stderr)


def describe_run(number: int, spec: Spec, outcome: Outcome) -> str:
    if outcome.diverged:
        result = "diverged"
    else:
        result = f"validation {outcome.validation_accuracies[-1]:.2%}"
    if outcome.test_accuracy is not None:
        result += f", test {outcome.test_accuracy:.2%}"
    what = " ".join([spec.phase, *spec.setting, spec.transform])
    return (
        f"{number:>4} {what} lr {spec.learning_rate:g} seed {spec.seed}: {result} "
        f"({outcome.wall_seconds:.0f} s)"
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"transforms_study: {error}")
