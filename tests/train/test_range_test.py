"""The learning-rate range test against the same steps in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxaccel import train

CURVATURES = np.array([1.0, 10.0])


def loss_fn(params, model_state, batch, key):
    return jnp.sum(batch["a"] * params["w"] ** 2) / 2, (model_state, {})


def batches(n):
    return [{"a": jnp.asarray(CURVATURES, jnp.float32)}] * n


def search(make_tx=optax.sgd, steps=40, n=60, **options):
    arguments = {"key": jax.random.key(0), "low": 1e-4, "high": 10.0, "smoothing": 0.0}
    params = {"w": jnp.ones(2)}
    found = train.learning_rate_range_test(
        loss_fn, make_tx, params, batches(n), steps=steps, **{**arguments, **options}
    )
    assert not params["w"].is_deleted()
    return found


def by_hand(steps=40, low=1e-4, high=10.0):
    rates, losses, w = low * (high / low) ** (np.arange(steps) / (steps - 1)), [], 1.0
    for rate in rates:
        losses.append(np.sum(CURVATURES * w**2) / 2)
        w = w * (1 - rate * CURVATURES)
    return rates, np.array(losses)


def test_rates_losses_and_suggestion_on_a_quadratic():
    found, (rates, losses) = search(), by_hand()
    n = len(found.losses)
    assert found.diverged and n < 40
    np.testing.assert_allclose(found.learning_rates, rates[:n], rtol=1e-12)
    np.testing.assert_allclose(found.losses, losses[:n], rtol=1e-4)
    np.testing.assert_array_equal(found.smoothed, found.losses)
    # The step after the last one is the first beyond five times the first loss.
    assert losses[n] > losses[:n].min() + 4 * losses[0] >= losses[n - 1]
    fall = np.diff(losses[:n])
    assert found.suggestion in rates[[fall.argmin(), fall.argmin() + 1]]
    # Stable for the largest curvature.
    assert found.suggestion < 2 / CURVATURES.max()


def test_smoothing_is_a_corrected_average():
    found = search(smoothing=0.8, steps=12, high=1e-2)
    weights = 0.8 ** np.arange(12)[::-1]
    want = [
        np.average(found.losses[: n + 1], weights=weights[-n - 1 :]) for n in range(12)
    ]
    np.testing.assert_allclose(found.smoothed, want, rtol=1e-12)
    assert not found.diverged and len(found.losses) == 12


def test_options_reach_the_step_and_a_rising_loss_suggests_nothing():
    ascend = lambda rate: optax.chain(optax.sgd(rate), optax.scale(-1.0))  # noqa: E731
    options = {
        "preprocess": lambda batch, key: {"a": 2 * batch["a"]},
        "ema": 0.9,
        "finite_guard": True,
    }
    found = search(ascend, steps=5, **options)
    assert found.losses[0] == pytest.approx(11.0)
    assert found.suggestion is None


def test_batches_that_end_end_the_test():
    assert len(search(n=7, steps=40, high=1e-3).losses) == 7
    with pytest.raises(ValueError, match="at least 3 batches, and got 2"):
        search(n=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"low": 1.0, "high": 0.1}, "low must be above 0 .* got 1.0 and 0.1"),
        ({"steps": 2}, "at least 3 steps; got 2"),
        ({"smoothing": 1.0}, "smoothing must be in .*; got 1.0"),
        ({"diverged_at": 0.0}, "diverged_at must be above 0; got 0.0"),
        ({"steps_per_call": 2}, "leave out steps_per_call"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_mistakes(options, message):
    with pytest.raises(ValueError, match=message):
        search(**options)
