"""Trains one small network three times and prints what each change brought.

    python examples/trainers/image_classifier.py            # or: make train
    python examples/trainers/image_classifier.py --tune --transform znorm

The same strided convolutional network (Flax NNX, 16/32/64 channels, batch norm),
initial weights, batch order, augmentation and optimizer (SGD, momentum 0.9, cosine
decay); one thing changes at a time:

    a  float32 on the host   the usual way: batches are augmented and normalized to
                             float32 by NumPy, then shipped
    b  uint8, in the step    bytes are shipped as they are stored; augmented and
                             normalized inside the jitted step
    c  b + znorm             the same, with a gradient transformation before the
                             momentum, at the learning rate that suits it

Data: Fashion-MNIST, fetched once. It writes TensorBoard logs, trained weights (for
quantize_classifier.py) and learning_curves.png to a new folder below
logs/image_classifier, or to --logdir. Learning rates come from --tune: a grid on the
last sixth of the training set, never on the test set.
"""

import argparse
import dataclasses
import datetime
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from reporting import Result, Run, draw_curves, print_table, write_records

import jaxaccel.transforms
from jaxaccel import data, train

# ------------------------------------------------------------------------ settings

MOMENTUM = 0.9
EPOCHS = {"fashion_mnist": 10, "cifar10": 10, "digits": 60}
LOG_EVERY = 50
EVAL_BATCH_SIZE = 1000
WIDTHS = (16, 32, 64)
WEIGHTS = "weights"

TRANSFORMS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "none": optax.identity,
    "znorm": jaxaccel.transforms.znorm,
    "centralize": jaxaccel.transforms.centralize_gradients,
    "clip": lambda: jaxaccel.transforms.clip_by_global_norm(1.0),
}

# The best of each grid below, as --tune found them (Adam's for none and znorm only:
# centralization and clipping leave the size of its steps as it is).
LEARNING_RATES = {
    ("sgd", "none"): 0.1,
    ("sgd", "znorm"): 1e-3,
    ("sgd", "centralize"): 0.1,
    ("sgd", "clip"): 0.1,
    ("adam", "none"): 0.01,
    ("adam", "znorm"): 0.01,
    ("adam", "centralize"): 0.01,
    ("adam", "clip"): 0.01,
}
GRIDS: dict[Any, tuple[float, ...]] = {
    ("sgd", "znorm"): (1e-4, 3e-4, 1e-3, 3e-3),
    "sgd": (0.01, 0.03, 0.1, 0.3),
    "adam": (1e-3, 3e-3, 1e-2, 3e-2),
}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset",
        choices=["fashion_mnist", "digits", "cifar10"],
        help="default: fashion_mnist, or digits where that cannot be fetched",
    )
    parser.add_argument(
        "--epochs", type=number(int, least=1), help="default: 10; 60 for digits"
    )
    parser.add_argument("--batch-size", type=number(int, least=1), default=128)
    parser.add_argument("--transform", choices=TRANSFORMS, default="znorm")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16", "float16"],
        default="float32",
        help="of the step's arithmetic; parameters stay float32, float16 scales "
        "the loss",
    )
    parser.add_argument("--augment", choices=["none", "flip-crop"], default="flip-crop")
    parser.add_argument("--crop-pad", type=number(int, least=0), default=1)
    parser.add_argument(
        "--learning-rate",
        type=number(float, above=0),
        help="for all runs; default: what --tune found for each",
    )
    parser.add_argument(
        "--logdir",
        type=pathlib.Path,
        help="default: logs/image_classifier/DATE-TIME",
    )
    parser.add_argument("--seed", type=number(int, least=0), default=0)
    parser.add_argument("--tune", action="store_true", help="run the grids, then stop")
    parser.add_argument("--record", type=pathlib.Path, help="folder for JSON records")
    return parser.parse_args(argv)


