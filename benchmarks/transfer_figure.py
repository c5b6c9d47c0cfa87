"""Before and after shipping uint8: host work, copies and compute of a step.

The same training step is fed in two ways, for 28x28x1 and for 224x224x3 images:
float32 normalized on the host, and uint8 normalized inside the step. A profiler
trace of each gives the times of jaxaccel's own annotations.

`device_put` returns before the copy is done, and a step before it is computed.
So nothing is prefetched here, and the host waits for each stage in turn:

  host work  `jaxaccel.load`: gather the batch, normalize it where it is float32
  copy       from the start of `jaxaccel.put` until the batch is on the device
  compute    `jaxaccel.step`: the jitted step, until its result is there

Writes transfer_figure.png, transfer_figure.md and the record into `--out`. A
real run overlaps the stages (`to_device(depth=2)`); what does not fit behind the
compute shows as starvation.
"""

import argparse
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    DeviceBatches,
    Loader,
    make_normalizer,
    to_device,
)
from jaxaccel.records import Record, paired_ratio
from jaxaccel.train import TrainState, classification_loss, from_nnx, make_train_step

RESULTS = Path(__file__).parent / "results"
MEAN, STD = 0.45, 0.25
BEFORE, AFTER = "float32 from the host", "uint8, normalized in the step"
STAGES = ("host work", "copy", "compute")
SHOWN = 3  # Steps in the figure.


@dataclasses.dataclass(frozen=True)
class Step:
    """Start and end of each stage of a traced step, in milliseconds."""

    spans: dict[str, tuple[float, float]]

    @property
    def start(self) -> float:
        """When the host began to work."""
        return self.spans["host work"][0]

    @property
    def end(self) -> float:
        """When the step was computed."""
        return self.spans["compute"][1]

    @property
    def total(self) -> float:
        """Time from start to end."""
        return self.end - self.start

    def length(self, stage: str) -> float:
        """Time of a stage."""
        start, end = self.spans[stage]
        return end - start


@dataclasses.dataclass
class Feed:
    """One way of feeding one network; `segments` fills up with traced steps."""

    shape: str
    way: str
    batches: DeviceBatches
    step: Any
    state: TrainState
    columns: int
    adopted: str
    bytes_a_step: int = 0
    segments: list[list[Step]] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        """Name among the contenders."""
        return f"{self.shape}, {self.way}"

    def median(self, stage: str | None = None) -> float:
        """Median time of a stage or of a whole step, in milliseconds."""
        steps = [step for segment in self.segments for step in segment]
        values = [s.total if stage is None else s.length(stage) for s in steps]
        return float(np.median(values))

    def share(self, stage: str) -> float:
        """Median share of a stage in a step, in percent."""
        steps = [step for segment in self.segments for step in segment]
        return 100 * float(np.median([s.length(stage) / s.total for s in steps]))


