"""Logs, read back by TensorBoard, json, an HTTP client and a stub of wandb."""

import io
import json
import sys
import types
import urllib.request
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from matplotlib.figure import Figure

from jaxaccel import train


class Log:
    """Keeps what it is told."""

    def __init__(self):
        self.calls = []

    def scalars(self, step, values):
        self.calls.append(("scalars", step, dict(values)))

    def histograms(self, step, values):
        self.calls.append(("histograms", step, dict(values)))

    def flush(self):
        self.calls.append(("flush",))

    def close(self):
        self.calls.append(("close",))


def events_of(logdir, **size_guidance):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logdir), size_guidance=size_guidance)
    events.Reload()
    return events


# MetricBuffer


def test_buffer_takes_stacked_metrics_apart():
    log = Log()
    with train.MetricBuffer(log, every=4) as buffer:
        losses = jnp.arange(3.0)
        assert not buffer.append(3, {"loss": losses}, stacked=3)
        assert buffer.append(4, {"loss": jnp.array(9.0)})
        buffer.append(6, {"loss": losses[:2]}, stacked=2)
    assert [(step, values["loss"]) for _, step, values in log.calls] == [
        (1, 0.0),
        (2, 1.0),
        (3, 2.0),
        (4, 9.0),
        (5, 0.0),
        (6, 1.0),
    ]


def test_buffer_refuses_metrics_that_are_not_stacked():
    with pytest.raises(ValueError, match=r"'loss' of shape \(2,\).*from 3 steps"):
        train.MetricBuffer(every=1).append(3, {"loss": jnp.ones(2)}, stacked=3)


def test_buffer_hands_arrays_to_histograms_and_to_nobody_else():
    log = Log()
    values = {"loss": jnp.ones(()), "probes": {"w": jnp.arange(4.0)}}
    buffer = train.MetricBuffer(log, every=1)
    buffer.append(7, values)
    assert log.calls[0] == ("scalars", 7, {"loss": 1.0})
    name, step, arrays = log.calls[1]
    assert (name, step, list(arrays)) == ("histograms", 7, ["probes/w"])
    np.testing.assert_array_equal(arrays["probes/w"], np.arange(4.0))
    assert buffer.latest == {"loss": 1.0}
    out = io.StringIO()
    train.MetricBuffer(train.ConsoleWriter(file=out), every=1).append(7, values)
    assert out.getvalue() == "step 7: loss 1\n"


@pytest.mark.usefixtures("unchecked")
def test_buffer_and_writers_refuse_what_cannot_write():
    with pytest.raises(TypeError, match=r"scalars\(step, values\).*got str"):
        train.MetricBuffer("runs/a")
    with pytest.raises(TypeError, match="close.*got NoneType"):
        train.Writers(None)


def test_writers_hand_on_to_those_that_can():
    log, out = Log(), io.StringIO()
    console = train.ConsoleWriter(file=out)
    with train.Writers(log, console) as writers:
        assert isinstance(writers, train.Writer)
        writers.scalars(1, {"a": 2.0})
        writers.histograms(1, {"h": np.zeros(2)})
        writers.images(1, "x", np.zeros((1, 2, 2, 1), np.uint8))
        writers.flush()
    assert [call[0] for call in log.calls] == [
        "scalars",
        "histograms",
        "flush",
        "close",
    ]
    assert out.getvalue() == "step 1: a 2\n"


def test_writers_close_all_when_one_fails():
    class Broken(Log):
        def close(self):
            raise OSError("disk full")

    log = Log()
    with pytest.raises(OSError, match="disk full"):
        train.Writers(Broken(), log).close()
    assert log.calls == [("close",)]


# TensorBoard


def test_tensorboard_histograms_figures_and_hparams(tmp_path, rng):
    values = rng.normal(size=1000).astype(np.float32)
    figure = Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([0, 1])
    canvas = figure.canvas
    with train.TensorBoardWriter(tmp_path) as writer:
        writer.histograms(3, {"w": {"kernel": jnp.asarray(values, jnp.bfloat16)}})
        writer.histograms(4, {"bad": np.array([1.0, np.nan, np.inf])})
        writer.histograms(5, {"worse": np.array([np.nan])})
        writer.figure(3, "curve", figure)
        writer.hparams(
            {"lr": 0.1, "tx": {"name": "sgd"}, "shape": (2, 3)}, {"final": 0.75}
        )
    assert figure.canvas is canvas
    events = events_of(tmp_path)
    [event] = events.Histograms("w/kernel")
    assert event.step == 3 and event.histogram_value.num == 1000
    assert event.histogram_value.sum == pytest.approx(values.sum(), abs=0.5)
    assert [e.histogram_value.num for e in events.Histograms("bad")] == [1]
    assert [e.value for e in events.Scalars("bad/non_finite")] == [2]
    assert [e.value for e in events.Scalars("worse/non_finite")] == [1]
    assert "worse" not in events.Tags()["histograms"]
    [image] = events.Images("curve")
    assert (image.width, image.height) == (100, 50)
    session = events_of(tmp_path / "hparams")
    assert session.Scalars("final")[0].value == 0.75
    content = session.summary_metadata["_hparams_/session_start_info"]
    stored = content.plugin_data.content
    assert b"tx/name" in stored and b"sgd" in stored and b"(2, 3)" in stored


