"""Traces of a small train step, its table, its picture and its memory."""

import csv
import ctypes
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from PIL import Image

from jaxaccel import data, train
from jaxaccel.train import _hlo, _hlo_flops, _op_table, _trace_events


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3), name="stem")(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10, name="head")(x.reshape(len(x), -1))


def make_run():
    net = Net()

    def loss_fn(params, model_state, batch, key):
        x = batch["image"].astype(jnp.float32) / 255
        logits: jax.Array = net.apply({"params": params}, x)  # type: ignore
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["label"].astype(jnp.int32)
        )
        return losses.mean(), (model_state, {})

    tx = optax.sgd(0.1, momentum=0.9)
    params = net.init(jax.random.key(0), jnp.zeros((1, 28, 28, 1)))["params"]
    state = train.TrainState.create(params, tx, key=jax.random.key(1))
    return train.make_train_step(loss_fn, tx), state


@pytest.fixture(scope="module")
def compiled():
    step, state = make_run()
    batch = {
        "image": jax.ShapeDtypeStruct((128, 28, 28, 1), jnp.uint8),
        "label": jax.ShapeDtypeStruct((128,), jnp.uint8),
    }
    # jax rebuilds a state of descriptions, which the annotations' checks refuse.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        return step.lower(state, batch).compile()
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Three traced steps of six, with batches from a loader."""
    step, state = make_run()
    rng = np.random.default_rng(0)
    store = data.ArrayStore(
        {
            "image": rng.integers(0, 256, (256, 28, 28, 1), np.uint8),
            "label": rng.integers(0, 10, 256).astype(np.uint8),
        }
    )
    folder = tmp_path_factory.mktemp("profile")
    loader = data.Loader(store, data.BatchPlan(256, 128, epochs=3))
    with (
        data.to_device(loader) as batches,
        train.profile(3, folder, skip=2) as profile,
    ):
        for batch in batches:
            state, metrics = step(state, batch)
            profile.update(metrics)
    return profile, folder


def test_table_accounts_for_the_steps(profiled):
    profile, _ = profiled
    table = profile.table()
    assert profile.traced == table.steps == 3
    assert 0 < table.step_seconds <= table.seconds
    assert table.coverage >= 0.95
    assert table.named_share >= 0.8
    ops = [row for row in table.rows if row.kind == "op"]
    assert {row.program.split("(")[0] for row in ops} == {"jit_train_step"}
    assert {row.calls for row in ops} == {3}
    scopes = table.by_scope()
    assert any("Net/stem" in scope for scope in scopes)
    assert any("Net/head" in scope for scope in scopes)
    assert any(row.backward for row in ops if "Net/stem" in row.scope)
    assert any(__file__ in row.source for row in ops)
    assert list(scopes.values()) == sorted(scopes.values(), reverse=True)


def test_work_of_the_host_has_rows_of_its_own(profiled):
    table = profiled[0].table()
    host = {row.kind: row for row in table.rows if row.kind != "op"}
    assert set(host) == {"put", "load", "dispatch", "idle"}
    assert host["dispatch"].calls == 3
    # Batches are put ahead of their use: the last steps load and put none.
    assert 1 <= host["put"].calls <= 3
    assert 0 < host["put"].seconds < table.seconds
    total = sum(row.seconds for row in table.rows if row.kind in ("op", "idle"))
    assert total >= 0.94 * table.seconds


def test_operations_in_the_table_are_those_of_xla(profiled, compiled):
    table = profiled[0].table()
    counted = sum(row.flops or 0 for row in table.rows) / table.steps
    assert counted == pytest.approx(compiled.cost_analysis()["flops"], rel=0.05)
    conv = 2 * 128 * (3 * 28 - 2) ** 2 * 16
    largest = max((row.flops or 0) / row.calls for row in table.rows)
    assert largest == pytest.approx(conv, rel=0.02)


def test_table_as_text_and_as_csv(profiled, tmp_path):
    table = profiled[0].table()
    text = table.table(limit=2)
    assert text.startswith("3 steps, ") and "more operations" in text
    assert "put: batches to the device" in text and "idle: no program runs" in text
    table.save(tmp_path / "ops.csv")
    with open(tmp_path / "ops.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(table.rows)
    assert float(rows[0]["seconds"]) == table.rows[0].seconds


def test_trace_is_there_for_other_tools_and_read_again(profiled):
    profile, folder = profiled
    assert list(folder.rglob("*.trace.json.gz"))
    again = train.op_table(folder)
    assert again.rows == profile.table().rows


def test_timeline_is_a_picture_of_device_and_host(profiled, tmp_path):
    path = tmp_path / "timeline.png"
    profiled[0].timeline(path)
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    colours = {tuple(x) for x in np.unique(pixels, axis=0).tolist()}
    assert (31, 119, 180) in colours  # operations
    assert (255, 127, 14) in colours  # puts


def test_a_loop_that_is_too_short_is_told(tmp_path):
    with train.profile(2, tmp_path, skip=5) as profile:
        profile.update(jnp.ones(()))
    with pytest.raises(ValueError, match="no step was traced.*had 1 steps.*5 are"):
        profile.table()
    with pytest.raises(ValueError, match="holds no trace"):
        train.op_table(tmp_path)
    with pytest.raises(ValueError, match="at least 1.*got 0 and 1"):
        train.profile(0, tmp_path)


def test_an_exception_ends_the_trace(tmp_path):
    @jax.jit
    def double(x):
        return x * 2

    x = jnp.ones(100)
    for _ in range(2):  # a trace left open would refuse the second one
        with pytest.raises(KeyError), train.profile(5, tmp_path, skip=0) as profile:
            profile.update(jax.block_until_ready(double(x)))
            raise KeyError("stop")
    assert profile.table().steps == 2  # the one that was under way counts as well


# The pieces, with hand-made input


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(step)/jvp(Net)/Conv_0/conv_general_dilated", "Net/Conv_0"),
        ("jit(step)/transpose(jvp(Net))/Conv_0/dot_general", "Net/Conv_0"),
        ("jit(step)/transpose(jvp(a/b))/c/mul", "a/b/c"),
        ("jit(step)/jit(main)/while/body/closed_call/block/dot_general", "block"),
        ("jit(step)/jvp()/add", ""),
        ("jit(step)/rematted_computation/Net/tanh", "Net"),
        ("jit(step)/add", ""),
        ("", ""),
    ],
)
def test_scopes(op_name, scope):
    assert _hlo_flops.scope_of(op_name) == scope


def test_union_of_overlapping_stretches():
    assert _trace_events.union([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (5.5, 6.0)]) == 5.0
    assert _trace_events.union([]) == 0.0


@pytest.mark.parametrize("padding", [(1, 2), (0, 0), (-1, 0)])
@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1), (1, 2)])
def test_operations_of_convolutions_against_one_by_one(padding, strides, dilation):
    image_gap, kernel_gap = dilation
    image, kernel = jnp.ones((2, 9, 4)), jnp.ones((3, 2, 6))

    def conv(image, kernel):
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            (strides,),
            [padding],
            lhs_dilation=(image_gap,),
            rhs_dilation=(kernel_gap,),
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=2,
        )

    computation: Any = jax.jit(conv).lower(image, kernel).compiler_ir("hlo")
    module = computation.as_serialized_hlo_module_proto()
    program = _hlo.read_module(module)
    inside = program.computations[program.entry]
    [found] = [x for x in inside.values() if x.opcode == "convolution"]
    # With ones, the sum of the result counts the products, two operations each.
    expected = 2 * float(conv(image, kernel).sum())
    assert _hlo_flops.count(program, found, program.entry) == expected
    assert found.result_bytes == 4 * conv(image, kernel).size
    assert found.op_name.endswith("conv_general_dilated")


def event(name, start, end, **stats):
    return types.SimpleNamespace(
        name=name, start_ns=start, duration_ns=end - start, stats=stats.items()
    )


def test_events_of_a_gpu():
    """Streams hold operations and copies; what is derived from them is left out."""
    stats = {"hlo_op": "fusion.1", "hlo_module": "jit_step", "program_id": 7}
    stream = types.SimpleNamespace(
        name="Stream #13(Compute,MemcpyH2D)",
        events=[event("loop_fusion", 10, 30, **stats), event("MemcpyH2D", 5, 25)],
    )
    host = types.SimpleNamespace(
        name="python",
        events=[
            event("jaxaccel.step", 0, 40, step_num=3),
            event("$builtins len", 1, 2),
            event("jaxaccel.put", 2, 6),
            event("PjitFunction(step)", 6, 9),
            event("PjitFunction(step)", 7, 8),
        ],
    )
    planes = [
        types.SimpleNamespace(name="/device:GPU:0", lines=[stream]),
        types.SimpleNamespace(name="/host:CPU", lines=[host]),
    ]
    steps, events = _trace_events.read_events(types.SimpleNamespace(planes=planes))
    assert steps == [(0, 40)]
    assert [(x.kind, x.name, x.start, x.end) for x in events] == [
        ("op", "fusion.1", 10, 30),
        ("copy", "MemcpyH2D", 5, 25),
        ("put", "jaxaccel.put", 2, 6),
        ("dispatch", "PjitFunction(step)", 6, 9),
        ("dispatch", "PjitFunction(step)", 7, 8),
    ]
    table = _op_table._build(events, {}, 1, 0.0, 40.0)
    rows = {row.kind: row for row in table.rows}
    assert rows["copy"].share == 0.5 and rows["op"].share == 0.5
    assert rows["idle"].share == pytest.approx(15 / 40)
    assert rows["dispatch"].calls == 1
    assert table.step_seconds == pytest.approx(25e-9) and table.coverage == 1


def test_operations_that_end_in_another_thread():
    stats = {"hlo_op": "conv", "hlo_module": "jit_f", "program_id": 1, "run_id": 5}
    line = types.SimpleNamespace(
        name="worker",
        events=[event("conv", 0, 1, _p=99, **stats), event("end: conv", 8, 9, _c=99)],
    )
    plane = types.SimpleNamespace(name="/host:CPU", lines=[line])
    _, [found] = _trace_events.read_events(types.SimpleNamespace(planes=[plane]))
    assert (found.start, found.end, found.run) == (0, 9, 5)


@pytest.mark.parametrize("cut", [1, 3])
def test_a_damaged_trace_is_told(cut):
    whole = bytes([0x0A, 0x03, 0x12, 0x01, 0x61])
    assert _hlo.read_programs(whole) == {}
    with pytest.raises(ValueError, match="trace is damaged"):
        _hlo.read_programs(whole[:-cut])


# Memory


def test_memory_by_buffer_adds_up(compiled):
    _, state = make_run()
    report = train.memory_report(compiled)

    def total(*kinds):
        return sum(x.bytes for x in report.buffers if x.kind in kinds)

    trained = sum(x.nbytes for x in jax.tree.leaves((state.params, state.opt_state)))
    assert total("donated") >= trained
    assert total("argument", "donated") == report.argument_bytes
    image = next(x for x in report.buffers if "image" in x.name)
    assert (image.kind, image.bytes) == ("argument", 128 * 28 * 28)
    names = [x.name for x in report.buffers if x.kind == "donated"]
    assert any("head" in name and "kernel" in name for name in names)
    # Temporaries share memory: their sum is at least the size of the area.
    assert total("temporary") >= 0.9 * report.temp_bytes
    largest = next(x for x in report.buffers if x.kind == "temporary")
    assert largest.bytes >= 128 * 28 * 28 * 16 * 4 // 4 and "Net" in largest.scope
    text = report.table(limit=3)
    assert len(text.splitlines()) == 4 and "in donated arguments" in text
    peak = report.argument_bytes + report.output_bytes - report.alias_bytes
    assert report.peak_bytes == peak + report.temp_bytes


# Nsight


def test_capture_range_calls_cuda(monkeypatch):
    calls = []

    def function(name, code=0):
        def call():
            calls.append(name)
            return code

        call.__name__ = name
        return call

    cuda = types.SimpleNamespace(
        cudaProfilerStart=function("cudaProfilerStart"),
        cudaProfilerStop=function("cudaProfilerStop"),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda name: cuda)
    with pytest.raises(KeyError), train.capture_range():
        calls.append("step")
        raise KeyError
    assert calls == ["cudaProfilerStart", "step", "cudaProfilerStop"]
    cuda.cudaProfilerStart = function("cudaProfilerStart", 36)
    with pytest.raises(RuntimeError, match="cudaProfilerStart.*error 36"):
        with train.capture_range():
            pass


def test_capture_range_without_cuda(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match=r"libcudart.*jaxaccel\[cuda\]"):
        with train.capture_range():
            pass