def number(kind: Callable[[str], Any], *, least: float = -math.inf, above=-math.inf):
    """Returns a parser of finite numbers within a range."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not (value >= least and value > above and math.isfinite(value)):
            bound = f"at least {least}" if least > -math.inf else f"above {above}"
            raise argparse.ArgumentTypeError(f"must be {bound} and finite, got {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def check_settings(args: argparse.Namespace, dataset: data.NamedDataset) -> None:
    """Finds before the first run what would stop the last one."""
    smallest = min(dataset.train.spec["image"].shape[:2])
    if args.augment == "flip-crop" and args.crop_pad >= smallest:
        raise ValueError(
            f"--crop-pad {args.crop_pad} reflects more than images of {smallest} "
            f"pixels have; use {smallest - 1} at most"
        )
    for option, folder in (("--logdir", args.logdir), ("--record", args.record)):
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(
                f"{option} {folder} cannot be written ({error.strerror}); choose "
                "another folder"
            ) from error
    if not args.tune and list(args.logdir.glob(f"*/{WEIGHTS}")):
        raise ValueError(
            f"--logdir {args.logdir} holds the weights of an earlier start; choose "
            "another folder"
        )


# ---------------------------------------------------------------------------- data


def load(name: str | None) -> data.NamedDataset:
    if name is not None:
        return data.load_dataset(name)
    try:
        return data.load_dataset("fashion_mnist")
    except data.DatasetUnavailableError as error:
        print(
            f"{error}\n\n*** FASHION-MNIST CANNOT BE HAD: TRAINING ON DIGITS INSTEAD, "
            "8x8 pixels. The figures below are not those of the README. ***\n",
            file=sys.stderr,
        )
        return data.load_dataset("digits")


def host_transform(args: argparse.Namespace, mean: np.ndarray, std: np.ndarray):
    """Augments and normalizes a batch with NumPy, the usual way."""

    def transform(batch: dict, rng: np.random.Generator) -> dict:
        images = batch["image"]
        if args.augment == "flip-crop":
            images = host_crop_flip(images, args.crop_pad, rng)
        images = images.astype(np.float32)
        images *= 1 / (255 * std)
        images -= mean / std
        return {**batch, "image": images, "label": batch["label"].astype(np.int32)}

    return transform


def host_crop_flip(images: np.ndarray, pad: int, rng: np.random.Generator):
    n, height, width, _ = images.shape
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="reflect")
    offsets = rng.integers(0, 2 * pad + 1, (2, n, 1))
    rows = offsets[0] + np.arange(height)
    columns = offsets[1] + np.arange(width)
    columns = np.where(rng.random((n, 1)) < 0.5, columns, columns[:, ::-1])
    return padded[np.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]


def device_preprocess(args: argparse.Namespace, normalize: Callable, augment: bool):
    """Does the same inside the jitted step."""

    def preprocess(batch: dict, key: jax.Array) -> dict:
        images = batch["image"]
        if augment and args.augment == "flip-crop":
            images = data.random_crop_flip(key, images, pad=args.crop_pad)
        return {**batch, "image": normalize(images)}

    return preprocess


# ------------------------------------------------------------------------- network


class ConvNet(nnx.Module):
    """Three strided 3x3 convolutions with batch norm, and a linear head."""

    def __init__(
        self,
        image_shape: tuple[int, ...],
        classes: int,
        *,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape
        self.convs, self.norms = nnx.List([]), nnx.List([])
        for features in WIDTHS:
            self.convs.append(
                nnx.Conv(
                    channels,
                    features,
                    (3, 3),
                    strides=2,
                    use_bias=False,
                    rngs=rngs,
                )
            )
            # Flax's default momentum of 0.99 is still warming up after 100 steps.
            self.norms.append(nnx.BatchNorm(features, momentum=0.9, rngs=rngs))
            height, width, channels = -(-height // 2), -(-width // 2), features
        self.head = nnx.Linear(height * width * channels, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of normalized images."""
        x = images
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(conv(x)))
        return self.head(x.reshape(x.shape[0], -1))


# ----------------------------------------------------------------------- optimizer


