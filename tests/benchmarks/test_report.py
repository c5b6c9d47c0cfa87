import importlib.util
import pathlib

import jax
import pytest

from jaxaccel.records import Headline, Record, paired_ratio

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def report():
    spec = importlib.util.spec_from_file_location(
        "report", ROOT / "benchmarks" / "report.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def place(tmp_path, report):
    """A folder with a README with markers and one record."""
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{report.START}\n{report.END}\n\nafter\n")
    _record("b", [4.0, 4.0]).write(tmp_path / "results")
    return ["--readme", str(readme), "--results", str(tmp_path / "results")], readme


def _record(name, times):
    return Record.create(
        name,
        "claim",
        verdict="helps",
        parameters={},
        rounds={"slow": times, "fast": [1.0, 1.0]},
        ratios=["slow / fast"],
        figures={"size": 3},
        headline=[Headline("speed", "slow|way", "slow / fast")],
    )


def test_readme_agrees_with_the_records(report, capsys):
    code = report.main(["--check"])
    assert code == 0, capsys.readouterr().err


def test_writes_the_table_once(report, place):
    arguments, readme = place
    assert report.main([*arguments, "--check"]) == 1
    assert "| speed |" not in readme.read_text()
    assert report.main(arguments) == 0
    text = readme.read_text()
    row = (
        "| speed | slow\\|way | 4.00x (4.00 to 4.00) | helps "
        f"| [b](benchmarks/results/b.json) ({jax.default_backend()}) |"
    )
    assert row in text.splitlines()
    assert text.startswith("before\n\n<!--") and text.endswith("-->\n\nafter\n")
    assert report.main([*arguments, "--check"]) == 0
    assert report.main(arguments) == 0
    assert readme.read_text() == text


def test_notices_any_change_of_a_record(report, place, capsys):
    arguments, readme = place
    report.main(arguments)
    _record("b", [5.0, 5.0]).write(readme.parent / "results")
    assert report.main([*arguments, "--check"]) == 1
    assert "differs from the records" in capsys.readouterr().err
    report.main(arguments)
    assert report.main([*arguments, "--check"]) == 0
    _record("a", [9.0, 9.0]).write(readme.parent / "results")
    assert report.main([*arguments, "--check"]) == 1


def test_records_without_headline_do_not_appear(report, place):
    arguments, readme = place
    report.main(arguments)
    text = readme.read_text()
    silent = Record.create("c", "claim", verdict="no evidence", parameters={})
    silent.write(readme.parent / "results")
    assert report.main(arguments) == 0
    assert readme.read_text() == text


@pytest.mark.parametrize(
    "text", ["no markers", "{END}\n{START}", "{START}", "{START}{START}{END}"]
)
def test_readme_without_markers(report, place, capsys, text):
    arguments, readme = place
    written = text.format(START=report.START, END=report.END)
    readme.write_text(written)
    assert report.main(arguments) == 2
    assert "README.md" in capsys.readouterr().err
    assert readme.read_text() == written


def test_damaged_record_is_named(report, place, capsys):
    arguments, readme = place
    (readme.parent / "results" / "b.json").write_text("{}")
    assert report.main(arguments) == 2
    assert "b.json is no valid record" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem
)
def test_ratios_follow_from_the_rounds(path):
    record = Record.read(path)
    assert record.name == path.stem
    for key, ratio in record.ratios.items():
        again = paired_ratio(*(record.rounds[name] for name in key.split(" / ")))
        assert ratio.median == pytest.approx(again.median, rel=1e-5)
        # Bootstrap draws may differ between versions of NumPy.
        assert ratio.low == pytest.approx(again.low, rel=0.1)
        assert ratio.high == pytest.approx(again.high, rel=0.1)
