"""One run of the transformations' study: network, optimizer, training."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import study_data
from flax import nnx
from study_runs import Outcome, Spec

from jaxaccel import data, train, transforms

MOMENTUM, WEIGHT_DECAY = 0.9, 1e-2
CROP_PAD = 2
EVAL_BATCH_SIZE = 1000


@dataclasses.dataclass(frozen=True)
class Transform:
    """A contender: a function of `jaxaccel.transforms`, or None for none at all."""

    function: str | None
    arguments: dict[str, Any]
    starts: dict[str, float]
    """Where on the grid the search for the learning rate begins, by optimizer."""

    @property
    def call(self) -> str:
        """The call as one writes it."""
        arguments = ", ".join(f"{k}={v!r}" for k, v in self.arguments.items())
        return f"{self.function}({arguments})" if self.function else "none"

    @property
    def exported(self) -> bool:
        """Whether this version of the library has it."""
        return self.function is None or self.function in transforms.__all__

    def build(self) -> optax.GradientTransformation:
        """Makes the transformation."""
        if self.function is None:
            return optax.identity()
        return getattr(transforms, self.function)(**self.arguments)


_USUAL = {"sgd": 0.1, "adamw": 3e-3}
_UNIT_SIZE = {"sgd": 1e-3, "adamw": 3e-3}
BASELINE = "none"
TRANSFORMS = {
    BASELINE: Transform(None, {}, _USUAL),
    "znorm": Transform("znorm", {}, _UNIT_SIZE),
    "centralize": Transform("centralize_gradients", {}, _USUAL),
    "clip_by_global_norm": Transform("clip_by_global_norm", {"max_norm": 1.0}, _USUAL),
    "znorm_unit": Transform("znorm", {"scope": "unit"}, _UNIT_SIZE),
    "adaptive_grad_clip": Transform("adaptive_grad_clip", {"clipping": 0.01}, _USUAL),
    "zclip": Transform("zclip", {}, _USUAL),
    "adagc": Transform("adagc", {"max_norm": 1.0}, _USUAL),
    "autoclip": Transform("autoclip", {}, _USUAL),
    "grokfast_ema": Transform("grokfast_ema", {}, _USUAL),
}
NETWORKS = {"residual": True, "plain": False}
OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.trace(MOMENTUM),
    # Decoupled decay: it must not pass through the transformation.
    "adamw": lambda: optax.chain(
        optax.scale_by_adam(), optax.add_decayed_weights(WEIGHT_DECAY)
    ),
}


# ------------------------------------------------------------------------- network


class Block(nnx.Module):
    """Two 3x3 convolutions with batch norm, with or without a skip connection."""

    def __init__(
        self, inputs: int, features: int, stride: int, skip: bool, *, rngs: nnx.Rngs
    ):
        self.convs, self.norms = nnx.List([]), nnx.List([])
        for channels, strides in ((inputs, stride), (features, 1)):
            self.convs.append(_conv(channels, features, 3, strides, rngs))
            self.norms.append(_norm(features, rngs))
        self.skip = skip
        projects = skip and (stride != 1 or inputs != features)
        self.projection = _conv(inputs, features, 1, stride, rngs) if projects else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the activations after the block."""
        y = nnx.relu(self.norms[0](self.convs[0](x)))
        y = self.norms[1](self.convs[1](y))
        if self.skip:
            y = y + (x if self.projection is None else self.projection(x))
        return nnx.relu(y)


