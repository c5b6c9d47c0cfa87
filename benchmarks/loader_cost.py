"""Claim: the loader costs at most twice the CPU time of a plain `X[idx]`.

And far less than the usual Grain pipeline, which handles one example at a time.
CPU time of all threads of the process, for 50,000 images of 32x32x3 in memory:

  X[idx]           a permutation each epoch, images[idx], labels[idx]
  loader           jaxaccel's Loader without a thread
  loader, thread   the same with two batches prefetched by a thread
  Grain, items     MapDataset.source(...).shuffle().map(...).batch()

All take turns in one process; Grain gets fewer images a round, for it is slow.
"""

import argparse
import time
from pathlib import Path

import grain
import numpy as np

from jaxaccel.data import ArrayStore, BatchPlan, Loader
from jaxaccel.records import Headline, Record, interleave, paired_ratio

RESULTS = Path(__file__).parent / "results"
BOUND = 2.0


def main(arguments: list[str] | None = None) -> Record:
    options = parse(arguments)
    record = measure(options)
    print(record.to_json() if options.json else record.table())
    if options.record:
        record.write(RESULTS)
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CPU time of the loader")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--size", type=int, default=32, help="height and width")
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--grain-examples", type=int, default=4096, help="a round")
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--record", action="store_true", help="write to results/")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.grain_examples < max(options.batch_sizes):
        parser.error("--grain-examples must hold at least one batch")
    return options


def measure(options: argparse.Namespace) -> Record:
    rng = np.random.default_rng(0)
    shape = (options.examples, options.size, options.size, 3)
    images = rng.integers(256, size=shape, dtype=np.uint8)
    labels = rng.integers(10, size=options.examples, dtype=np.uint8)
    contenders, handled = {}, {}
    for batch_size in options.batch_sizes:
        for name, (run, batches) in make_contenders(
            images, labels, batch_size, options.grain_examples // batch_size
        ).items():
            key = f"{name}, batch {batch_size}"
            contenders[key], handled[key] = run, batches * batch_size
    times = interleave(contenders, rounds=options.rounds, clock=time.process_time)
    rounds = {
        key: [1e6 * t / handled[key] for t in values] for key, values in times.items()
    }
    return describe(options, rounds)


def make_contenders(images, labels, batch_size, grain_batches):
    """Functions that each read some batches, and how many."""
    epoch = len(images) // batch_size
    store = ArrayStore({"image": images, "label": labels})
    rng = np.random.default_rng(1)

    def plain():
        order = rng.permutation(len(images))
        for step in range(epoch):
            rows = order[step * batch_size : (step + 1) * batch_size]
            batch = {"image": images[rows], "label": labels[rows]}
        return batch

    def read(iterator, batches):
        def run():
            for _ in range(batches):
                batch = next(iterator)
            return batch

        return run, batches

    def loader(prefetch):
        plan = BatchPlan(len(images), batch_size)
        return read(Loader(store, plan, prefetch=prefetch), epoch)

    return {
        "X[idx]": (plain, epoch),
        "loader": loader(0),
        "loader, thread": loader(2),
        "Grain, items": read(grain_items(images, labels, batch_size), grain_batches),
    }


def grain_items(images, labels, batch_size):
    dataset = (
        grain.MapDataset.source(range(len(images)))
        .seed(0)
        .shuffle()
        .repeat()
        .map(lambda i: {"image": images[i], "label": labels[i]})
        .batch(batch_size)
    )
    # No threads: they would spend CPU time outside of the round that asked for the
    # batch, on up to 500 batches ahead.
    return iter(dataset.to_iter_dataset(grain.ReadOptions(0, 0)))


def describe(options, rounds) -> Record:
    def pairs(a, b):
        sizes = options.batch_sizes
        return [(f"{a}, batch {size}", f"{b}, batch {size}") for size in sizes]

    def ratios(chosen):
        return [paired_ratio(rounds[a], rounds[b]) for a, b in chosen]

    ours = pairs("loader", "X[idx]") + pairs("loader, thread", "X[idx]")
    items = pairs("Grain, items", "loader")
    cheap = all(ratio.high <= BOUND for ratio in ratios(ours))
    better = all(ratio.low > 1 for ratio in ratios(items))
    verdict = "trade-off" if better else "no evidence"
    return Record.create(
        "loader_cost",
        f"The loader takes at most {BOUND:g}x the CPU time of a plain X[idx], and "
        "less than a Grain pipeline of single examples",
        verdict="helps" if cheap and better else verdict,
        parameters={
            key: getattr(options, key)
            for key in ("rounds", "batch_sizes", "size", "examples", "grain_examples")
        },
        unit="us of CPU time an image",
        rounds=rounds,
        ratios=[f"{a} / {b}" for a, b in ours + items],
        headline=[
            Headline(
                f"CPU time of the loader, in multiples of `X[idx]`, batch "
                f"{options.batch_sizes[0]} (1 is ideal)",
                "plain `X[idx]`, in a random order",
                " / ".join(ours[0]),
            ),
            Headline(
                f"Less CPU time in the loader, batch {options.batch_sizes[0]}",
                "a Grain pipeline of single examples",
                " / ".join(items[0]),
            ),
        ],
    )


if __name__ == "__main__":
    main()