def test_tensorboard_graph_of_a_train_step(tmp_path, key):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2, name="head")(nn.relu(nn.Dense(3, name="body")(x)))

    net = Net()

    def loss_fn(params, model_state, batch, key):
        outputs: Any = net.apply({"params": params}, batch["x"])
        return jnp.mean(outputs**2), ({}, {})

    tx = optax.sgd(0.1)
    params = net.init(key, jnp.ones((1, 4)))["params"]
    state = train.TrainState.create(params, tx, key=key)
    with train.TensorBoardWriter(tmp_path) as writer:
        writer.graph(train.make_train_step(loss_fn, tx), state, {"x": jnp.ones((5, 4))})
    graph = events_of(tmp_path).Graph()
    nodes = {node.name: node for node in graph.node}
    assert len(nodes) == len(graph.node)
    assert all(name in nodes for node in graph.node for name in node.input)
    products = [node for node in graph.node if node.op == "dot_general"]
    # Two forward, their kernels' gradients, and one gradient of an input.
    assert len(products) == 5
    forward = "jvp(Net)/{}/dot_general"
    backward = "transpose(jvp(Net))/{}/dot_general"
    assert sorted(node.name for node in products) == [
        forward.format("body"),
        forward.format("head"),
        backward.format("body"),
        backward.format("head"),
        backward.format("head") + "_1",
    ]
    # The first product reads the batch, and every result comes from an argument.
    reached = set()

    def visit(name):
        if name not in reached:
            reached.add(name)
            for source in nodes[name].input:
                visit(source)

    visit(next(node.name for node in graph.node if node.op == "result"))
    assert any(nodes[name].op == "argument" for name in reached)


def test_graph_draws_scans_in_place_and_conditionals_as_a_node(tmp_path):
    def f(x, flag):
        with jax.named_scope("loop"):
            x, _ = jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)
        x = jax.lax.cond(flag, jnp.cos, jnp.tan, x)
        return jax.lax.while_loop(lambda x: x < 1, lambda x: x + 1, x)

    with train.TensorBoardWriter(tmp_path) as writer:
        writer.graph(f, jax.ShapeDtypeStruct((), jnp.float32), True)
    nodes = {node.name: node for node in events_of(tmp_path).Graph().node}
    assert nodes["loop/scan/sin"].input == ["arguments/0"]
    [conditional] = [node for node in nodes.values() if node.op == "cond"]
    assert "loop/scan/sin" in conditional.input
    [loop] = [node for node in nodes.values() if node.op == "while"]
    assert loop.input == [conditional.name]
    assert nodes["results/0"].input == [loop.name]


# JSON lines


