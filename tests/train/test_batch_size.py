"""The batch-size finder against the compiler's own figures."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel import train

FEATURES, HIDDEN = 256, 64
TX = optax.sgd(0.1, momentum=0.9)


def loss_fn(params, model_state, batch, key):
    hidden = jnp.tanh(batch["x"].astype(jnp.float32) @ params["w"])
    return jnp.mean(hidden**2), (model_state, {})


STEP = train.make_train_step(loss_fn, TX)


def make_state():
    params = {"w": jnp.ones((FEATURES, HIDDEN))}
    return train.TrainState.create(params, TX, key=jax.random.key(0))


def needed(n):
    batch = {"x": jax.ShapeDtypeStruct((n, FEATURES), jnp.uint8)}
    m: Any = STEP.lower(make_state(), batch).compile().memory_analysis()
    return (
        m.argument_size_in_bytes
        + m.output_size_in_bytes
        + m.temp_size_in_bytes
        + m.generated_code_size_in_bytes
        - m.alias_size_in_bytes
    )


def find(n=16, **options):
    batch = {"x": np.zeros((n, FEATURES), np.uint8)}
    return train.find_batch_size(STEP, make_state(), batch, **options)


@pytest.mark.parametrize("first", [16, 4000])
def test_what_it_finds_fits_and_the_next_does_not(first):
    limit = 2_000_000
    found = find(first, memory_bytes=limit, batches_ahead=2, multiple_of=8)
    size, waiting = found.batch_size, 2 * FEATURES
    assert size % 8 == 0 and found.limit == limit
    assert found.bytes == needed(size) + size * waiting <= limit
    assert needed(size + 8) + (size + 8) * waiting > limit
    assert found.measured[size] == found.bytes and len(found.measured) <= 8
    # Bounds from what must be there: the state with its gradient, and an example's
    # pixels, those that wait, and its hidden values.
    assert found.bytes > 3 * 4 * FEATURES * HIDDEN + size * (FEATURES * 3 + 4 * HIDDEN)


def test_limits_that_are_not_memory():
    found = find(memory_bytes=1 << 40, max_batch_size=100, multiple_of=16)
    assert found.batch_size == 96
    found = find(memory_bytes=1 << 40, max_compilations=1)
    assert found.batch_size == 16 and list(found.measured) == [16]


def test_a_sharded_batch_counts_a_device_s_share():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    batch = {"x": jax.ShapeDtypeStruct((64, FEATURES), jnp.uint8, sharding=rows)}
    options: dict = {"max_compilations": 1, "memory_bytes": 1 << 30}
    ahead, alone = (
        train.find_batch_size(STEP, make_state(), batch, batches_ahead=n, **options)
        for n in (4, 0)
    )
    assert ahead.bytes - alone.bytes == 4 * 64 * FEATURES // 8


def test_too_little_memory_and_unknown_memory():
    with pytest.raises(ValueError, match="a batch of 1 needs .* and 100,000 are there"):
        find(2, memory_bytes=100_000)
    with pytest.raises(ValueError, match="does not say how much memory.*memory_bytes"):
        find()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": loss_fn}, TypeError, "step must be jitted.* got function"),
        (
            {"batch": {}},
            TypeError,
            "dict of arrays with a leading batch axis; got dict",
        ),
        ({"batches_ahead": -1}, ValueError, "batches_ahead must be .*; got -1 and 8"),
        ({"multiple_of": 0}, ValueError, "multiple_of must be .*; got 0 and 65536"),
        ({"multiple_of": 9, "max_batch_size": 8}, ValueError, "got 9 and 8"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_mistakes(options, error, message):
    arguments = {"step": STEP, "state": make_state(), "batch": {"x": jnp.zeros(2)}}
    with pytest.raises(error, match=message):
        train.find_batch_size(**{**arguments, **options})
