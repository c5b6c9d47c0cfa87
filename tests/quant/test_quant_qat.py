"""Quantization-aware training as an option of the train step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxaccel import quant, train
from jaxaccel.quant import LayerRule, QuantSpec

DECAY = 0.99


class Linen(nn.Module):
    """Batch statistics and observers side by side."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train)(nn.Dense(8, name="first")(x))
        return nn.Dense(2, name="head")(nn.relu(x))


class Nnx(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(nnx.relu(self.norm(self.first(x))))


def _batch(rng, size=32):
    images = rng.normal(size=(size, 4)).astype(np.float32)
    return {"image": images, "label": (images.sum(axis=1) > 0).astype(np.int32)}


def _rule(**options):
    weight = QuantSpec(bits=3, symmetric=True, channel_axis=-1)
    return LayerRule(weight=weight, activation=QuantSpec(bits=4), **options)


def _start(task, batch, tx, **options):
    params, model_state = task.init(jax.random.key(0), batch)
    return train.TrainState.create(
        params, tx, key=jax.random.key(1), model_state=model_state, **options
    )


def _range(state):
    """Least, largest and count of what the first layer was given."""
    stats = state.model_state["first"]["dot_general"]["stats"]
    return [float(stats[i][...]) for i in range(3)]


def _averaged(batches):
    """Moving averages of each batch's ends, as they were given."""
    lo, hi = batches[0].min(), batches[0].max()
    for x in batches[1:]:
        lo += (1 - DECAY) * (x.min() - lo)
        hi += (1 - DECAY) * (x.max() - hi)
    return lo, hi


@pytest.mark.parametrize("accumulate", [1, 2])
def test_observers_see_each_micro_batch(accumulate, rng):
    task = train.from_nnx(
        quant.attach(Nnx(nnx.Rngs(0)), _rule()), train.classification_loss
    )
    tx, batches = optax.sgd(0.1), [_batch(rng) for _ in range(3)]
    state = _start(task, batches[0], tx)
    step = train.make_train_step(task.train_loss, tx, accumulate=accumulate)
    for batch in batches:
        state, _ = step(state, batch)
    images = np.concatenate([batch["image"] for batch in batches])
    parts = np.split(images, 3 * accumulate)
    lo, hi, count = _range(state)
    assert count == 3 * accumulate
    if accumulate == 1:
        np.testing.assert_allclose((lo, hi), _averaged(parts), rtol=1e-5)
    else:
        # How a batch is split is the step's own matter.
        assert images.min() <= lo <= -1 and 1 <= hi <= images.max()


def test_a_step_that_is_skipped_leaves_the_observers(rng):
    task = train.from_nnx(
        quant.attach(Nnx(nnx.Rngs(0)), _rule()), train.classification_loss
    )
    tx, batch = optax.sgd(0.1), _batch(rng)
    state = _start(task, batch, tx, finite_guard=True)
    step = train.make_train_step(task.train_loss, tx, finite_guard=True)
    state, _ = step(state, batch)
    before = jax.tree.map(np.array, (state.params, state.model_state))
    bad = {**batch, "image": batch["image"] + np.float32(np.nan)}
    state, _ = step(state, bad)
    after = jax.tree.map(np.array, (state.params, state.model_state))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"]) and _range(state)[2] == 2


def test_evaluation_uses_frozen_ranges(rng):
    task = train.from_nnx(
        quant.attach(Nnx(nnx.Rngs(0)), _rule()), train.classification_loss
    )
    params, model_state = task.init()
    batch, key = _batch(rng), jax.random.key(0)
    _, (model_state, _) = task.train_loss(params, model_state, batch, key)
    large = {**batch, "image": 1000 * np.sign(batch["image"])}
    _, (after, _) = task.eval_loss(params, model_state, large, key)
    jax.tree.map(np.testing.assert_array_equal, after, model_state)
    # Beyond the range all numbers are its ends.
    final = task.merge(params, model_state)
    np.testing.assert_array_equal(final(large["image"]), final(2 * large["image"]))


@pytest.mark.parametrize("learned", [False, True], ids=["minmax", "lsq"])
def test_linen_and_nnx_train_alike(learned, rng):
    rule, tx = _rule(learned=learned), optax.sgd(0.05, momentum=0.9)
    batches = [_batch(rng, 64) for _ in range(12)]
    linen = train.from_linen(
        Linen(), train.classification_loss, mutable=("batch_stats", "quant_stats")
    )
    with quant.fake_quantize(rule):
        state: Any = _start(linen, batches[0], tx)
        start = jax.tree.map(np.array, state.params)
        assert set(state.model_state) == {"batch_stats", "quant_stats"}
        step = train.make_train_step(linen.train_loss, tx)
        losses = []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    model = Nnx(nnx.Rngs(0))
    for name in ("first", "head"):
        getattr(model, name).kernel[...] = start[name]["kernel"]
    task = train.from_nnx(quant.attach(model, rule), train.classification_loss)
    other = _start(task, batches[0], tx)
    step = train.make_train_step(task.train_loss, tx)
    for batch, loss in zip(batches, losses, strict=True):
        other, metrics = step(other, batch)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-3)
    assert losses[-1] < 0.9 * losses[0]
    found = other.params["first"]["kernel"][...]
    np.testing.assert_allclose(found, state.params["first"]["kernel"], atol=1e-3)
    if learned:
        scale = state.params["first"]["kernel_scale"]
        # A unit that ReLU silences for every example has no gradient.
        assert (scale != start["first"]["kernel_scale"]).mean() > 0.5
        stats = other.params["first"]["dot_general"]["scale"][...]
        np.testing.assert_allclose(stats, scale, rtol=1e-3)


