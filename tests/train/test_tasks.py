"""The adapters: linen and nnx modules as pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxaccel import train


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.5, deterministic=not train)(nn.relu(x))
        return nn.Dense(3)(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def batch_of(rng, n=32):
    return {
        "image": rng.standard_normal((n, 4)).astype(np.float32),
        "label": rng.integers(0, 3, n).astype(np.uint8),
    }


def linen_task():
    return train.from_linen(LinenNet(), train.classification_loss)


def nnx_task():
    return train.from_nnx(NnxNet(nnx.Rngs(0)), train.classification_loss)


TASKS = pytest.mark.parametrize("make", [linen_task, nnx_task], ids=["linen", "nnx"])


def statistics(model_state):
    """Batch statistics, whichever module system keeps them."""
    return sorted(
        (np.asarray(x) for x in jax.tree.leaves(model_state)), key=lambda x: x.sum()
    )


@TASKS
def test_training_learns_and_updates_statistics(make, rng, key):
    task, batch = make(), batch_of(rng)
    batch["label"] = (batch["image"].sum(-1) > 0).astype(np.uint8)
    tx = optax.adam(1e-2)
    params, model_state = task.init(key, batch)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    step = train.make_train_step(task.train_loss, tx)
    with jax.numpy_dtype_promotion("standard"), train.CompileCounter() as compiles:
        state, first = step(state, batch)
        for _ in range(60):
            state, metrics = step(state, batch)
    assert metrics["loss"] < 0.7 * first["loss"]
    assert metrics["accuracy"] > 0.8
    assert compiles.counts["train_step"] == 1
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(
            statistics(model_state), statistics(state.model_state), strict=True
        )
    ]
    assert len(changed) == 2 and all(changed)


@TASKS
def test_batch_statistics_follow_the_moving_average(make, rng, key):
    """One training pass moves the mean by (1 - momentum) of the batch's mean."""
    task, batch = make(), batch_of(rng)
    params, model_state = task.init(key, batch)
    _, (new_state, _) = task.train_loss(params, model_state, batch, key)
    dense = jax.tree.leaves(params)  # alphabetical: the first layer's are found below
    kernel = next(x for x in dense if x.shape == (4, 8))
    hidden = batch["image"].astype(np.float64) @ np.asarray(kernel, np.float64)
    got = statistics(new_state)
    want = sorted(
        [0.1 * hidden.mean(0), 0.9 + 0.1 * hidden.var(0)], key=lambda x: x.sum()
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@TASKS
def test_dropout_follows_the_key_in_training_only(make, rng, key):
    task, batch = make(), batch_of(rng)
    params, state = task.init(key, batch)
    keys = [jax.random.key(i) for i in (1, 1, 2)]
    a, b, c = (float(task.train_loss(params, state, batch, k)[0]) for k in keys)
    assert a == b != c
    a, _, c = (float(task.eval_loss(params, state, batch, k)[0]) for k in keys)
    assert a == c


@TASKS
def test_evaluation_leaves_the_state_alone(make, rng, key):
    task, batch = make(), batch_of(rng)
    params, state = task.init(key, batch)
    _, (after, _) = task.eval_loss(params, state, batch, key)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


@TASKS
def test_masked_examples_do_not_count(make, rng, key):
    task, batch = make(), batch_of(rng, 8)
    params, state = task.init(key, batch)
    poisoned = dict(batch, mask=np.arange(8) < 5)
    poisoned["image"] = np.where(poisoned["mask"][:, None], batch["image"], np.nan)
    head = {name: x[:5] for name, x in batch.items()}
    loss, (_, metrics) = task.eval_loss(params, state, poisoned, key)
    want, (_, want_metrics) = task.eval_loss(params, state, head, key)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(metrics["accuracy"], want_metrics["accuracy"])


def test_linen_merge_gives_variables(rng, key):
    batch, module = batch_of(rng), LinenNet()
    task = linen_task()
    params, state = task.init(key, batch)
    logits = module.apply(task.merge(params, state), batch["image"], train=False)
    losses, _ = train.classification_loss(jnp.asarray(logits), batch)
    loss, _ = task.eval_loss(params, state, batch, key)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)


