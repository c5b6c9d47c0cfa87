"""Claim: crop, flip and normalize on the device take half the CPU time or less.

Against the usual way, NumPy or Pillow image by image on the host, for batches of
1024x32x32x3 (`--large`: 64x224x224x3). CPU time of all threads of the process,
until the result is on the device. On the CPU backend "the device" is the same
processor, so this is the hardest case: an accelerator takes the work off the host.

  crop, flip, normalize  pad, slice, mirror, to float32; device_put
  resized crop           Pillow's crop and resize, to float32; device_put
  colour jitter          Pillow's enhancers; device_put (no hue)
  cutout                 a slice set to 0; device_put
  random erasing         the same with a random rectangle; device_put
  mixup                  of images normalized before, and labels; device_put (the
                         device's time includes normalizing)
  cutmix                 a slice of another image, labels as well; device_put

Each is measured at two places: "host" and "device", and all take turns. The host
draws its random numbers with NumPy, one vectorized call for the whole batch.
"""

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxaccel import data
from jaxaccel.records import Headline, Record, interleave, paired_ratio

RESULTS = Path(__file__).parent / "results"
BOUND = 2.0
CLASSES = 10
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CLAIMED = "crop, flip, normalize"


def main(arguments: list[str] | None = None) -> Record:
    options = parse(arguments)
    record = measure(options)
    print(record.to_json() if options.json else record.table())
    if options.record:
        record.write(RESULTS)
        draw(record, RESULTS / f"{record.name}.png")
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="augmentation: host or device")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--size", type=int, help="height and width")
    parser.add_argument("--large", action="store_true", help="64x224x224x3")
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--record", action="store_true", help="write to results/")
    options = parser.parse_args(arguments)
    batch_size, size = (64, 224) if options.large else (1024, 32)
    options.batch_size = options.batch_size or batch_size
    options.size = options.size or size
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.size < 8:
        parser.error("--size must be at least 8")
    return options


def measure(options: argparse.Namespace) -> Record:
    rng = np.random.default_rng(0)
    shape = (options.batch_size, options.size, options.size, 3)
    images = rng.integers(256, size=shape, dtype=np.uint8)
    labels = rng.integers(CLASSES, size=options.batch_size, dtype=np.uint8)
    contenders: dict[str, Callable] = {}
    device = on_device(images, labels)
    for name, augment in on_host(images, labels).items():
        contenders[f"{name}, host"] = augment
        contenders[f"{name}, device"] = device[name]
    times = interleave(contenders, rounds=options.rounds, clock=time.process_time)
    return describe(options, {k: [1e3 * t for t in v] for k, v in times.items()})


def on_host(images: np.ndarray, labels: np.ndarray) -> dict[str, Callable]:
    """Image by image, in NumPy and Pillow; each returns device arrays."""
    from PIL import Image, ImageEnhance

    rng = np.random.default_rng(1)
    count, size = len(images), images.shape[1]
    mean, std = np.asarray(MEAN, np.float32), np.asarray(STD, np.float32)
    floats = (images.astype(np.float32) / 255 - mean) / std
    one_hot = np.eye(CLASSES, dtype=np.float32)[labels]

    def normalize(image):
        return (image.astype(np.float32) / 255 - mean) / std

    def crop_flip():
        out = []
        shifts, mirror = rng.integers(9, size=(count, 2)), rng.random(count) < 0.5
        for image, (y, x), mirrored in zip(images, shifts, mirror, strict=True):
            padded = np.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect")
            image = padded[y : y + size, x : x + size]
            out.append(normalize(image[:, ::-1] if mirrored else image))
        return jax.device_put(np.stack(out))

    def boxes(scale, ratio):
        area = size * size * rng.uniform(scale[0], scale[1], count)
        aspect = np.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1]), count))
        h = np.sqrt(area / aspect).astype(int).clip(1, size)
        w = np.sqrt(area * aspect).astype(int).clip(1, size)
        y, x = rng.integers(size - h + 1), rng.integers(size - w + 1)
        return np.stack([y, x, h, w], axis=1)

    def resized_crop():
        out = []
        drawn = boxes((0.08, 1), (3 / 4, 4 / 3))
        for image, (y, x, h, w) in zip(images, drawn, strict=True):
            part = Image.fromarray(image).crop((x, y, x + w, y + h))
            part = part.resize((size, size), Image.Resampling.BILINEAR)
            out.append(normalize(np.asarray(part)))
        return jax.device_put(np.stack(out))

    def jitter():
        out = []
        kinds = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
        drawn = rng.uniform(0.6, 1.4, (count, 3))
        for image, factors in zip(images, drawn, strict=True):
            image = Image.fromarray(image)
            for kind, factor in zip(kinds, factors, strict=True):
                image = kind(image).enhance(factor)
            out.append(np.asarray(image))
        return jax.device_put(np.stack(out))

    def cutout():
        out = images.copy()
        half = size // 8
        for image, (y, x) in zip(out, rng.integers(size, size=(count, 2)), strict=True):
            image[max(y - half, 0) : y + half, max(x - half, 0) : x + half] = 0
        return jax.device_put(out)

    def erasing():
        out = images.copy()
        chosen, drawn = rng.random(count) < 0.5, boxes((0.02, 0.33), (0.3, 3.3))
        for image, erase, (y, x, h, w) in zip(out, chosen, drawn, strict=True):
            if erase:
                image[y : y + h, x : x + w] = 0
        return jax.device_put(out)

    def mixup():
        partner, share = rng.permutation(count), rng.random(count, np.float32)
        out, targets = [], []
        for i, (j, s) in enumerate(zip(partner, share, strict=True)):
            out.append(s * floats[i] + (1 - s) * floats[j])
            targets.append(s * one_hot[i] + (1 - s) * one_hot[j])
        return jax.device_put((np.stack(out), np.stack(targets)))

    def cutmix():
        partner, out, targets = rng.permutation(count), images.copy(), []
        for i, (y, x, h, w) in enumerate(boxes((0, 1), (1, 1))):
            j = partner[i]
            out[i, y : y + h, x : x + w] = images[j, y : y + h, x : x + w]
            share = 1 - h * w / size**2
            targets.append(share * one_hot[i] + (1 - share) * one_hot[j])
        return jax.device_put((out, np.stack(targets).astype(np.float32)))

    return {
        CLAIMED: crop_flip,
        "resized crop": resized_crop,
        "colour jitter": jitter,
        "cutout": cutout,
        "random erasing": erasing,
        "mixup": mixup,
        "cutmix": cutmix,
    }


