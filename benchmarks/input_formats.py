"""Reading each file format, for `input_pipeline.py --part formats`."""

import argparse
import collections
import functools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
import study_data

from jaxaccel.data import ArrayStore, Store, convert, open_store
from jaxaccel.records import Headline, Record, interleave, paired_ratio

BATCH = 256
# Name, file, compression.
FILES = {
    "npy": ("npy", None),
    "arrow": ("images.arrow", None),
    "arrow, lz4": ("lz4.arrow", "lz4"),
    "arrow, zstd": ("zstd.arrow", "zstd"),
    "parquet": ("images.parquet", None),
    "parquet, zstd": ("zstd.parquet", "zstd"),
    "tfrecord": ("images.tfrecord", None),
    "array_record": ("images.array_record", None),
    "array_record, zstd": ("zstd.array_record", "zstd"),
    "tar": ("images.tar", None),
}
# Formats that are read in chunks: a random batch would decode them all.
CHUNKED = {"arrow, lz4", "arrow, zstd", "parquet", "parquet, zstd"}
MEMMAP, PLAIN = "np.memmap slices", "np.memmap[rows]"
GRAIN_TFRECORD, GRAIN_ITEMS = "Grain TFRecord, bytes", "Grain ArrayRecord, source[i]"
NO_CRC = "tfrecord, no checksums"
# Contender, peer, least ratio of CPU times peer / contender.
BOUNDS = (
    (f"{NO_CRC}: in order", f"{GRAIN_TFRECORD}: in order", 1.5),
    ("tfrecord: in order", f"{GRAIN_TFRECORD}: in order", 0.8),
    ("array_record: at random", f"{GRAIN_ITEMS}: at random", 5.0),
    # Both are memory-mapped and hand out fresh, aligned batches.
    ("arrow: in order", "npy: in order", 0.8),
)


def measure(options: argparse.Namespace) -> Record:
    examples = options.examples or 50_000
    batches = options.batches or 8
    source = study_data.photo_patches(examples, 10, 10)[0]
    with tempfile.TemporaryDirectory() as folder:
        paths = write(source, Path(folder))
        contenders, counts = readers(paths, examples, batches)
        times = interleave(
            contenders, rounds=options.rounds, clock=time.process_time, warmup=1
        )
        sizes = {name: size_of(path) for name, path in paths.items()}
    rounds = {
        name: [1e6 * t / counts[name] for t in values] for name, values in times.items()
    }
    parameters = {"examples": examples, "batch_size": BATCH, "rounds": options.rounds}
    return describe(rounds, sizes, {**parameters, "random batches": batches})


def write(source: ArrayStore, folder: Path) -> dict[str, Path]:
    paths = {}
    for name, (file, compression) in FILES.items():
        paths[name] = folder / file
        convert(source, paths[name], compression=compression, progress=False)
    return paths


def size_of(path: Path) -> float:
    """MB of a file, or of the columns of a folder, without their checksums."""
    files = sorted(path.glob("*.npy")) if path.is_dir() else [path]
    return round(sum(file.stat().st_size for file in files) / 1e6, 1)


def readers(
    paths: dict[str, Path], examples: int, batches: int
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """Functions that each read images, and how many."""
    rng = np.random.default_rng(0)
    orders = [rng.integers(examples, size=BATCH) for _ in range(batches)]
    found: dict[str, Callable[[], Any]] = {}
    counts: dict[str, int] = {}

    def in_order(name: str, scan: Callable[[], Iterable[Any]]) -> None:
        found[f"{name}: in order"] = lambda: last(scan())
        counts[f"{name}: in order"] = examples

    def at_random(name: str, take: Callable[[np.ndarray], Any]) -> None:
        found[f"{name}: at random"] = lambda: last(take(rows) for rows in orders)
        counts[f"{name}: at random"] = BATCH * batches

    def add(name: str, store: Store) -> None:
        in_order(name, lambda: store.scan(BATCH))
        at_random(name, store.take)

    def scan_anew(path: Path) -> Iterator[Any]:
        # An open store would still hold what it decoded in the round before.
        with open_store(path) as store:
            yield from store.scan(BATCH)

    for name, path in paths.items():
        if name in CHUNKED:
            in_order(name, functools.partial(scan_anew, path))
        else:
            add(name, open_store(path))
    add(NO_CRC, open_store(paths["tfrecord"], checksums=False))
    images, labels = (
        np.load(paths["npy"] / f"{column}.npy", mmap_mode="r")
        for column in ("image", "label")
    )
    starts = range(0, examples, BATCH)
    in_order(
        MEMMAP,
        lambda: (
            [np.array(x[start : start + BATCH]) for x in (images, labels)]
            for start in starts
        ),
    )
    at_random(PLAIN, lambda rows: (images[rows], labels[rows]))
    tfrecord, array_record = str(paths["tfrecord"]), str(paths["array_record"])
    in_order(GRAIN_TFRECORD, lambda: grain.experimental.TFRecordIterDataset(tfrecord))
    records = grain.sources.ArrayRecordDataSource(array_record)
    at_random(GRAIN_ITEMS, lambda rows: [records[int(row)] for row in rows])
    return found, counts


def last(values: Iterable[Any]) -> Any:
    return collections.deque(values, maxlen=1).pop()


def describe(
    rounds: dict[str, list[float]], sizes: dict[str, float], parameters: dict[str, Any]
) -> Record:
    figures: dict[str, Any] = {f"MB: {name}": size for name, size in sizes.items()}
    for name, values in rounds.items():
        figures[f"images a CPU second: {name}"] = round(1e6 / float(np.median(values)))
    held = []
    for ours, peer, bound in BOUNDS:
        ratio = paired_ratio(rounds[peer], rounds[ours])
        held.append(ratio.median >= bound)
        figures[f"bound: {peer} / {ours}"] = (
            f"{ratio} of at least {bound:g}x: {'holds' if held[-1] else 'BROKEN'}"
        )
    return Record.create(
        "input_pipeline_formats",
        "Reading batches costs less CPU time than with the usual readers of the same "
        "formats",
        verdict="helps" if all(held) else "no evidence",
        parameters=parameters,
        unit="us of CPU time an image",
        rounds=rounds,
        ratios=[
            *(f"{peer} / {ours}" for ours, peer, _ in BOUNDS),
            f"{MEMMAP}: in order / arrow: in order",
            f"{PLAIN}: at random / arrow: at random",
            f"{PLAIN}: at random / npy: at random",
        ],
        figures=figures,
        headline=[
            Headline(
                "Less CPU time, TFRecord in order, with checksums",
                "Grain's TFRecord reader, which checks none and yields bytes",
                f"{BOUNDS[1][1]} / {BOUNDS[1][0]}",
            ),
            Headline(
                "Less CPU time, ArrayRecord at random, in batches",
                "Grain's `ArrayRecordDataSource[i]`",
                f"{BOUNDS[2][1]} / {BOUNDS[2][0]}",
            ),
        ],
    )