def test_nnx_merge_gives_a_module_in_evaluation_mode(rng, key):
    batch = batch_of(rng)
    task = nnx_task()
    params, state = task.init()
    losses, _ = train.classification_loss(
        task.merge(params, state)(batch["image"]), batch
    )
    loss, _ = task.eval_loss(params, state, batch, key)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)


def test_nnx_module_itself_never_changes(rng, key):
    model, batch = NnxNet(nnx.Rngs(0)), batch_of(rng)
    before = jax.tree.map(np.array, nnx.state(model, (nnx.Param, nnx.BatchStat)))
    task = train.from_nnx(model, train.classification_loss)
    tx = optax.sgd(0.1)
    params, model_state = task.init()
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    train.make_train_step(task.train_loss, tx)(state, batch)
    after = nnx.state(model, (nnx.Param, nnx.BatchStat))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.drop.deterministic is False and not model.norm.use_running_average


def test_nnx_module_without_state_needs_no_model_state(rng, key):
    model = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    task, tx = train.from_nnx(model, train.classification_loss), optax.sgd(0.1)
    state = train.TrainState.create(task.init()[0], tx, key=key)
    state, _ = train.make_train_step(task.train_loss, tx)(state, batch_of(rng))
    assert int(state.step) == 1 and state.model_state == {}


def test_nnx_forgotten_model_state_is_explained(rng, key):
    task, tx = nnx_task(), optax.sgd(0.1)
    state = train.TrainState.create(task.init()[0], tx, key=key)
    with pytest.raises(TypeError, match="model_state has 0 arrays.* needs 2.*create"):
        train.make_train_step(task.train_loss, tx)(state, batch_of(rng))


def test_nnx_dropout_layers_draw_different_masks(key):
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.one, self.two = (nnx.Dropout(0.5, rngs=rngs) for _ in range(2))

        def __call__(self, x):
            return jnp.stack([self.one(x), self.two(x)], axis=1) * self.scale[...]

    def loss(outputs, batch):
        equal = (outputs[:, 0] == outputs[:, 1]).mean(axis=-1)
        return outputs.mean(axis=(1, 2)), {"equal": equal}

    task = train.from_nnx(Twice(nnx.Rngs(0)), loss)
    batch = {"image": jnp.ones((4, 1000))}
    _, (_, metrics) = task.train_loss(*task.init(), batch, key)
    assert 0.4 < metrics["equal"] < 0.6


def test_nnx_wrt_trains_a_part_only(rng, key):
    model, batch = NnxNet(nnx.Rngs(0)), batch_of(rng)
    head = nnx.All(nnx.Param, nnx.PathContains("last"))
    task = train.from_nnx(model, train.classification_loss, wrt=head)
    params, model_state = task.init()
    assert {x.shape for x in jax.tree.leaves(params)} == {(8, 3), (3,)}
    tx = optax.sgd(0.1)
    state = train.TrainState.create(params, tx, key=key, model_state=model_state)
    state, _ = train.make_train_step(task.train_loss, tx)(state, batch)
    trained = task.merge(state.params, state.model_state)
    np.testing.assert_array_equal(trained.first.kernel[...], model.first.kernel[...])
    assert not np.array_equal(trained.last.kernel[...], model.last.kernel[...])


def test_linen_with_deterministic_keyword_and_several_inputs(key):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, a, b, deterministic):
            return nn.Dropout(0.5)(a + b, deterministic=deterministic) * self.param(
                "scale", nn.initializers.ones, ()
            )

    task = train.from_linen(
        Net(),
        lambda outputs, batch: outputs.mean(-1),
        inputs=lambda batch: (batch["a"], batch["b"]),
    )
    batch = {"a": jnp.ones((2, 64)), "b": jnp.ones((2, 64))}
    params, state = task.init(key, batch)
    assert task.eval_loss(params, state, batch, key)[0] == 2.0
    assert task.train_loss(params, state, batch, key)[0] != 2.0


