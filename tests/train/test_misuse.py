"""Mistakes that would train or evaluate silently wrong, or end inside jax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxaccel import train


def mean_loss(params, model_state, batch, key):
    return params * jnp.mean(batch["x"]), (model_state, {})


def state_of(tx=None, **kwargs):
    tx = tx or optax.sgd(0.1)
    key = jax.random.key(0)
    return train.TrainState.create(jnp.ones(()), tx, key=key, **kwargs)


def test_evaluate_takes_iterables_that_reuse_their_buffer():
    buffer = np.zeros((128, 128), np.float32)

    def slow(params, model_state, batch, key):
        x = batch["x"]
        value = x.mean(axis=1)
        for _ in range(30):
            x = jnp.tanh(x @ x)
        return train.masked_mean(value + 0 * x[:, 0], batch), (model_state, {})

    def batches():
        for i in range(10):
            buffer[...] = i
            yield {"x": buffer}

    assert train.evaluate(train.make_eval_step(slow), state_of(), batches()) == {
        "loss": 4.5
    }


def test_a_loss_that_ignores_the_mask_is_refused():
    batch = {"x": np.ones(3, np.float32), "mask": np.ones(3, bool)}
    with pytest.raises(ValueError, match="does not look at it.*masked_mean"):
        train.evaluate(train.make_eval_step(mean_loss), state_of(), [batch])
    with pytest.raises(ValueError, match="does not look at it"):
        train.make_train_step(mean_loss, optax.sgd(0.1))(state_of(), batch)


def test_training_with_a_mask_leaves_padding_out(rng, key):
    """The gradient of a padded batch is that of its examples alone."""
    task = train.from_nnx(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), train.classification_loss)
    tx = optax.sgd(0.1)
    image = rng.standard_normal((8, 4)).astype(np.float32)
    batch = {"image": image, "label": rng.integers(0, 3, 8).astype(np.uint8)}
    padded = {**batch, "mask": np.arange(8) < 5}
    step, params = train.make_train_step(task.train_loss, tx), task.init()[0]
    got, _ = step(train.TrainState.create(params, tx, key=key), padded)
    head = {name: x[:5] for name, x in batch.items()}
    want, _ = step(train.TrainState.create(params, tx, key=key), head)
    for a, b in zip(
        jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("label", [-1, 3, 200])
def test_a_label_that_is_no_class_gives_nan(label):
    batch = {"label": jnp.array([0, label])}
    losses, metrics = train.classification_loss(jnp.zeros((2, 3)), batch)
    assert jnp.isfinite(losses[0]) and jnp.isnan(losses[1])
    assert metrics["accuracy"][1] == 0


def test_label_smoothing_is_a_share():
    batch = {"label": jnp.array([0])}
    with pytest.raises(ValueError, match="0 to 1; got 2"):
        train.classification_loss(jnp.zeros((1, 3)), batch, label_smoothing=2.0)


def test_a_state_of_another_transformation_is_explained():
    step = train.make_train_step(mean_loss, optax.adam(0.1))
    with pytest.raises(TypeError, match="one `tx` for TrainState.create"):
        step(state_of(optax.sgd(0.1)), {"x": np.ones(2, np.float32)})


def test_an_error_of_the_transformation_itself_passes():
    def update(updates, state, params=None, **extra):
        raise ZeroDivisionError("mine")

    tx = optax.GradientTransformationExtraArgs(lambda params: (), update)
    with pytest.raises(ZeroDivisionError, match="mine"):
        train.make_train_step(mean_loss, tx)(state_of(tx), {"x": np.ones(2)})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": [1.0, 2.0]}, "'x'.* is a list"),
        ({"x": {"y": np.ones(2)}}, "'x'.* is a dict"),
    ],
)
def test_batches_of_something_else(batch, message):
    with pytest.raises(TypeError, match=message):
        train.make_train_step(mean_loss, optax.sgd(0.1))(state_of(), batch)
    with pytest.raises(TypeError, match=message):
        train.evaluate(train.make_eval_step(mean_loss), state_of(), [batch])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("batch", [(np.ones(2),), {}])
def test_evaluate_explains_batches_that_are_no_dicts(batch):
    with pytest.raises(TypeError, match="batches that are dicts of arrays"):
        train.evaluate(train.make_eval_step(mean_loss), state_of(), [batch])


@pytest.mark.parametrize("returned", [None, np.ones(2), {}])
def test_preprocess_returns_the_batch(returned):
    step = train.make_train_step(
        mean_loss, optax.sgd(0.1), preprocess=lambda batch, key: returned
    )
    with pytest.raises(TypeError, match="preprocess must return the batch"):
        step(state_of(), {"x": np.ones(2, np.float32)})


def test_a_batch_without_examples():
    step = train.make_train_step(mean_loss, optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"no examples.*\(0, 2\)"):
        step(state_of(), {"x": np.ones((0, 2), np.float32)})


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("batches", [{"x": np.ones(2)}, 3])
def test_batches_are_an_iterable_of_batches(batches):
    with pytest.raises(TypeError, match=r"iterable of batches.*scan"):
        train.evaluate(train.make_eval_step(mean_loss), state_of(), batches)
    step = train.make_train_step(mean_loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"iterable of batches.*scan"):
        train.run(step, state_of(), batches)


@pytest.mark.usefixtures("unchecked")
def test_evaluate_takes_an_evaluation_step():
    step = train.make_train_step(mean_loss, optax.sgd(0.1))
    batch = {"x": np.ones(2, np.float32)}
    with pytest.raises(TypeError, match="build it by make_eval_step"):
        train.evaluate(lambda state, batch: {"loss": jnp.ones(())}, state_of(), [batch])
    with pytest.raises(ValueError, match="does not look at it"):
        train.evaluate(step, state_of(), [batch])


@pytest.mark.parametrize(
    ("value", "metrics", "message"),
    [
        (1, {}, "'loss' must be a floating number; got int"),
        (1.0, {"a": None}, "'a' must be a real scalar; got NoneType"),
        (1.0, {"a": {"b": jnp.ones(())}}, "'a' must be a real scalar; got dict"),
        (1j, {}, "'loss' must be a real scalar"),
    ],
)
def test_losses_and_metrics_are_real_scalars(value, metrics, message):
    def loss_fn(params, model_state, batch, key):
        return jnp.asarray(value), (model_state, metrics)

    step = train.make_eval_step(loss_fn)
    with pytest.raises(TypeError, match=message):
        step(state_of(), {"x": np.ones(2, np.float32)})


@pytest.mark.usefixtures("unchecked")
def test_states_of_something_else():
    with pytest.raises(TypeError, match="Optax transformation.*NoneType"):
        train.TrainState.create(
            jnp.ones(()),
            None,  # type: ignore[arg-type]
            key=jax.random.key(0),
        )
    with pytest.raises(TypeError, match=r"model_state\['name'\] is str"):
        state_of(model_state={"name": "net"})
    with pytest.raises(TypeError, match=r"\['w'\] is float, not an array"):
        train.TrainState.create({"w": 1.0}, optax.sgd(0.1), key=jax.random.key(0))