class ResNet(nnx.Module):
    """A strided stem, `blocks` residual blocks a width, mean pooling, linear head."""

    def __init__(
        self,
        channels: int,
        widths: tuple[int, ...],
        blocks: int,
        skip: bool,
        *,
        rngs: nnx.Rngs,
    ):
        self.stem = _conv(channels, widths[0], 3, 2, rngs)
        self.norm = _norm(widths[0], rngs)
        self.blocks = nnx.List([])
        inputs = widths[0]
        for stage, width in enumerate(widths):
            for number in range(blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                self.blocks.append(Block(inputs, width, stride, skip, rngs=rngs))
                inputs = width
        self.head = nnx.Linear(inputs, study_data.CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of normalized images."""
        x = nnx.relu(self.norm(self.stem(images)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))


def _conv(inputs: int, features: int, size: int, stride: int, rngs: nnx.Rngs):
    return nnx.Conv(
        inputs, features, (size, size), strides=stride, use_bias=False, rngs=rngs
    )


def _norm(features: int, rngs: nnx.Rngs):
    # Flax's default momentum of 0.99 is still warming up after 100 steps.
    return nnx.BatchNorm(features, momentum=0.9, rngs=rngs)


# ------------------------------------------------------------------------- training


class Bench(NamedTuple):
    """What all runs of a data set and a network share."""

    sets: dict[str, data.DeviceDataset]
    create: Callable[[jax.Array], nnx.Module]
    normalize: Callable[[Any], jax.Array]
    eval_step: Any


def train_once(spec: Spec) -> Outcome:
    """Trains from the seed; evaluates after every epoch, tests at the end."""
    start = time.perf_counter()
    bench = _bench(spec)
    plan = data.BatchPlan(
        spec.train_images, spec.batch_size, seed=spec.seed, epochs=spec.epochs
    )
    step = _training_step(spec)
    state = initial_state(spec, bench, optimizer(spec, len(plan)))
    accuracies, losses, seconds, cpu = [], [], [], []
    with bench.sets["train"].batches(plan) as batches:
        for _ in range(spec.epochs):
            wall_clock, cpu_clock = time.perf_counter(), time.process_time()
            epoch = []
            for _ in range(plan.steps_per_epoch):
                state, metrics = step(state, next(batches))
                epoch.append(metrics["loss"])
            loss = float(np.mean(jax.device_get(epoch)))
            seconds.append(round(time.perf_counter() - wall_clock, 3))
            cpu.append(round(time.process_time() - cpu_clock, 3))
            losses.append(round(loss, 5) if math.isfinite(loss) else None)
            accuracies.append(accuracy(bench, state, "validation"))
            if losses[-1] is None:
                break
    return Outcome(
        validation_accuracies=accuracies,
        losses=losses,
        test_accuracy=accuracy(bench, state, "test") if spec.phase == "final" else None,
        seconds=seconds,
        cpu_seconds=cpu,
        wall_seconds=round(time.perf_counter() - start, 3),
        jax=jax.__version__,
    )


def accuracy(bench: Bench, state: train.TrainState, split: str) -> float:
    dataset = bench.sets[split]
    size = min(EVAL_BATCH_SIZE, len(dataset))
    plan = data.BatchPlan(len(dataset), size, epochs=1, shuffle=False, remainder="pad")
    # Without the optimizer's state all transformations share one compilation.
    bare = state.replace(opt_state={})
    with dataset.batches(plan) as batches:
        return round(train.evaluate(bench.eval_step, bare, batches)["accuracy"], 6)


def initial_state(
    spec: Spec, bench: Bench, tx: optax.GradientTransformation
) -> train.TrainState:
    task = train.from_nnx(
        bench.create(jax.random.key(spec.seed)), train.classification_loss
    )
    params, model_state = task.init()
    return train.TrainState.create(
        params, tx, key=jax.random.key(spec.seed), model_state=model_state
    )


def optimizer(spec: Spec, steps: int) -> optax.GradientTransformation:
    """Transformation, then optimizer, then a cosine decay from the learning rate.

    The learning rate is kept in the state, so that all rates share a compiled step.
    """
    return optax.chain(
        TRANSFORMS[spec.transform].build(),
        OPTIMIZERS[spec.optimizer](),
        optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, steps)),
        optax.inject_hyperparams(optax.scale)(step_size=-spec.learning_rate),
    )


def _training_step(spec: Spec) -> Any:
    return _cached_step(dataclasses.replace(spec, phase="", learning_rate=1.0, seed=0))


@functools.lru_cache(maxsize=16)
def _cached_step(spec: Spec) -> Any:
    """The step of all runs that differ in learning rate and seed only, compiled."""
    bench = _bench(spec)
    plan = data.BatchPlan(spec.train_images, spec.batch_size, epochs=spec.epochs)
    tx = optimizer(spec, len(plan))
    task = train.from_nnx(bench.create(jax.random.key(0)), train.classification_loss)

    def preprocess(batch, key):
        images = data.random_crop_flip(key, batch["image"], pad=CROP_PAD)
        return {**batch, "image": bench.normalize(images)}

    step = train.make_train_step(task.train_loss, tx, preprocess=preprocess)
    with bench.sets["train"].batches(plan) as batches:
        jax.block_until_ready(step(initial_state(spec, bench, tx), next(batches)))
    return step


def _bench(spec: Spec) -> Bench:
    sizes = spec.train_images, spec.validation_images, spec.test_images
    return _cached_bench(spec.dataset, sizes, spec.network, spec.widths, spec.blocks)


@functools.lru_cache(maxsize=4)
def _cached_bench(
    dataset: str,
    sizes: tuple[int, int, int],
    network: str,
    widths: tuple[int, ...],
    blocks: int,
) -> Bench:
    splits = study_data.load(dataset, *sizes)
    sets = {
        name: data.DeviceDataset(getattr(splits, name))
        for name in ("train", "validation", "test")
    }
    normalize = data.make_normalizer(splits.mean, splits.std)

    @nnx.jit
    def create(key):
        channels, skip = len(splits.mean), NETWORKS[network]
        return ResNet(channels, widths, blocks, skip, rngs=nnx.Rngs(key))

    def preprocess(batch, key):
        del key
        return {**batch, "image": normalize(batch["image"])}

    task = train.from_nnx(create(jax.random.key(0)), train.classification_loss)
    step = train.make_eval_step(task.eval_loss, preprocess=preprocess)
    return Bench(sets, create, normalize, step)