def on_device(images: np.ndarray, labels: np.ndarray) -> dict[str, Callable]:
    """Whole batches, jitted; the bytes travel in each call."""
    normalize = data.make_normalizer(MEAN, STD)
    size = images.shape[1]

    def on_batch(mix):
        return lambda key, x, y: mix(key, {"image": x, "label": y})

    def mixup(key, batch):
        batch = batch | {"image": normalize(batch["image"])}
        return data.mixup(key, batch, num_classes=CLASSES, alpha=1.0)

    functions = {
        CLAIMED: lambda key, x, y: normalize(data.random_crop_flip(key, x)),
        "resized crop": lambda key, x, y: normalize(
            data.random_resized_crop(key, x, size)
        ),
        "colour jitter": lambda key, x, y: data.color_jitter(
            key, x, brightness=0.4, contrast=0.4, saturation=0.4
        ),
        "cutout": lambda key, x, y: data.cutout(key, x, size // 4),
        "random erasing": lambda key, x, y: data.random_erasing(key, x),
        "mixup": on_batch(mixup),
        "cutmix": on_batch(
            lambda key, batch: data.cutmix(key, batch, num_classes=CLASSES)
        ),
    }
    steps = iter(range(10**9))

    def ready(function):
        jitted = jax.jit(
            lambda step, x, y: function(
                jax.random.fold_in(jax.random.key(0), step), x, y
            )
        )

        def run():
            return jitted(jnp.int32(next(steps)), *jax.device_put((images, labels)))

        return run

    return {name: ready(function) for name, function in functions.items()}


def describe(options, rounds) -> Record:
    names = [key.removesuffix(", host") for key in rounds if key.endswith(", host")]
    ratios = {name: f"{name}, host / {name}, device" for name in names}
    batch = f"{options.batch_size}x{options.size}x{options.size}x3"
    claimed = paired_ratio(*(rounds[x] for x in ratios[CLAIMED].split(" / ")))
    return Record.create(
        "device_augment_large" if options.large else "device_augment",
        f"Crop, flip and normalize of {batch} inside jit take at most 1/{BOUND:g} of "
        f"the CPU time of NumPy image by image ({jax.default_backend()} backend)",
        verdict="helps" if claimed.low >= BOUND else "no evidence",
        parameters={k: getattr(options, k) for k in ("batch_size", "size", "rounds")},
        unit="ms of CPU time a batch",
        rounds=rounds,
        ratios=list(ratios.values()),
        headline=[
            Headline(
                f"Less CPU time, {batch}: crop, flip and normalize in jit",
                "NumPy, image by image",
                ratios[CLAIMED],
            )
        ],
    )


def draw(record: Record, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib: pip install 'jaxaccel[examples]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    names = [key.split(", host / ")[0] for key in record.ratios]
    for row, (name, ratio) in enumerate(
        zip(names, record.ratios.values(), strict=True)
    ):
        spread = [[ratio.median - ratio.low], [ratio.high - ratio.median]]
        # Bars from 1, where both are equal.
        axes.barh(
            row, ratio.median - 1, 0.6, 1, color="#0072B2", xerr=spread, capsize=3
        )
        host, device = (
            float(np.median(record.rounds[f"{name}, {where}"]))
            for where in ("host", "device")
        )
        axes.text(
            max(ratio.high, 1) * 1.05,
            row,
            f" {ratio.median:.3g}x ({host:.3g} → {device:.3g} ms)",
            va="center",
            fontsize=9,
        )
    axes.axvline(1, color="0.4", lw=1)
    axes.set_xscale("log")
    axes.set_xlim(right=4 * max(ratio.high for ratio in record.ratios.values()))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("CPU time image by image on the host / in whole batches inside jit")
    settings = record.parameters
    axes.set_title(
        f"{settings['batch_size']}x{settings['size']}x{settings['size']}x3, "
        f"{record.hardware['platform']} backend: {record.hardware['cpu']}",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    main()
