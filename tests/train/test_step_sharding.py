"""Meshes of eight devices, of Auto and Explicit axes, against one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxaccel import data, train
from jaxaccel.train._guard import all_finite


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(3)(nn.relu(x))


TASK = train.from_linen(Net(), train.classification_loss)
TX = optax.sgd(0.1, momentum=0.9)


@functools.cache
def variables():
    batch = {"image": np.zeros((2, 8), np.float32)}
    return jax.jit(TASK.init)(jax.random.key(0), batch)


def batches_of(rng, steps=20, n=32):
    for _ in range(steps):
        x = rng.standard_normal((n, 8)).astype(np.float32)
        yield {"image": x, "label": x[:, :3].argmax(-1).astype(np.uint8)}


def state_of(layout=None, **options):
    params, model_state = variables()
    return train.TrainState.create(
        params,
        TX,
        key=jax.random.key(0),
        model_state=model_state,
        sharding=layout,
        **options,
    )


def layout_of(kind, name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    if name == "fsdp":
        return train.fsdp(mesh, min_size=32)
    return train.data_parallel(mesh)


def losses_of(layout, rng, **options):
    state = state_of(layout)
    step = train.make_train_step(TASK.train_loss, TX, sharding=layout, **options)
    losses = []
    with train.CompileCounter() as compiles:
        where = None if layout is None else layout.batch
        with data.to_device(batches_of(rng), sharding=where, depth=0) as batches:
            with jax.transfer_guard("disallow"):
                for batch in batches:
                    state, metrics = step(state, batch)
                    losses.append(metrics["loss"])
    assert compiles.counts["train_step"] == 1
    return state, np.asarray(jax.device_get(losses))


@pytest.fixture(scope="module")
def on_one_device():
    return losses_of(None, np.random.default_rng(0))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["data_parallel", "fsdp"])
def test_eight_devices_train_as_one_does(kind, name, on_one_device, rng):
    """Losses to 1e-5 over 20 steps, global statistics, no transfer, one program."""
    layout = layout_of(kind, name)
    state, losses = losses_of(layout, rng)
    want, want_losses = on_one_device
    np.testing.assert_allclose(losses, want_losses, atol=1e-5)
    for a, b in zip(
        jax.tree.leaves(state.model_state),
        jax.tree.leaves(want.model_state),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert a.sharding.is_fully_replicated
    kernel = state.params["Dense_0"]["kernel"]
    shape = (8, 2) if name == "fsdp" else (8, 16)
    for x in (kernel, state.opt_state[0].trace["Dense_0"]["kernel"]):
        assert x.addressable_shards[0].data.shape == shape
    # Evaluation finds the same network.
    eval_step = train.make_eval_step(TASK.eval_loss, sharding=layout)
    batch = next(batches_of(rng, 1))
    got = eval_step(state, jax.device_put(batch, layout.batch))
    alone = train.make_eval_step(TASK.eval_loss)(want, batch)
    np.testing.assert_allclose(got["loss"], alone["loss"], rtol=1e-4)


@pytest.mark.parametrize("name", ["data_parallel", "fsdp"])
def test_collectives_are_counted_and_state_is_donated(name, rng):
    layout = layout_of(AxisType.Auto, name)
    state, batch = state_of(layout), next(batches_of(rng, 1))
    step = train.make_train_step(TASK.train_loss, TX, sharding=layout)
    compiled = step.lower(state, jax.device_put(batch, layout.batch)).compile()
    counts = train.count_collectives(compiled)
    # Two of the batch norm, forward and backward; one of all gradients and metrics.
    assert 1 <= counts["all-reduce"] <= 3
    assert ("all-gather" in counts) == (name == "fsdp")
    # Of one device: its part of the state.
    kept = sum(
        x.addressable_shards[0].data.nbytes
        for x in jax.tree.leaves((state.params, state.opt_state))
    )
    memory = compiled.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes >= kept


def test_the_split_into_micro_batches_does_not_depend_on_the_devices(rng):
    batch = next(batches_of(rng, 1))
    states = []
    for layout in (None, layout_of(AxisType.Explicit, "fsdp")):
        step = train.make_train_step(TASK.train_loss, TX, accumulate=2, sharding=layout)
        where = batch if layout is None else jax.device_put(batch, layout.batch)
        with jax.numpy_dtype_promotion("standard"):
            states.append(step(state_of(layout), where)[0])
    for a, b in zip(
        jax.tree.leaves(states[0].model_state),
        jax.tree.leaves(states[1].model_state),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_bad_entries_are_found_on_every_device(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    for spec in (PartitionSpec("data"), PartitionSpec(None, "data"), PartitionSpec()):
        x = np.ones((80, 64), np.float32)
        where, finite = NamedSharding(mesh, spec), jax.jit(all_finite)
        assert finite([jax.device_put(x, where)])
        x[79, 63] = np.inf
        assert not finite([jax.device_put(x, where)])


def test_a_layout_of_ones_own():
    """Parameters by shape, here the last axis of matrices."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    layout = train.Layout(
        mesh,
        "data",
        lambda shape: (
            PartitionSpec(None, "model") if shape == (8, 16) else (PartitionSpec())
        ),
    )
    state = state_of(layout, ema=0.9, finite_guard=True)
    assert state.ema is not None
    assert state.ema.average["Dense_0"]["kernel"].sharding == NamedSharding(
        mesh, PartitionSpec(None, "model")
    )
    assert state.key.sharding.is_fully_replicated
    assert layout.stacked.spec == PartitionSpec(None, "data")
    shapes = jax.eval_shape(lambda: state)
    assert layout.shardings(shapes).step == layout.replicated


def test_an_axis_must_be_one_of_the_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="no axis 'model'.*'data'"):
        train.fsdp(mesh, axis="model")
    rule = train.fsdp(mesh, min_size=64).rule
    assert rule((16, 8)) == PartitionSpec("data")
    assert rule((7, 9, 24)) == PartitionSpec(None, None, "data")
    assert rule((9, 7)) == rule((8,)) == PartitionSpec()


def test_no_transfer_for_the_steps_of_one_device(rng):
    _, losses = losses_of(None, rng, rematerialize="nothing_saveable")
    assert jnp.isfinite(losses).all() and losses[-1] < losses[0]
