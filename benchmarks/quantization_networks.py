"""Networks of the quantization benchmark: trained once, then read from a cache."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxaccel import data, quant, train

EVAL_BATCH = 1000
CALIBRATION = 512


@dataclasses.dataclass(frozen=True)
class Problem:
    """A data set, the network for it, and how it is trained."""

    dataset: str
    features: tuple[int, ...]
    strides: tuple[int, ...]
    pooled: tuple[bool, ...]
    hidden: tuple[int, ...]
    epochs: int
    batch_size: int
    learning_rate: float


PROBLEMS = {
    # Three convolutions, two max-pools, two dense layers: 40,000 parameters.
    "digits": Problem(
        "digits",
        (16, 32, 64),
        (1, 1, 1),
        (False, True, True),
        (64,),
        epochs=30,
        batch_size=64,
        learning_rate=2e-3,
    ),
    # The network of examples/trainers/image_classifier.py.
    "fashion_mnist": Problem(
        "fashion_mnist",
        (16, 32, 64),
        (2, 2, 2),
        (False, False, False),
        (),
        epochs=4,
        batch_size=128,
        learning_rate=3e-3,
    ),
}


class ConvNet(nnx.Module):
    """Convolutions with batch norm and ReLU, maximum pools, dense layers."""

    def __init__(
        self,
        image_shape: Sequence[int],
        classes: int,
        features: Sequence[int],
        strides: Sequence[int],
        pooled: Sequence[bool],
        hidden: Sequence[int],
        *,
        rngs: nnx.Rngs,
    ):
        height, width, channels = image_shape
        self.pooled = tuple(pooled)
        self.convs, self.norms = nnx.List([]), nnx.List([])
        for outputs, stride, pool in zip(features, strides, pooled, strict=True):
            conv = nnx.Conv(
                channels, outputs, (3, 3), strides=stride, use_bias=False, rngs=rngs
            )
            self.convs.append(conv)
            self.norms.append(nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs))
            by = stride * (2 if pool else 1)
            height, width, channels = -(-height // by), -(-width // by), outputs
        sizes = (height * width * channels, *hidden, classes)
        self.dense = nnx.List(
            [
                nnx.Linear(inputs, outputs, rngs=rngs)
                for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True)
            ]
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of normalized images."""
        x = images
        for conv, norm, pool in zip(self.convs, self.norms, self.pooled, strict=True):
            x = nnx.relu(norm(conv(x)))
            if pool:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for layer in list(self.dense)[:-1]:
            x = nnx.relu(layer(x))
        return self.dense[-1](x)


@functools.cache
def load(name: str) -> data.NamedDataset:
    return data.load_dataset(PROBLEMS[name].dataset)


