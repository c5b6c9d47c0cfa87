"""The meter's figures, and the operations of a step, against counts by hand."""

import json
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from jaxaccel import train


class Clock:
    """A clock that stands still until a result sets it."""

    now = 0.0

    def __call__(self):
        return self.now

    def ready_at(self, seconds):
        clock = self

        class Outputs:
            def block_until_ready(self):
                clock.now = seconds
                return self

        return Outputs()


def meter_of(clock, **options):
    meter = train.Meter(**options)
    meter._clock = clock
    return meter


def batches(clock, times):
    for now in times:
        clock.now = now
        yield None


def test_figures_of_known_times():
    """Batches arrive at 0, 2, 6, 10 and their steps end at 1, 5, 9, 13."""
    clock = Clock()
    peak = train.Peak(1000.0, "float32", "a test")
    with meter_of(clock, flops_per_step=600.0, peak=peak) as meter:
        ends = iter([1.0, 5.0, 9.0, 13.0])
        for _ in meter.watch(batches(clock, [0.0, 2.0, 6.0, 10.0])):
            meter.update(clock.ready_at(next(ends)), examples=8, steps=2)
            meter.drain()
    reading = meter.reading()
    # The first call does not count: 12 seconds, 3 of them waiting for batches.
    assert (reading.steps, reading.examples, reading.seconds) == (6, 24, 12.0)
    assert reading.steps_per_second == 0.5 and reading.examples_per_second == 2.0
    assert reading.ms_per_step == 2000.0 and reading.step_seconds == 1.5
    assert reading.starvation == 0.25
    assert reading.flops_per_second == 300.0
    assert reading.model_flops_utilization == pytest.approx(0.3)
    assert reading.scalars() == {
        "steps_per_second": 0.5,
        "examples_per_second": 2.0,
        "ms_per_step": 2000.0,
        "starvation": 0.25,
        "flops_per_second": 300.0,
        "model_flops_utilization": reading.model_flops_utilization,
        "compiles": 0.0,
        "compile_seconds": 0.0,
    }


def test_a_pause_moves_no_figure():
    readings = []
    for pause in (0.0, 100.0):
        clock = Clock()
        with meter_of(clock, skip=0) as meter:
            for i in range(4):
                clock.now += 1.0
                for _ in meter.watch([None]):
                    meter.update(clock.ready_at(clock.now + 3.0), examples=1)
                    meter.drain()
                if i == 2:
                    with meter.paused():
                        clock.now += pause
        readings.append(meter.reading())
    assert readings[0] == readings[1]
    assert (readings[0].seconds, readings[0].starvation) == (12.0, 0.25)


def test_state_goes_through_json_and_skips_the_first_calls_again():
    def run(meter, clock, n):
        for _ in range(n):
            for _ in meter.watch([None]):
                meter.update(clock.ready_at(clock.now + 2.0), examples=5)
                meter.drain()

    clock = Clock()
    with meter_of(clock) as meter:
        run(meter, clock, 4)
        state = json.loads(json.dumps(meter.get_state()))
        clock.now += 1000.0  # the time between the two runs
    with meter_of(clock) as resumed:
        resumed.set_state(state)
        run(resumed, clock, 3)
    reading = resumed.reading()
    assert (reading.steps, reading.examples, reading.seconds) == (5, 25, 10.0)
    with pytest.raises(ValueError, match="keys.*got.*steps.*get_state"):
        resumed.set_state({"steps": 1})


def test_compilations_count_those_in_pauses_too():
    @jax.jit
    def f(x):
        return x + 1

    x, y = jnp.zeros(2), jnp.zeros(3)
    with train.Meter(skip=0) as meter:
        for _ in meter.watch(range(3)):
            meter.update(f(x), examples=1)
        with meter.paused():
            f(y)
        state = meter.get_state()
        meter.set_state(state)
        assert meter.reading().compiles == 2
    assert meter.reading().compile_seconds == state["compile_seconds"] > 0


