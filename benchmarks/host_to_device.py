"""Claim: images that travel as uint8 are ready on the device >= 6x sooner.

Measured against normalizing to float32 on the host, for batches of 1024x32x32x3
(`--large`: 128x224x224x3). All contenders take turns in one process:

  float32, naive     X[i], astype, / 255, - mean, / std; device_put; wait
  float32, careful   X[i], one multiply and one subtract in place; device_put; wait
  uint8, plain       X[i]; device_put; wait
  uint8              jaxaccel's Loader and to_device; wait
  uint8, normalized  the same, and the jitted normalizer; wait
  ..., first conv    with `--large`: float32, naive and uint8, each until the output
                     of a ResNet's first convolution (7x7, stride 2, 64 features)

Labels travel along, int32 in the usual way and uint8 here. The CPU backend
adopts an aligned host buffer instead of copying it; jaxaccel's batches are
aligned and NumPy's own mostly are not. "uint8, plain" shows the gain without that.
"""

import argparse
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel.data import ArrayStore, BatchPlan, Loader, make_normalizer, to_device
from jaxaccel.records import Headline, Record, interleave, paired_ratio

RESULTS = Path(__file__).parent / "results"
BOUND = 6.0
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

NAIVE, CAREFUL = "float32, naive", "float32, careful"
PLAIN, OURS, READY = "uint8, plain", "uint8", "uint8, normalized"
NAIVE_CONV, OURS_CONV = "float32, naive, first conv", "uint8, first conv"


def main(arguments: list[str] | None = None) -> Record:
    options = parse(arguments)
    record = measure(options)
    print(record.to_json() if options.json else record.table())
    if options.record:
        record.write(RESULTS)
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="float32 or uint8 until ready")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, help="batches a round")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--size", type=int, help="height and width of an image")
    parser.add_argument("--examples", type=int, help="images in memory")
    parser.add_argument("--large", action="store_true", help="128x224x224x3")
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--record", action="store_true", help="write to results/")
    options = parser.parse_args(arguments)
    large = {"batches": 4, "batch_size": 128, "size": 224, "examples": 1024}
    small = {"batches": 4, "batch_size": 1024, "size": 32, "examples": 50_000}
    for name, default in (large if options.large else small).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.rounds < 2 or options.batches < 1:
        parser.error("--rounds must be at least 2 and --batches at least 1")
    return options


def measure(options: argparse.Namespace) -> Record:
    rng = np.random.default_rng(0)
    shape = (options.examples, options.size, options.size, 3)
    images = rng.integers(256, size=shape, dtype=np.uint8)
    labels = rng.integers(10, size=options.examples, dtype=np.uint8)
    plan = BatchPlan(options.examples, options.batch_size)
    contenders, sent = make_contenders(images, labels, plan)
    if options.large:
        contenders |= with_first_conv(contenders)

    # Several, for the first one of a turn pays for memory that the others freed.
    def several(name):
        def run():
            for _ in range(options.batches):
                batch = contenders[name]()
            return batch

        return run

    times = interleave(
        {name: several(name) for name in contenders}, rounds=options.rounds
    )
    per_batch = {
        name: [1e3 * t / options.batches for t in values]
        for name, values in times.items()
    }
    return describe(options, per_batch, sent)