# Digits: which accuracies are left at few bits.


class Digits(nnx.Module):
    """Three convolutions with batch normalization, two dense layers."""

    def __init__(self, rngs):
        widths = (1, 16, 32, 64)
        self.convs = nnx.List(
            nnx.Conv(a, b, (3, 3), rngs=rngs)
            for a, b in zip(widths, widths[1:], strict=False)
        )
        self.norms = nnx.List(nnx.BatchNorm(b, rngs=rngs) for b in widths[1:])
        self.dense = nnx.Linear(256, 64, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            x = nnx.relu(norm(conv(x)))
            x = nnx.max_pool(x, (2, 2), (2, 2)) if i else x
        return self.head(nnx.relu(self.dense(x.reshape(x.shape[0], -1))))


def _digits():
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)[order]
    labels = labels.astype(np.int32)[order]
    return (images[:1257], labels[:1257]), (images[1257:], labels[1257:])


def _train(model, images, labels, epochs):
    task = train.from_nnx(model, train.classification_loss)
    steps = epochs * (len(labels) // 64)
    tx = optax.adam(optax.cosine_decay_schedule(1e-3, steps))
    state = _start(task, None, tx, finite_guard=True)
    step = train.make_train_step(task.train_loss, tx, finite_guard=True, accumulate=2)
    rng = np.random.default_rng(1)
    for i in range(steps):
        if i % (len(labels) // 64) == 0:
            order = rng.permutation(len(labels))
        rows = order[64 * (i % (len(labels) // 64)) :][:64]  # pyright: ignore
        state, _ = step(state, {"image": images[rows], "label": labels[rows]})
    return task.merge(state.params, state.model_state)


def _accuracy(model, images, labels):
    logits = nnx.jit(lambda model, x: model(x))(model, jnp.asarray(images))
    return 100 * float((np.asarray(logits).argmax(axis=1) == labels).mean())


def _w(bits):
    return QuantSpec(bits=bits, symmetric=True, narrow_range=True, channel_axis=-1)


# Adam and the schedule promote dtypes themselves.
@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")
def test_digits_after_and_during_training():
    (images, labels), test = _digits()
    trained = _train(Digits(nnx.Rngs(0)), images, labels, epochs=15)
    pairs = [(f"convs/{i}", f"norms/{i}") for i in range(3)]
    model = quant.fold_batch_norms(trained, pairs)
    base = _accuracy(model, *test)
    assert base == _accuracy(trained, *test) and base > 97.5

    def ready(rule):
        return quant.calibrate(quant.attach(model, rule), [images[:512]])

    def tuned(rule):
        watched = ready(rule)
        watched.train()
        return _accuracy(_train(watched, images, labels, epochs=8), *test)

    rules = {
        name: LayerRule(_w(w), QuantSpec(bits=a), observer=observer)
        for name, w, a, observer in (
            ("W8A8", 8, 8, quant.minmax),
            ("W4A4", 4, 4, quant.ema_minmax),
            ("W2A8", 2, 8, quant.ema_minmax),
        )
    }
    after = {name: _accuracy(ready(rule), *test) for name, rule in rules.items()}
    during = {name: tuned(rules[name]) for name in ("W4A4", "W2A8")}
    print(f"float {base:.2f}, PTQ {after}, QAT {during}")
    assert base - after["W8A8"] <= 0.75
    assert base - during["W4A4"] <= 1.0
    assert after["W2A8"] < 85 and during["W2A8"] >= 95