def layer_norms(grads: Any) -> dict[str, jax.Array]:
    """Returns the L2 norm of every parameter's gradient, by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value"): (
            jnp.linalg.norm(grad.astype(jnp.float32).ravel())
        )
        for path, grad in jax.tree_util.tree_leaves_with_path(grads)
    }


def make_optimizer(run: Run, optimizer: str, steps: int):
    schedule = optax.cosine_decay_schedule(run.learning_rate, steps)
    rule = {
        "sgd": lambda: optax.sgd(schedule, momentum=MOMENTUM),
        "adam": lambda: optax.adam(schedule),
    }[optimizer]()
    tx = optax.chain(
        optax.snapshot("gradient_norm", layer_norms),
        TRANSFORMS[run.transform](),
        rule,
    )
    return tx, schedule


# ------------------------------------------------------------------------ training


def train_once(
    run: Run,
    args: argparse.Namespace,
    dataset: data.NamedDataset,
    training: data.ArrayStore,
    held_out: data.ArrayStore,
    interrupt: train.SafeInterrupt,
    writer: train.TensorBoardWriter | None = None,
) -> Result:
    """Trains from the seed and evaluates after every epoch."""
    mean, std = (np.asarray(x, np.float32) for x in (dataset.mean, dataset.std))
    normalize = data.make_normalizer(dataset.mean, dataset.std)
    plan = data.BatchPlan(
        len(training), args.batch_size, seed=args.seed, epochs=args.epochs
    )
    steps, steps_per_epoch = len(plan), plan.steps_per_epoch
    log_every = min(LOG_EVERY, steps_per_epoch)

    model = ConvNet(
        training.spec["image"].shape,
        len(dataset.classes),
        rngs=nnx.Rngs(args.seed),
    )
    task = train.from_nnx(model, train.classification_loss)
    tx, schedule = make_optimizer(run, args.optimizer, steps)
    params, model_state = task.init()
    state = train.TrainState.create(
        params,
        tx,
        key=jax.random.key(args.seed),
        model_state=model_state,
        precision=args.precision,
    )
    step = train.make_train_step(
        task.train_loss,
        tx,
        precision=args.precision,
        preprocess=device_preprocess(args, normalize, augment=True)
        if run.ships_uint8
        else None,
    )
    eval_step = train.make_eval_step(
        task.eval_loss,
        precision=args.precision,
        preprocess=device_preprocess(args, normalize, augment=False),
    )
    transform = None if run.ships_uint8 else host_transform(args, mean, std)

    losses, accuracies, epoch_loss = [], [], []
    with (
        train.CompileCounter() as compiles,
        data.Loader(training, plan, transform=transform) as loader,
        data.to_device(loader) as batches,
        train.MetricBuffer(writer, every=log_every) as buffer,
        train.ProgressLine(steps, run.name) as progress,
        train.Meter() as meter,
    ):
        loop = train.run(
            step,
            state,
            batches,
            evaluate=lambda state: evaluate(eval_step, state, held_out),
            evaluate_every=steps_per_epoch,
            meter=meter,
            buffer=buffer,
            progress=progress,
            interrupt=interrupt,
        )
        for number, state, metrics in loop:
            epoch_loss.append(metrics["loss"])
            if writer is not None and number % log_every == 0:
                log_step(writer, number, state, meter.reading(), schedule)
            if (held_out_metrics := metrics.get("evaluation")) is not None:
                losses.append(float(np.mean(jax.device_get(epoch_loss))))
                epoch_loss.clear()
                accuracies.append(held_out_metrics["accuracy"])
                if writer is not None:
                    writer.scalars(number, {"held_out": held_out_metrics})
    if writer is not None:
        weights = {"params": state.params, "model_state": state.model_state}
        train.save(weights_of(run, args), weights, metrics={"accuracy": accuracies[-1]})
    return Result(
        run=run,
        bytes_per_epoch=batches.bytes_put // args.epochs,
        compilations=compiles.counts["train_step"],
        reading=meter.reading(),
        losses=losses,
        accuracies=accuracies,
    )


def weights_of(run: Run, args: argparse.Namespace) -> pathlib.Path:
    """Where the trained weights go."""
    return args.logdir / run.name[0] / WEIGHTS


def evaluate(eval_step: Any, state: train.TrainState, store: data.ArrayStore):
    plan = data.BatchPlan(
        len(store),
        min(EVAL_BATCH_SIZE, len(store)),
        epochs=1,
        shuffle=False,
        remainder="pad",
    )
    with data.to_device(data.Loader(store, plan)) as batches:
        return train.evaluate(eval_step, state, batches)


def log_step(
    writer: train.TensorBoardWriter,
    number: int,
    state: train.TrainState,
    reading: train.MeterReading,
    schedule: optax.Schedule,
) -> None:
    norms = jax.device_get(optax.tree.get(state.opt_state, "gradient_norm"))
    writer.scalars(
        number,
        {
            "gradient_norm": norms,
            "learning_rate": schedule(number - 1),
            "examples_per_second": reading.examples_per_second,
            "starvation": reading.starvation,
        },
    )


# ----------------------------------------------------------------------------- main


def make_runs(args: argparse.Namespace) -> list[Run]:
    def rate(transform: str) -> float:
        return args.learning_rate or LEARNING_RATES[args.optimizer, transform]

    runs = [
        Run("a float32 on the host", False, "none", rate("none")),
        Run("b uint8, in the step", True, "none", rate("none")),
    ]
    if args.transform != "none":
        name = f"c b + {args.transform}"
        runs.append(Run(name, True, args.transform, rate(args.transform)))
    return runs


def tune(
    args: argparse.Namespace,
    dataset: data.NamedDataset,
    interrupt: train.SafeInterrupt,
) -> None:
    """Tries the grid of --transform on the last sixth of the training set."""
    cut = len(dataset.train) * 5 // 6
    training, held_out = dataset.train[:cut], dataset.train[cut:]
    default = GRIDS[args.optimizer]
    for rate in GRIDS.get((args.optimizer, args.transform), default):
        run = Run(f"{args.transform} {rate:g}", True, args.transform, rate)
        result = train_once(run, args, dataset, training, held_out, interrupt)
        accuracy = result.accuracies[-1]
        print(f"{args.optimizer} {run.name}: held-out accuracy {accuracy:.2%}")


def main(argv: list[str] | None = None) -> list[Result]:
    args = parse_arguments(argv)
    dataset = load(args.dataset)
    if args.epochs is None:
        args.epochs = EPOCHS[dataset.name]
    if args.logdir is None:
        # A folder for each start: TensorBoard would draw two runs as one curve.
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        args.logdir = pathlib.Path("logs/image_classifier") / now
    check_settings(args, dataset)
    print(f"{dataset.name} from {dataset.source}: {dataset.train}")
    # From here on Ctrl-C waits for the end of a step: see SafeInterrupt for why.
    with train.SafeInterrupt() as interrupt:
        if args.tune:
            tune(args, dataset, interrupt)
            return []
        results = run_all(args, dataset, interrupt)
    print_table(results)
    figure = args.logdir / "learning_curves.png"
    draw_curves(results, figure)
    if args.record is not None:
        hidden = ("logdir", "record", "tune", "dataset")
        settings = {k: v for k, v in vars(args).items() if k not in hidden}
        write_records(results, dataset.name, settings, args.record)
    print(f"learning curves: {figure}; logs: tensorboard --logdir {args.logdir}")
    return results


def run_all(
    args: argparse.Namespace,
    dataset: data.NamedDataset,
    interrupt: train.SafeInterrupt,
) -> list[Result]:
    results = []
    for run in make_runs(args):
        with train.TensorBoardWriter(args.logdir / run.name[0]) as writer:
            settings = {**vars(args), **dataclasses.asdict(run)}
            rows = "\n".join(f"| {k} | {v} |" for k, v in settings.items())
            writer.text(0, "settings", f"| setting | value |\n|---|---|\n{rows}")
            writer.images(0, "samples", dataset.train.take(np.arange(16))["image"])
            results.append(
                train_once(
                    run, args, dataset, dataset.train, dataset.test, interrupt, writer
                )
            )
    return results


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print("interrupted: logs written so far are complete", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
