"""Evaluation: exact means for any batch size, one compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxaccel import train


def loss_fn(params, model_state, batch, key):
    metrics = {"square": train.masked_mean(batch["x"] ** 2, batch)}
    return train.masked_mean(batch["x"], batch), (model_state, metrics)


EVAL_STEP = train.make_eval_step(loss_fn)


def state_of():
    return train.TrainState.create(jnp.ones(()), optax.sgd(0.1), key=jax.random.key(0))


def batches_of(x, size):
    return [{"x": x[i : i + size]} for i in range(0, len(x), size)]


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 2**31))
def test_means_do_not_depend_on_the_batch_size(n, size, seed):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    got = train.evaluate(EVAL_STEP, state_of(), batches_of(x, size))
    assert got["loss"] == pytest.approx(x.astype(np.float64).mean(), abs=1e-6)
    assert got["square"] == pytest.approx((x.astype(np.float64) ** 2).mean(), rel=1e-5)


def test_a_partial_batch_compiles_nothing_new():
    x = np.arange(23, dtype=np.float32)
    step = train.make_eval_step(loss_fn)
    with train.CompileCounter() as compiles:
        for batches in (batches_of(x, 5), batches_of(jnp.asarray(x), 5)):
            assert train.evaluate(step, state_of(), batches)["loss"] == 11.0
    assert compiles.counts["eval_step"] == 1


def test_given_masks_are_kept():
    x = np.arange(6, dtype=np.float32)
    mask = np.array([1, 1, 0, 1, 0, 0], bool)
    batches = [{"x": x[i : i + 3], "mask": mask[i : i + 3]} for i in (0, 3)]
    got = train.evaluate(EVAL_STEP, state_of(), batches)
    assert got["loss"] == pytest.approx(x[mask].mean())


def test_host_batches_are_no_implicit_transfers():
    x = np.arange(5, dtype=np.float32)
    state = state_of()
    with jax.transfer_guard("disallow"):
        got = train.evaluate(EVAL_STEP, state, batches_of(x, 3))
    assert got["loss"] == 2.0


def test_preprocess_sees_a_fixed_key():
    def preprocess(batch, key):
        return {**batch, "x": batch["x"] + jax.random.uniform(key)}

    step = train.make_eval_step(loss_fn, preprocess=preprocess)
    batches = batches_of(np.zeros(8, np.float32), 4)
    first = train.evaluate(step, state_of(), batches)
    assert first == train.evaluate(step, state_of(), batches)
    assert first["square"] == pytest.approx(first["loss"] ** 2)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no batches"),
        ([{"x": np.ones(2, np.float32), "mask": np.zeros(2, bool)}], "masked"),
        (
            [{"x": np.ones(n, np.float32)} for n in (2, 3)],
            "batch of 3 .* first one of 2",
        ),
    ],
)
def test_nothing_to_average_is_an_error(batches, message):
    with pytest.raises(ValueError, match=message):
        train.evaluate(EVAL_STEP, state_of(), batches)
