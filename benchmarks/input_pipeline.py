"""Claims: the input pipeline beats torch's DataLoader, and keeps a fast step fed.

    python benchmarks/input_pipeline.py --part peers [--large]
    python benchmarks/input_pipeline.py --part starvation
    python benchmarks/input_pipeline.py --part formats

peers       microseconds an image until the batch is on the device, 256x32x32x3
            (`--large`: 64x224x224x3), against torch's DataLoader item by item and in
            whole batches, Grain item by item, and plain NumPy. torch is needed for
            its rows: pip install torch.
starvation  share of the time that a simulated step of 10 ms (the host sleeps, as it
            does while an accelerator computes) waits for its batch of 1024x32x32x3.
formats     CPU time an image of reading real patches of photographs from each file
            format, in order and at random, and the size of the file.

All contenders of a part take turns in one process. `--plot` draws the figure.
"""

import argparse
import sys
import types
from pathlib import Path

import input_formats
import input_peers
import input_starvation

from jaxaccel.records import Record

RESULTS = Path(__file__).parent / "results"
PARTS: dict[str, types.ModuleType] = {
    "peers": input_peers,
    "starvation": input_starvation,
    "formats": input_formats,
}


def main(arguments: list[str] | None = None) -> Record:
    options = parse(arguments)
    part = PARTS[options.part]
    record = part.measure(options)
    print(record.to_json() if options.json else record.table())
    if options.record:
        record.write(RESULTS)
    if options.plot:
        print(f"drew {draw(record, options.plot)}")
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, default="peers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--large", action="store_true", help="224x224, for peers")
    parser.add_argument("--examples", type=int, help="images")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--batches", type=int, help="batches a round")
    parser.add_argument("--step-ms", type=float, default=10.0, help="for starvation")
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--record", action="store_true", help="write to results/")
    parser.add_argument("--plot", type=Path, help="write the figure to this PNG")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    for name in ("examples", "batch_size", "batches"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if not options.step_ms > 0:
        parser.error(f"--step-ms must be positive, got {options.step_ms}")
    return options


def draw(record: Record, path: Path) -> Path:
    """A bar for each contender: the median, and the range of the rounds."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError(
            "the figure needs matplotlib: pip install 'jaxaccel[examples]'"
        ) from None
    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    names = list(record.rounds)
    values = [np.asarray(record.rounds[name]) for name in names]
    medians = np.array([np.median(v) for v in values])
    ranges = np.array(
        [[m - v.min(), v.max() - m] for m, v in zip(medians, values, strict=True)]
    )
    height = 1.2 + 0.36 * len(names)
    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    places = np.arange(len(names))[::-1]
    axes.barh(places, medians, xerr=ranges.T, color="#0072B2", capsize=3)
    axes.set_yticks(places, names)
    if record.unit != "% of the time":
        axes.set_xscale("log")
    axes.set(xlabel=f"{record.unit} (median and range of the rounds)")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    try:
        main()
    except (ImportError, ValueError, OSError) as error:
        sys.exit(f"input_pipeline: {error}")
