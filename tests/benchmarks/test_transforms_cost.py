import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxaccel import transforms

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cost():
    spec = importlib.util.spec_from_file_location(
        "transforms_cost", ROOT / "benchmarks" / "transforms_cost.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_exported_transformation_is_measured(cost):
    exported = cost.exported_transformations()
    assert {"znorm", "centralize_gradients", "clip_by_global_norm"} <= set(exported)
    assert "flax_dims" not in exported and "KernelDims" not in exported
    assert set(exported) == {row.function for row in cost.ROWS}


def test_rows_build_and_names_differ(cost):
    contenders = cost.build_contenders()
    assert len({row.name for row in cost.ROWS}) == len(cost.ROWS)
    assert {"znorm()", "znorm(scope='unit')"} <= set(contenders)
    for name, tx in contenders.items():
        assert callable(tx.init) and callable(tx.update), name


def test_bounds_name_peers(cost):
    for row in cost.ROWS:
        assert {*row.bytes_bounds, *row.time_bounds} <= set(cost.PEERS)


def test_the_network_has_25_million_parameters(cost):
    shapes = cost.network(layers=8, width=512)
    assert cost.count(shapes) == 8 * (4 * 512**2 + 8 * 512**2 + 2 * 512) + 512
    assert 25e6 < cost.count(shapes) < 26e6
    assert len(jax.tree.leaves(shapes)) == 65


def test_bytes_of_known_updates(cost):
    shapes = {"kernel": jax.ShapeDtypeStruct((64, 128), jnp.float32)}
    # Reads the gradient, writes the update.
    assert cost.bytes_per_size(optax.scale(0.5), shapes) == pytest.approx(2, rel=1e-3)
    # Reads gradient and trace, writes the trace, which is the update.
    assert cost.bytes_per_size(optax.trace(0.9), shapes) >= 3


@pytest.mark.parametrize(
    ("factors", "answer"),
    [
        ((1.0, 1.1, 1.2, 1.1), "holds"),
        ((1.6, 1.7, 1.8, 1.7), "BROKEN"),
        ((1.0, 1.1, 1.9, 2.0), "undecided"),
    ],
)
def test_a_time_bound_looks_at_the_interval(cost, factors, answer):
    row = cost.Row("znorm()", optax.identity, time_bounds={cost.CLIP: 1.5})
    peer = [10.0, 20.0, 10.0, 40.0]
    ours = [a * b for a, b in zip(peer, factors, strict=True)]
    ((_, text),) = cost.check_times(row, {row.name: ours, cost.CLIP: peer}).items()
    assert text.endswith(f"at most 1.5x: {answer}")


@pytest.mark.parametrize(("moved", "answer"), [(1.3, "holds"), (1.5, "BROKEN")])
def test_a_bytes_bound_is_exact(cost, moved, answer):
    row = cost.Row("znorm()", optax.identity, bytes_bounds={cost.CLIP: 1.4})
    found = cost.check_bytes(row, {row.name: 5.0 * moved, cost.CLIP: 5.0})
    assert list(found.values()) == [f"{moved:.3f}x of at most 1.4x: {answer}"]


def test_a_run(cost, monkeypatch, capsys):
    row = cost.Row(
        "centralize_gradients()",
        transforms.centralize_gradients,
        {cost.CENTRALIZE: 1e-6},
    )
    monkeypatch.setattr(cost, "ROWS", (row,))
    record = cost.main("--rounds 2 --layers 1 --width 8".split())
    assert set(record.rounds) == {*cost.PEERS, row.name}
    assert {len(values) for values in record.rounds.values()} == {2}
    assert f"{row.name} / {cost.CENTRALIZE}" in record.ratios
    bound = record.figures[f"bound, bytes: {row.name} / {cost.CENTRALIZE}"]
    assert isinstance(bound, str) and bound.endswith("BROKEN")
    assert record.verdict == "no evidence"
    version = "_".join(jax.__version__.split(".")[:2])
    assert record.name == f"transforms_cost_jax_{version}"
    assert "BROKEN" in capsys.readouterr().out


def test_left_out(cost, monkeypatch, capsys):
    rows = [row for row in cost.ROWS if row.function in ("znorm", "zclip")]
    monkeypatch.setattr(cost, "ROWS", tuple(rows))
    record = cost.main("--rounds 0 --layers 1 --width 8 --without znorm".split())
    names = {key.removeprefix("bytes / 4N: ") for key in record.figures}
    assert names == {*cost.PEERS, "zclip()"}
    assert record.parameters["without"] == ["znorm"]
    assert not record.rounds and not record.ratios
    assert "verdict: no evidence" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", ["--rounds 1", "--rounds -1", "--layers 0", "--width 12"]
)
def test_unusable_options(cost, arguments, capsys):
    with pytest.raises(SystemExit):
        cost.parse(arguments.split())
    assert arguments.split()[0] in capsys.readouterr().err