@functools.cache
def split(name: str, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of `"train"` or `"test"`."""
    store = getattr(load(name), part)
    batch = store.take(np.arange(len(store)))
    return np.asarray(batch["image"]), np.asarray(batch["label"])


def normalizer(name: str) -> Callable[[Any], jax.Array]:
    """One mean and one deviation, as the main job has them."""
    dataset = load(name)
    return data.make_normalizer(dataset.mean, dataset.std)


def create(name: str, seed: int) -> ConvNet:
    problem, dataset = PROBLEMS[name], load(name)
    return ConvNet(
        dataset.train.spec["image"].shape,
        len(dataset.classes),
        problem.features,
        problem.strides,
        problem.pooled,
        problem.hidden,
        rngs=nnx.Rngs(seed),
    )


def trained(name: str, seed: int, cache: pathlib.Path) -> ConvNet:
    """The network in evaluation mode, from the cache where it was trained before."""
    model, problem = create(name, seed), PROBLEMS[name]
    path = cache / f"{name}_{seed}.npz"
    state = nnx.state(model, (nnx.Param, nnx.BatchStat))
    leaves, structure = jax.tree.flatten(state)
    if not path.exists():
        fitted = fit(
            model, name, problem.epochs, problem.learning_rate, problem.batch_size, seed
        )
        state = nnx.state(fitted, (nnx.Param, nnx.BatchStat))
        leaves = jax.tree.leaves(jax.device_get(state))
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(path, *leaves)
    with np.load(path) as stored:
        values = [jnp.asarray(stored[f"arr_{i}"]) for i in range(len(leaves))]
    nnx.update(model, jax.tree.unflatten(structure, values))
    model.eval()
    return model


def fit(
    model: Any, name: str, epochs: int, learning_rate: float, batch: int, seed: int
) -> Any:
    """Trains a model, quantized or not: the same step, the same loss."""
    store = load(name).train
    plan = data.BatchPlan(len(store), batch, seed=seed, epochs=epochs)
    normalize = normalizer(name)
    tx = optax.adam(optax.cosine_decay_schedule(learning_rate, len(plan)))
    task = train.from_nnx(model, train.classification_loss)
    params, model_state = task.init()
    state = train.TrainState.create(
        params, tx, key=jax.random.key(seed), model_state=model_state
    )
    step = train.make_train_step(
        task.train_loss,
        tx,
        preprocess=lambda b, key: {**b, "image": normalize(b["image"])},
    )
    with data.DeviceDataset(store).batches(plan) as batches:
        for rows in batches:
            state, _ = step(state, rows)
    return task.merge(state.params, state.model_state)


def fold(model: ConvNet) -> Any:
    """The same function without batch normalization."""
    pairs = [(f"convs/{i}", f"norms/{i}") for i in range(len(model.convs))]
    return quant.fold_batch_norms(model, pairs)


def calibration(name: str) -> np.ndarray:
    """Normalized training images that ranges are found on."""
    images = split(name, "train")[0][:CALIBRATION]
    return np.asarray(normalizer(name)(images))


def logits(model: Any, name: str) -> np.ndarray:
    """Of all test images."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state: Any, images: Any) -> jax.Array:
        return nnx.merge(graph, state)(normalizer(name)(images))

    images = split(name, "test")[0]
    parts = [
        np.asarray(run(state, images[i : i + EVAL_BATCH]))
        for i in range(0, len(images), EVAL_BATCH)
    ]
    return np.concatenate(parts)


def accuracy(outputs: np.ndarray, name: str) -> float:
    """Of logits or codes, in percent."""
    return 100 * float((outputs.argmax(-1) == split(name, "test")[1]).mean())


# ------------------------------------------------------------------ chains of layers


def chain(model: ConvNet) -> tuple[list[Any], list[Any]]:
    """Kernels and biases of a folded network, in order, as variables."""
    convs, dense = list(model.convs), list(model.dense)
    kernels = [layer.kernel for layer in convs + dense]
    biases = [norm.bias for norm in model.norms] + [layer.bias for layer in dense]
    return kernels, biases


def equalized(folded: ConvNet) -> Any:
    result = nnx.clone(folded)
    kernels, biases = chain(result)
    new_kernels, new_biases = quant.cross_layer_equalize(
        [kernel[...] for kernel in kernels], [bias[...] for bias in biases]
    )
    for variable, value in zip(kernels + biases, new_kernels + new_biases, strict=True):
        variable[...] = value
    return result


def rescaled(folded: ConvNet, seed: int) -> Any:
    """The same function with channels scaled by 2^U(-4, 4) between layers."""
    result, rng = nnx.clone(folded), np.random.default_rng(seed)
    kernels, biases = chain(result)
    for i in range(len(kernels) - 1):
        channels = kernels[i].shape[-1]
        factor = (2.0 ** rng.uniform(-4, 4, channels)).astype(np.float32)
        kernels[i][...] = kernels[i][...] * factor.reshape(
            (1,) * (kernels[i].ndim - 1) + (-1,)
        )
        biases[i][...] = biases[i][...] * factor
        after = kernels[i + 1][...]
        by_channel = after.reshape(-1, channels, after.shape[-1])
        by_channel = by_channel / factor.reshape(1, -1, 1)
        kernels[i + 1][...] = by_channel.reshape(after.shape)
    return result


# ---------------------------------------------------------------- integer networks


def lower_trained(quantized: Any, name: str) -> quant.IntGraph:
    """The integer network of a calibrated one, from uint8 images to logits."""
    return lower(quantized, split(name, "train")[0][:CALIBRATION], normalizer(name))


def lower(
    quantized: Any, images: np.ndarray, normalize: Callable[[Any], Any]
) -> quant.IntGraph:
    """Lowers a quantized network together with what normalizes its images."""
    return quant.lower_integer(
        lambda x: quantized(normalize(x)), images[:1], calibration=[images]
    )