def make_contenders(images, labels, plan):
    """The contenders, each a function that makes one batch ready; bytes they put."""
    mean, std = np.asarray(MEAN, np.float32), np.asarray(STD, np.float32)
    scale, shift = 1 / (255 * std), mean / std
    sent = {}

    def put(name, image, label):
        sent[name] = image.nbytes + label.nbytes
        return jax.block_until_ready(jax.device_put({"image": image, "label": label}))

    def naive(rows):
        x = images[rows].astype(np.float32) / 255
        return put(NAIVE, (x - mean) / std, labels[rows].astype(np.int32))

    def careful(rows):
        x = np.multiply(images[rows], scale, dtype=np.float32)
        np.subtract(x, shift, out=x)
        return put(CAREFUL, x, labels[rows].astype(np.int32))

    def plain(rows):
        return put(PLAIN, images[rows], labels[rows])

    def on_rows(function):
        steps = itertools.count()
        return lambda: function(plan.indices(next(steps)))

    def on_loader(name, finish):
        store = ArrayStore({"image": images, "label": labels})
        batches = to_device(Loader(store, plan, prefetch=0), depth=0)

        def ready():
            before = batches.bytes_put
            batch = jax.block_until_ready(finish(next(batches)))
            sent[name] = batches.bytes_put - before
            return batch

        return ready

    normalize = jax.jit(make_normalizer(MEAN, STD))
    contenders = {
        NAIVE: on_rows(naive),
        CAREFUL: on_rows(careful),
        PLAIN: on_rows(plain),
        OURS: on_loader(OURS, lambda batch: batch),
        READY: on_loader(
            READY, lambda batch: batch | {"image": normalize(batch["image"])}
        ),
    }
    return contenders, sent


def with_first_conv(contenders):
    """Both ways, up to the output of the first convolution, in one jit."""
    rng = np.random.default_rng(1)
    kernel = jnp.asarray(rng.standard_normal((7, 7, 3, 64), np.float32))
    normalize = make_normalizer(MEAN, STD)

    def first_conv(images, kernel):
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            images, kernel, (2, 2), "SAME", dimension_numbers=dims
        )

    naive = jax.jit(first_conv)
    ours = jax.jit(lambda images, kernel: first_conv(normalize(images), kernel))
    return {
        NAIVE_CONV: lambda: naive(contenders[NAIVE]()["image"], kernel),
        OURS_CONV: lambda: ours(contenders[OURS]()["image"], kernel),
    }


def describe(options, rounds, sent) -> Record:
    name = "host_to_device_large" if options.large else "host_to_device"
    batch = f"{options.batch_size}x{options.size}x{options.size}x3"
    ratio = sent[NAIVE] / sent[OURS]
    helps = paired_ratio(rounds[NAIVE], rounds[OURS]).low >= BOUND
    return Record.create(
        name,
        f"Host work and device_put for {batch}: uint8 is ready at least {BOUND:g}x "
        "sooner than float32 normalized on the host",
        verdict="helps" if helps else "no evidence",
        parameters={
            key: getattr(options, key)
            for key in ("batch_size", "size", "examples", "batches", "rounds")
        },
        unit="ms a batch",
        rounds=rounds,
        ratios=[
            *(f"{a} / {b}" for b in (OURS, READY, PLAIN) for a in (NAIVE, CAREFUL)),
            *([f"{NAIVE_CONV} / {OURS_CONV}"] if options.large else []),
        ],
        figures={
            **{f"bytes a batch, {key}": sent[key] for key in (NAIVE, OURS)},
            "bytes ratio": f"{ratio:.2f}x" if round(ratio, 2) == ratio else ratio,
        },
        headline=headline(batch, options.large),
    )


def headline(batch, large) -> list[Headline]:
    usual = "normalized to float32 on the host"
    sooner = f"Sooner on the device, {batch}"
    ours = Headline(f"{sooner}: uint8", usual, f"{NAIVE} / {OURS}")
    if large:
        conv = f"{NAIVE_CONV} / {OURS_CONV}"
        return [ours, Headline(f"{sooner}, and its first convolution", usual, conv)]
    return [
        Headline(
            f"Fewer bytes handed to `device_put`, {batch} and labels",
            "float32 images, int32 labels",
            "bytes ratio",
        ),
        ours,
        Headline(f"{sooner}: uint8 by plain `X[i]`", usual, f"{NAIVE} / {PLAIN}"),
        Headline(
            f"Sooner on the device and normalized there, {batch}: uint8",
            usual,
            f"{NAIVE} / {READY}",
        ),
    ]


if __name__ == "__main__":
    main()