def test_peak_without_operations_is_refused():
    with pytest.raises(ValueError, match="flops_per_step=count_flops"):
        train.Meter(peak=train.Peak(1.0, "float32", "a test"))
    with pytest.raises(ValueError, match="positive; got 0"):
        train.Peak(0.0, "float32", "nobody")


@pytest.mark.parametrize(
    ("kind", "dtype", "tera"),
    [
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA L40S", "float32", 91.6),
        ("NVIDIA L4", "float32", 30.3),
        ("TPU v5 lite", "bfloat16", 197),
    ],
)
def test_data_sheet_peaks(kind, dtype, tera):
    peak = train.data_sheet_peak(dtype, device=kind)
    assert peak.flops_per_second == pytest.approx(tera * 1e12)


def test_unknown_peaks_point_to_a_measurement():
    with pytest.raises(ValueError, match="float64.*A100.*known: bfloat16.*measure"):
        train.data_sheet_peak("float64", device="NVIDIA A100-SXM4-40GB")
    with pytest.raises(ValueError, match="'cpu'; use measure_peak"):
        train.data_sheet_peak()
    with pytest.raises(ValueError, match="at least 1; got 0"):
        train.measure_peak(size=0)


def taps(size):
    """Taps of a 3-wide kernel with one column of padding on each side."""
    return 3 * size - 2


def conv_flops(batch, size, channels, features):
    return 2 * batch * taps(size) ** 2 * channels * features


class ConvNet(nn.Module):
    """The small net: three convolutions with 32, 64 and 128 features."""

    @nn.compact
    def __call__(self, x):
        for features in (32, 64, 128):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.reshape(len(x), -1))


# jax rebuilds a state of descriptions, which the annotations' checks refuse.
@pytest.mark.usefixtures("unchecked")
def test_operations_of_a_train_step_are_those_counted_by_hand(key):
    net = ConvNet()
    n = 64

    def loss_fn(params, model_state, batch, key):
        logits: Any = net.apply({"params": params}, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), (model_state, {})

    tx = optax.sgd(0.1, momentum=0.9)
    step = train.make_train_step(loss_fn, tx)
    image = jax.ShapeDtypeStruct((n, 32, 32, 3), jnp.float32)
    params = jax.eval_shape(net.init, key, image)["params"]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    state = train.TrainState.create(params, tx, key=key)
    batch = {"image": image, "label": jax.ShapeDtypeStruct((n,), jnp.int32)}
    convs = [(32, 3, 32), (16, 32, 64), (8, 64, 128)]
    forward = sum(conv_flops(n, *conv) for conv in convs) + 2 * n * 2048 * 10
    # Forward, the gradient of the kernels and that of the inputs but the first.
    expected = 3 * forward - conv_flops(n, *convs[0])
    assert train.count_flops(step, state, batch) == pytest.approx(expected, rel=0.02)


def test_operations_of_a_scan_count_as_often_as_they_run(key):
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    once = 2 * 8 * 16 * 16

    def inner(x, _):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0], None

    @jax.jit
    def nested(x):
        return jax.lax.scan(inner, x, None, length=5)[0] @ w

    @jax.jit
    def branches(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: inner(x, None)[0], lambda x: x, x)

    assert train.count_flops(nested, x) == pytest.approx(16 * once, rel=0.01)
    assert train.count_flops(branches, x) == pytest.approx(3 * once, rel=0.01)

    gradient = jax.jit(jax.grad(lambda x: inner(x, None)[0].sum()))
    plain = jax.jit(jax.grad(lambda x: (x @ w @ w @ w).sum()))
    ratio = train.count_flops(gradient, x) / train.count_flops(plain, x)
    # The scan also runs forward, whose result the plain gradient need not compute.
    assert 0.99 < ratio < 2.01


@pytest.mark.usefixtures("unchecked")
def test_only_jitted_functions_can_be_counted():
    with pytest.raises(TypeError, match="jitted.*got function"):
        train.count_flops(lambda x: x, jnp.ones(2))