def test_json_lines_are_json_and_numbers_come_back(tmp_path):
    values = {"loss": jnp.array(0.5), "bad": float("nan"), "big": float("-inf")}
    with train.JsonLinesWriter(tmp_path) as writer:
        writer.scalars(3, values)
        writer.text(3, "note", "hello")

    def forbidden(name):
        raise AssertionError(f"{name} is no JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    first = [json.loads(line, parse_constant=forbidden) for line in lines][0]
    assert (first["step"], first["loss"], first["bad"]) == (3, 0.5, "nan")
    rows = list(train.read_json_lines(tmp_path))
    assert np.isnan(rows[0]["bad"]) and rows[0]["big"] == -np.inf
    assert rows[1]["note"] == "hello"


@pytest.mark.parametrize("rest", ["", '{"step": 2, "lo', "x" * 10000])
def test_json_lines_go_on_after_a_killed_run(tmp_path, rest):
    with train.JsonLinesWriter(tmp_path) as writer:
        writer.scalars(1, {"loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + rest)
    assert [row["step"] for row in train.read_json_lines(tmp_path)] == [1]
    with train.JsonLinesWriter(tmp_path) as writer:
        writer.scalars(2, {"loss": 0.5})
    assert [row["loss"] for row in train.read_json_lines(tmp_path)] == [1.0, 0.5]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2 of .*metrics.jsonl.*remove"):
        list(train.read_json_lines(tmp_path))


def test_console_writes_every_nth_step():
    out = io.StringIO()
    with train.ConsoleWriter(file=out, every=5) as writer:
        for step in range(11):
            writer.scalars(step, {"loss": step / 3})
    assert out.getvalue().splitlines() == [
        "step 0: loss 0",
        "step 5: loss 1.667",
        "step 10: loss 3.333",
    ]
    with pytest.raises(ValueError, match="got 0"):
        train.ConsoleWriter(every=0)


# Prometheus


def test_prometheus_serves_the_latest_values():
    pytest.importorskip("prometheus_client")

    def fetch(port):
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            lines = response.read().decode().splitlines()
        return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

    reading = train.MeterReading(steps=4, seconds=2.0, starvation=0.25)
    with (
        train.PrometheusWriter(0, labels={"run": "a"}) as writer,
        train.PrometheusWriter(0) as other,
    ):
        writer.scalars(1, {"loss": 2.0})
        writer.scalars(2, {"loss": float("nan"), "eval": {"top-1": 0.5}})
        other.scalars(7, reading.scalars())
        values = fetch(writer.port)
        assert values['jaxaccel_loss{run="a"}'] == "NaN"
        assert values['jaxaccel_eval_top_1{run="a"}'] == "0.5"
        assert values['jaxaccel_step{run="a"}'] == "2.0"
        assert float(values['jaxaccel_updated_seconds{run="a"}']) > 1e9
        values = fetch(other.port)
        assert values["jaxaccel_ms_per_step"] == "500.0"
        assert values["jaxaccel_starvation"] == "0.25"
        assert "jaxaccel_loss" not in values
        port = writer.port
    with pytest.raises(OSError):
        fetch(port)
    writer.close()  # closing twice is fine


@pytest.mark.parametrize(
    ("module", "build", "extra"),
    [
        ("prometheus_client", lambda: train.PrometheusWriter(0), "monitor"),
        ("wandb", lambda: train.WandbWriter("runs", project="p"), "wandb"),
        ("psutil", train.ResourceMonitor, "monitor"),
    ],
)
def test_missing_packages_name_their_extra(monkeypatch, module, build, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'jaxaccel\[{extra}\]'"):
        build()


# Weights & Biases


@pytest.fixture
def wandb(monkeypatch):
    """A stub with the calls that the writer makes, which keeps them."""
    stub: Any = types.ModuleType("wandb")
    stub.calls = []
    stub.config, stub.summary = {}, {}

    class Run:
        config, summary = stub.config, stub.summary

        def define_metric(self, *args, **options):
            stub.calls.append(("define_metric", args, options))

        def log(self, values):
            stub.calls.append(("log", values))

        def finish(self, exit_code=None):
            stub.calls.append(("finish", exit_code))

    def init(**options):
        stub.calls.append(("init", options))
        return Run()

    stub.init = init
    stub.Histogram = lambda x: ("histogram", len(x))
    stub.Image = lambda x: ("image", x.shape)
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_wandb_gets_everything_with_its_step(wandb, tmp_path):
    figure = Figure(figsize=(2, 1), dpi=50)
    with train.WandbWriter(tmp_path, project="p", name="a") as writer:
        writer.scalars(5, {"loss": jnp.array(0.5), "norm": {"w": 2.0}})
        writer.histograms(5, {"h": np.array([1.0, np.nan, 2.0])})
        writer.images(4, "x", np.zeros((2, 3, 4, 1), np.uint8))
        writer.figure(4, "f", figure)
        writer.text(4, "note", "hello")
        writer.hparams({"lr": 0.1}, {"accuracy": 0.75})
    assert wandb.calls == [
        (
            "init",
            {"project": "p", "dir": str(tmp_path), "mode": "offline", "name": "a"},
        ),
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", {"loss": 0.5, "norm/w": 2.0, "step": 5}),
        ("log", {"h/non_finite": 1.0, "h": ("histogram", 2), "step": 5}),
        ("log", {"x": [("image", (3, 4))] * 2, "step": 4}),
        ("log", {"f": ("image", (50, 100, 3)), "step": 4}),
        ("log", {"note": "hello", "step": 4}),
        ("finish", 0),
    ]
    assert wandb.config == {"lr": 0.1} and wandb.summary == {"accuracy": 0.75}


def test_wandb_marks_a_run_that_failed(wandb, tmp_path):
    with pytest.raises(RuntimeError), train.WandbWriter(tmp_path, project="p"):
        raise RuntimeError("diverged")
    assert wandb.calls[-1] == ("finish", 1)