def test_adapters_explain_wrong_models(rng, key):
    with pytest.raises(TypeError, match="from_linen takes linen"):
        train.from_nnx(nn.Dense(3), train.classification_loss)
    with pytest.raises(TypeError, match="from_nnx takes nnx"):
        train.from_linen(NnxNet(nnx.Rngs(0)), train.classification_loss)
    with pytest.raises(TypeError, match="no argument 'train'.*inputs"):
        train.from_linen(nn.Dense(3), train.classification_loss, train_kwarg="train")
    with pytest.raises(ValueError, match="selects no variable"):
        train.from_nnx(
            NnxNet(nnx.Rngs(0)), train.classification_loss, wrt=nnx.LoRAParam
        )
    task = train.from_linen(nn.Dense(3), train.classification_loss, inputs="pixels")
    with pytest.raises(ValueError, match="no 'pixels'; it holds .*'image'"):
        task.init(key, batch_of(rng))


def test_a_mean_loss_with_a_mask_is_refused(key):
    task = train.from_nnx(
        nnx.Linear(2, 2, rngs=nnx.Rngs(0)), lambda outputs, batch: outputs.mean()
    )
    batch = {"image": jnp.ones((4, 2))}
    assert jnp.isfinite(task.eval_loss(*task.init(), batch, key)[0])
    with pytest.raises(ValueError, match="one value an example"):
        task.eval_loss(*task.init(), batch | {"mask": jnp.ones(4, bool)}, key)


def test_classification_loss_against_float64(rng):
    logits = rng.standard_normal((6, 5)).astype(np.float32) * 10
    labels = rng.integers(0, 5, 6).astype(np.uint8)
    z = logits.astype(np.float64)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    for smoothing in (0.0, 0.1):
        target = np.eye(5)[labels] * (1 - smoothing) + smoothing / 5
        losses, metrics = train.classification_loss(
            jnp.asarray(logits), {"label": labels}, label_smoothing=smoothing
        )
        np.testing.assert_allclose(losses, -(target * log_p).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(metrics["accuracy"], z.argmax(-1) == labels)


def test_classification_loss_checks_labels():
    logits = jnp.zeros((4, 3))
    with pytest.raises(ValueError, match=r"\(4, 3\) and \(3,\)"):
        train.classification_loss(logits, {"label": jnp.zeros(3, jnp.int32)})
    with pytest.raises(TypeError, match="integer dtype, not float32"):
        train.classification_loss(logits, {"label": jnp.zeros(4)})


def test_classification_loss_of_soft_labels(rng):
    logits = rng.standard_normal((6, 5)).astype(np.float32) * 10
    soft = rng.dirichlet(np.ones(5), 6).astype(np.float32)
    z = logits.astype(np.float64)
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    for smoothing in (0.0, 0.1):
        target = soft * (1 - smoothing) + smoothing / 5
        losses, metrics = train.classification_loss(
            jnp.asarray(logits), {"label": soft}, label_smoothing=smoothing
        )
        np.testing.assert_allclose(losses, -(target * log_p).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(metrics["accuracy"], z.argmax(-1) == soft.argmax(-1))
    hard = rng.integers(0, 5, 6).astype(np.uint8)
    as_soft = jnp.asarray(np.eye(5, dtype=np.float32)[hard])
    for got, wanted in zip(
        jax.tree.leaves(
            train.classification_loss(jnp.asarray(logits), {"label": as_soft})
        ),
        jax.tree.leaves(
            train.classification_loss(jnp.asarray(logits), {"label": hard})
        ),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)
    with pytest.raises(ValueError, match=r"soft labels .*\(6, 5\) and \(6, 4\)"):
        train.classification_loss(jnp.asarray(logits), {"label": soft[:, :4]})


def test_a_masked_label_that_is_no_class_leaves_the_gradient_alone():
    soft = jnp.array([[1.0, 0.0], [jnp.nan, jnp.nan]])
    for label in (soft, jnp.array([0, 2], jnp.uint8)):
        batch = {"label": label, "mask": jnp.array([True, False])}

        def loss(logits, batch=batch):
            losses, _ = train.classification_loss(logits, batch)
            assert losses.shape == (2,)
            return train.masked_mean(losses, batch)

        gradient = jax.grad(loss)(jnp.zeros((2, 2)))
        np.testing.assert_allclose(gradient, [[-0.5, 0.5], [0, 0]])
        losses, _ = train.classification_loss(jnp.zeros((2, 2)), batch)
        assert np.isnan(losses).tolist() == [False, True]