def main(arguments: list[str] | None = None) -> Record:
    options = parse(arguments)
    feeds = [
        make_feed(size, channels, batch_size, way)
        for size, channels, batch_size in (
            (options.small_size, 1, options.small_batch),
            (options.large_size, 3, options.large_batch),
        )
        for way in (BEFORE, AFTER)
    ]
    for feed in feeds:
        run(feed, 2)  # Compiles.
    for index in range(options.rounds):
        first = index % len(feeds)
        for feed in feeds[first:] + feeds[:first]:
            feed.segments.append(trace(feed, options.steps))
    for feed in feeds:
        feed.batches.close()
    record = describe(options, feeds)
    options.out.mkdir(parents=True, exist_ok=True)
    text = table(feeds, record)
    (options.out / "transfer_figure.md").write_text(text, encoding="utf-8")
    draw(feeds, record, options.out / "transfer_figure.png")
    record.write(options.out)
    print(text)
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="what shipping uint8 saves")
    parser.add_argument("--rounds", type=int, default=9, help="traces of each")
    parser.add_argument("--steps", type=int, default=6, help="steps in a trace")
    parser.add_argument("--small-size", type=int, default=28)
    parser.add_argument("--small-batch", type=int, default=512)
    parser.add_argument("--large-size", type=int, default=224)
    parser.add_argument("--large-batch", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.rounds < 2 or options.steps < SHOWN:
        parser.error(f"--rounds must be at least 2 and --steps at least {SHOWN}")
    return options


class Net(nnx.Module):
    """A convolution of 7x7 patches, another one, a mean and a linear layer.

    Small, so that host work and copies meet a step as short as an accelerator's.
    """

    def __init__(self, channels: int, patch: int, rngs: nnx.Rngs):
        window = (patch, patch)
        self.first = nnx.Conv(channels, 16, window, strides=patch, rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the logits."""
        x = nnx.relu(self.second(nnx.relu(self.first(x))))
        return self.head(x.mean(axis=(1, 2)))


def make_feed(size: int, channels: int, batch_size: int, way: str) -> Feed:
    rng = np.random.default_rng(0)
    examples = 8 * batch_size
    shape = (examples, size, size, channels)
    store = ArrayStore(
        {
            "image": rng.integers(256, size=shape, dtype=np.uint8),
            "label": rng.integers(10, size=examples, dtype=np.uint8),
        }
    )
    loader = Loader(
        store,
        BatchPlan(examples, batch_size),
        prefetch=0,
        transform=on_host if way == BEFORE else None,
    )
    columns, adopted = probe(loader)
    task = from_nnx(Net(channels, max(size // 7, 1), nnx.Rngs(0)), classification_loss)
    params, model_state = task.init(jax.random.key(0), None)
    tx = optax.sgd(0.01, momentum=0.9)
    normalize = make_normalizer(MEAN, STD)

    def in_step(batch, key):
        label = batch["label"].astype(jnp.int32)
        return batch | {"image": normalize(batch["image"]), "label": label}

    return Feed(
        shape=f"{batch_size}x{size}x{size}x{channels}",
        way=way,
        # Nobody writes to a batch again, so a second copy is not needed.
        batches=to_device(loader, depth=0, copy=False),
        step=make_train_step(
            task.train_loss, tx, preprocess=None if way == BEFORE else in_step
        ),
        state=TrainState.create(
            params, tx, key=jax.random.key(1), model_state=model_state
        ),
        columns=columns,
        adopted=adopted,
    )


def on_host(batch, rng):
    image = (batch["image"].astype(np.float32) / 255 - MEAN) / STD
    return {
        "image": image.astype(np.float32, copy=False),
        "label": batch["label"].astype(np.int32),
    }


def probe(loader: Loader) -> tuple[int, str]:
    """Counts the columns, and the image batches adopted instead of copied."""
    adopted, tries, columns = 0, 4, 0
    for _ in range(tries):
        host = next(loader)
        columns, image = len(host), host["image"]
        if jax.default_backend() == "cpu":
            device = jax.block_until_ready(jax.device_put(image))
            adopted += device.unsafe_buffer_pointer() == image.ctypes.data
    return columns, f"{adopted} of {tries}"


def run(feed: Feed, steps: int) -> None:
    for index in range(steps):
        before = feed.batches.bytes_put
        with jax.profiler.TraceAnnotation("jaxaccel.batch"):
            batch = jax.block_until_ready(next(feed.batches))
        with jax.profiler.StepTraceAnnotation("jaxaccel.step", step_num=index):
            feed.state, metrics = feed.step(feed.state, batch)
            jax.block_until_ready((feed.state, metrics))
        feed.bytes_a_step = feed.batches.bytes_put - before


def trace(feed: Feed, steps: int) -> list[Step]:
    """Runs some steps under the profiler and reads their stages."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            run(feed, steps)
        finally:
            jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    found = {
        name: list(spans(profile, name)) for name in ("load", "put", "batch", "step")
    }
    counts = {name: len(values) for name, values in found.items()}
    if set(counts.values()) != {steps}:
        raise RuntimeError(
            f"the trace of {steps} steps holds {counts} annotations; run it again, and "
            "with fewer --steps if the profiler dropped events"
        )
    return [
        Step({"host work": load, "copy": (put[0], batch[1]), "compute": step})
        for load, put, batch, step in zip(*found.values(), strict=True)
    ]


def spans(profile, name: str) -> Iterator[tuple[float, float]]:
    """Start and end in milliseconds of an annotation, in the order of time."""
    events = [
        (event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6)
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if event.name == f"jaxaccel.{name}"
    ]
    return iter(sorted(events))


def describe(options: argparse.Namespace, feeds: list[Feed]) -> Record:
    rounds = {
        feed.name: [
            float(np.median([step.total for step in segment]))
            for segment in feed.segments
        ]
        for feed in feeds
    }
    pairs = [(a.name, b.name) for a, b in zip(feeds[::2], feeds[1::2], strict=True)]
    figures: dict[str, str | int | float] = {}
    for feed in feeds:
        figures[f"bytes a step, {feed.name}"] = feed.bytes_a_step
        for stage in STAGES:
            figures[f"{stage}, {feed.name}"] = (
                f"{feed.median(stage):.3g} ms, {feed.share(stage):.1f} %"
            )
    ratios = [paired_ratio(rounds[a], rounds[b]) for a, b in pairs]
    helps = any(r.low > 1 for r in ratios) and not any(r.high < 1 for r in ratios)
    return Record.create(
        "transfer_figure",
        "Shipping uint8 shortens a step where host work and copies are a visible part "
        "of it, and lengthens it nowhere (nothing prefetched)",
        verdict="helps" if helps else "no evidence",
        parameters={k: v for k, v in vars(options).items() if k != "out"},
        unit="ms a step, median of a trace",
        rounds=rounds,
        ratios=[f"{a} / {b}" for a, b in pairs],
        figures=figures,
    )


def table(feeds: list[Feed], record: Record) -> str:
    lines = [
        "Made by `benchmarks/transfer_figure.py` (`make transfer-figure`) on "
        f"{machine(record)}. Medians; nothing is prefetched, the host waits for each "
        "stage.",
        "",
        "| batch | shipped as | copies a step | bytes a step | copy | share "
        "| host work | share | compute | step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for feed in feeds:
        copy, host, compute = (
            f"{feed.median(stage):.2f} ms | {feed.share(stage):.1f} %"
            for stage in ("copy", "host work", "compute")
        )
        lines.append(
            f"| {feed.shape} | {feed.way} | {feed.columns} | {feed.bytes_a_step:,} "
            f"| {copy} | {host} | {compute.split(' | ')[0]} | {feed.median():.2f} ms |"
        )
    lines += ["", "Time of a step, before / after, median and 95 % interval:", ""]
    lines += [
        f"- {feed.shape}: {ratio}"
        for feed, ratio in zip(feeds[::2], record.ratios.values(), strict=True)
    ]
    return "\n".join([*lines, "", note(feeds), ""])


def note(feeds: list[Feed]) -> str:
    if jax.default_backend() != "cpu":
        return (
            "Note: the copies cross the bus to the device. Bytes count every array "
            "handed to `device_put`, images and labels."
        )
    adopted = "; ".join(f"{feed.name}: {feed.adopted}" for feed in feeds)
    return (
        "Note: on the CPU backend host and device share their memory. `device_put` "
        "adopts an array whose memory is 64-byte aligned and copies others; "
        "jaxaccel's batches are aligned, NumPy's own arrays often are not. Image "
        f"batches adopted without a copy, of those looked at: {adopted}. On an "
        "accelerator every byte crosses the bus."
    )


def machine(record: Record) -> str:
    hardware = record.hardware
    device = "" if hardware["platform"] == "cpu" else f"{hardware['device']}, "
    return f"{device}{hardware['cpu']}, {hardware['cores']} cores"


def draw(feeds: list[Feed], record: Record, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "the figure needs matplotlib: pip install 'jaxaccel[examples]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 1, figsize=(10, 6.2), layout="constrained")
    for axes, pair in zip(panels, (feeds[:2], feeds[2:]), strict=True):
        draw_panel(axes, pair, record)
    on_cpu = record.hardware["platform"] == "cpu"
    adoption = "; the CPU backend adopts aligned arrays uncopied" if on_cpu else ""
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"A training step before and after shipping uint8\n{machine(record)}; nothing "
        f"prefetched, each stage waited for{adoption}",
        fontsize=12,
    )
    figure.savefig(path, dpi=140)
    plt.close(figure)


# From Okabe and Ito's palette: told apart by colour-blind readers, and in grey.
COLOURS = {"host work": "#E69F00", "copy": "#000000", "compute": "#0072B2"}


def draw_panel(axes, pair: list[Feed], record: Record) -> None:
    shown = [typical(feed) for feed in pair]
    longest = max(steps[-1].end - steps[0].start for steps in shown)
    for row, (feed, steps) in enumerate(zip(pair, shown, strict=True)):
        draw_steps(axes, row, steps, label=row == 0)
        parts = [f"{feed.median():.2f} ms a step"] + [
            f"{stage} {feed.median(stage):.2f} ms ({feed.share(stage):.1f} %)"
            for stage in STAGES
        ]
        x = 1.02 * (steps[-1].end - steps[0].start)
        axes.text(x, row, "\n".join(parts), va="center", fontsize=9)
    axes.set_xlim(-0.01 * longest, 1.34 * longest)
    axes.set_ylim(1.5, -0.65)
    axes.set_yticks(
        [0, 1], ["float32\nfrom the host", "uint8, normalized\nin the step"]
    )
    axes.set_xlabel("time since the first of three steps began (ms)")
    ratio = record.ratios[f"{pair[0].name} / {pair[1].name}"]
    axes.set_title(
        f"{pair[0].shape}: {pair[0].bytes_a_step:,} → {pair[1].bytes_a_step:,} "
        f"bytes a step; time before / after {ratio}",
        fontsize=10.5,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)


def draw_steps(axes, row: int, steps: list[Step], *, label: bool) -> None:
    begin = steps[0].start
    for stage in STAGES:
        bars = [(s.spans[stage][0] - begin, s.length(stage)) for s in steps]
        axes.broken_barh(
            bars,
            (row - 0.3, 0.6),
            color=COLOURS[stage],
            lw=0,
            label=stage if label else None,
        )
    for number, step in enumerate(steps, 1):
        x = step.start - begin
        axes.plot([x, x], [row - 0.45, row + 0.35], color="0.5", lw=1)
        axes.text(x, row - 0.33, f" step {number}", fontsize=9, va="bottom")


def typical(feed: Feed) -> list[Step]:
    """The consecutive steps whose stages are nearest to the medians of all."""
    windows = [
        segment[i : i + SHOWN]
        for segment in feed.segments
        for i in range(len(segment) - SHOWN + 1)
    ]
    medians = {stage: feed.median(stage) for stage in STAGES}

    def distance(steps: list[Step]) -> float:
        return sum(
            abs(step.total - feed.median())
            + sum(abs(step.length(stage) - medians[stage]) for stage in STAGES)
            for step in steps
        )

    return min(windows, key=distance)


if __name__ == "__main__":
    main()
