"""Every option of the train step together with every other.

One linear model, whose steps a float64 loop in NumPy repeats: whatever the options,
parameters, losses, averages and probes are those of the loop. `make test` runs a set
of combinations in which every pair of values occurs, `make test-all` the product.
"""

import itertools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from jaxaccel import train

LR, MOMENTUM, STEPS, N, D = 0.05, 0.9, 4, 32, 8

OPTIONS: dict[str, tuple] = {
    "precision": (None, "bfloat16", "float16"),
    "sharding": (None, "data_parallel", "fsdp"),
    "accumulate": (1, 2),
    "finite_guard": (False, True),
    "ema": (None, 0.75),
    "rematerialize": (None, "dots_saveable"),
    "steps_per_call": (1, 2),
    "donate": (True, False),
    "probes": (False, True),
    "preprocess": (False, True),
}


def pairwise(seed=2):
    """Returns rows in which every two values of two options meet."""
    draw = random.Random(seed)
    names = list(OPTIONS)
    uncovered = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in OPTIONS[a]
        for y in OPTIONS[b]
    }

    def covered(row):
        return uncovered & set(itertools.combinations(row.items(), 2))

    rows: list[dict[str, Any]] = []
    while uncovered:
        draws = [{n: draw.choice(OPTIONS[n]) for n in names} for _ in range(400)]
        rows.append(max(draws, key=lambda row: len(covered(row))))
        uncovered -= covered(rows[-1])
    return rows


def name_of(row):
    return "-".join(str(value) for value in row.values())


ROWS = pairwise()


def make_batches():
    rng = np.random.default_rng(3)
    x = rng.integers(-2, 3, (STEPS, N, D)).astype(np.float32) / 2
    y = (x @ np.linspace(-1, 1, D) + 0.5).astype(np.float32)
    return {"x": x, "y": y, "mask": rng.random((STEPS, N)) < 0.8}


def loss_fn(params, model_state, batch, key):
    predicted = (batch["x"] @ params["w"] + params["b"]).astype(jnp.float32)
    loss = train.masked_mean((predicted - batch["y"]) ** 2, batch)
    mean = train.masked_mean(predicted, batch)
    return loss, ({"seen": model_state["seen"] + mean}, {"mean": mean})


def oracle(batches, factor):
    """Yields loss, mean prediction, gradient, update, parameters of each step."""
    theta, trace = np.zeros(D + 1), np.zeros(D + 1)
    for t in range(STEPS):
        keep = batches["mask"][t]
        x = np.c_[batches["x"][t] * factor, np.ones(N)].astype(np.float64)[keep]
        error = x @ theta - batches["y"][t][keep]
        grad = 2 * x.T @ error / keep.sum()
        trace = MOMENTUM * trace + grad
        mean, theta = (x @ theta).mean(), theta - LR * trace
        yield np.mean(error**2), mean, grad, -LR * trace, theta


def flat(tree):
    return np.append(np.asarray(tree["w"], np.float64), float(tree["b"]))


def layout_of(name):
    if name is None:
        return None
    kind = AxisType.Auto if name == "data_parallel" else AxisType.Explicit
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    if name == "data_parallel":
        return train.data_parallel(mesh)
    return train.fsdp(mesh, min_size=D)


def check(row):
    options: dict[str, Any] = dict(row, sharding=layout_of(row["sharding"]))
    stateful = {k: options[k] for k in ("precision", "finite_guard", "ema", "sharding")}
    tx = optax.sgd(LR, momentum=MOMENTUM)
    options["preprocess"] = (
        (lambda batch, key: {**batch, "x": batch["x"] / 2})
        if row["preprocess"]
        else None
    )
    options["probes"] = (
        {"all": lambda params, grads, updates, batch: (params, grads, updates)}
        if row["probes"]
        else None
    )
    state = train.TrainState.create(
        {"w": jnp.zeros(D), "b": jnp.zeros(())},
        tx,
        key=jax.random.key(0),
        model_state={"seen": jnp.zeros(())},
        **stateful,
    )
    first, step = state, train.make_train_step(loss_fn, tx, **options)
    batches, seen = make_batches(), []
    for t in range(0, STEPS, row["steps_per_call"]):
        part = {k: x[t : t + row["steps_per_call"]] for k, x in batches.items()}
        if row["steps_per_call"] == 1:
            part = {k: x[0] for k, x in part.items()}
        if options["sharding"] is not None:
            layout = options["sharding"]
            where = layout.batch if row["steps_per_call"] == 1 else layout.stacked
            part = jax.device_put(part, where)
        state, metrics = step(state, part)
        metrics = jax.device_get(metrics)
        if row["steps_per_call"] == 1:
            metrics = jax.tree.map(lambda x: x[None], metrics)
        seen += [
            jax.tree.map(lambda x, i=i: x[i], metrics)
            for i in range(row["steps_per_call"])
        ]
    compare(row, first, state, seen, batches)


def compare(row, first, state, seen, batches):
    tolerance = {"bfloat16": 2e-2, "float16": 2e-3, None: 1e-5}[row["precision"]]

    def same(got, want):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)

    average: Any = 0.0
    weight, total = 0.0, 0.0
    theta = np.zeros(D + 1)
    guarded = row["finite_guard"] or row["precision"] == "float16"
    wanted = oracle(batches, 0.5 if row["preprocess"] else 1.0)
    for metrics, (loss, mean, grad, update, new) in zip(seen, wanted, strict=True):
        same(metrics["loss"], loss)
        same(metrics["mean"], mean)
        assert ("skipped" in metrics) == guarded
        assert metrics.get("skipped", 0.0) == 0.0
        assert metrics.get("loss_scale", 2.0**15) == 2.0**15
        if row["probes"]:
            for got, want in zip(
                metrics["probes"]["all"], (theta, grad, update), strict=True
            ):
                same(flat(got), want)
        theta, total = new, total + mean
        average, weight = 0.75 * average + 0.25 * new, 0.75 * weight + 0.25
    same(flat(state.params), theta)
    if row["ema"] is not None:
        same(flat(state.with_average().params), average / weight)
    # Micro-batches have thread their sums on: twice the number of terms.
    if row["accumulate"] == 1:
        same(state.model_state["seen"], total)
    assert int(state.step) == STEPS
    assert first.params["w"].is_deleted() == row["donate"]
    if row["sharding"] == "fsdp":
        assert state.params["w"].addressable_shards[0].data.shape == (1,)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_pairs_of_options(row):
    check(row)


def test_the_rows_hold_all_pairs():
    for a, b in itertools.combinations(OPTIONS, 2):
        met = {(row[a], row[b]) for row in ROWS}
        assert met == set(itertools.product(OPTIONS[a], OPTIONS[b]))
    assert len(ROWS) <= 18


@pytest.mark.slow
@pytest.mark.parametrize("sharding", OPTIONS["sharding"])
@pytest.mark.parametrize("precision", OPTIONS["precision"])
def test_all_combinations(precision, sharding):
    """The product; preprocess and donate are drawn, outside of the arithmetic."""
    draw = random.Random(f"{precision}{sharding}")
    fixed = ("precision", "sharding", "donate", "preprocess")
    rest = {k: v for k, v in OPTIONS.items() if k not in fixed}
    for values in itertools.product(*rest.values()):
        row = {"precision": precision, "sharding": sharding}
        row |= {name: draw.choice((True, False)) for name in ("donate", "preprocess")}
        check(row | dict(zip(rest, values, strict=True)))
        jax.clear_caches()
