"""benchmarks/aggregation.py at a tiny size: it runs, and its contenders agree."""

import importlib.util
import pathlib

import numpy as np
import pytest

from jaxaccel.records import Record

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    path = ROOT / "benchmarks" / "aggregation.py"
    spec = importlib.util.spec_from_file_location("aggregation", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:Sparse")
def test_it_measures_and_draws(script, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    arguments = "--nodes 60 --degree 4 --features 8 --rounds 2 --json --record --plot"
    record = script.main(arguments.split())
    assert record == Record.from_json(capsys.readouterr().out)
    assert record.name == "aggregation_degree_4"
    assert "segment_sum / jaxaccel" in record.ratios
    assert (tmp_path / "aggregation_degree_4.png").stat().st_size > 5000


@pytest.mark.filterwarnings("ignore:Sparse")
def test_all_contenders_compute_the_same(script, rng):
    g = script.power_law(40, 5)
    x = rng.normal(size=(40, 3)).astype(np.float32)
    contenders = script.make_contenders(g, x)
    wanted = contenders["SciPy"]()
    for name in ("jaxaccel", "segment_sum", "BCSR"):
        np.testing.assert_allclose(contenders[name](), wanted, atol=1e-5)
    np.testing.assert_allclose(contenders["jaxaccel, gradient"]()[0], wanted, atol=1e-5)


def test_the_card_shows_what_the_record_holds():
    record = Record.read(ROOT / "benchmarks/results/aggregation.json")
    text = (ROOT / "docs/methods/scatter-free-aggregation.md").read_text("utf-8")
    text = " ".join(text.split())
    for name in ("segment_sum", "BCSR", "SciPy", "torch"):
        assert f"| {record.figure(f'{name} / jaxaccel')} |" in text
    assert record.figure("jaxaccel, gradient / jaxaccel") in text
    for name in ("temporary memory, MB", "edges times features, MB"):
        assert f"{record.figure(name)} MB" in text
