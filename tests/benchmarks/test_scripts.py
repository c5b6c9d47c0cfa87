import json
import os
import pathlib
import subprocess
import sys

import pytest

from jaxaccel.records import Record

ROOT = pathlib.Path(__file__).parents[2]
CONTENDERS = [
    "float32, naive",
    "float32, careful",
    "uint8, plain",
    "uint8",
    "uint8, normalized",
]


def _run(script, *arguments):
    # Tests set eight devices; a script is run as its user would run it.
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_host_to_device():
    arguments = "--rounds 2 --batches 1 --batch-size 8 --size 4 --examples 32".split()
    record = Record.from_json(_run("host_to_device.py", *arguments, "--json"))
    assert list(record.rounds) == CONTENDERS
    assert {len(values) for values in record.rounds.values()} == {2}
    assert record.figures["bytes a batch, uint8"] == 8 * (4 * 4 * 3 + 1)
    assert record.figures["bytes a batch, float32, naive"] == 8 * (4 * 4 * 3 * 4 + 4)
    assert record.figures["bytes ratio"] == "4.00x"
    assert "float32, naive / uint8" in record.ratios
    assert record.name == "host_to_device"


def test_loader_cost():
    arguments = (
        "--rounds 2 --batch-sizes 8 16 --size 4 --examples 64 --grain-examples 16"
    )
    text = _run("loader_cost.py", *arguments.split())
    for size in (8, 16):
        for name in ("loader", "loader, thread"):
            assert f"{name}, batch {size} / X[idx], batch {size}" in text
        assert f"Grain, items, batch {size} / loader, batch {size}" in text
    assert text.splitlines()[-1].startswith("verdict: ")


def test_transfer_figure(tmp_path):
    arguments = (
        "--rounds 2 --steps 3 --small-size 8 --small-batch 4 --large-size 12 "
        f"--large-batch 2 --out {tmp_path}"
    )
    text = _run("transfer_figure.py", *arguments.split())
    png = (tmp_path / "transfer_figure.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 20_000
    table = (tmp_path / "transfer_figure.md").read_text()
    assert table in text
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    assert [row[2] for row in rows[2:]] == ["2"] * 4
    images, labels = 4 * 8 * 8, 4
    large = 2 * 12 * 12 * 3
    assert [int(row[3].replace(",", "")) for row in rows[2:]] == [
        4 * images + 4 * labels,
        images + labels,
        4 * large + 4 * 2,
        large + 2,
    ]
    record = Record.read(tmp_path / "transfer_figure.json")
    assert len(record.ratios) == 2
    assert {len(values) for values in record.rounds.values()} == {2}
    assert str(tmp_path) not in json.dumps(record.to_json())


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("host_to_device.py", "--rounds 1", "--rounds must be at least 2"),
        ("loader_cost.py", "--grain-examples 1", "at least one batch"),
        ("transfer_figure.py", "--steps 2", "--steps at least 3"),
    ],
)
def test_unusable_options(script, arguments, message):
    with pytest.raises(AssertionError, match=message):
        _run(script, *arguments.split())


@pytest.mark.parametrize("part", ["peers", "starvation", "formats"])
def test_input_pipeline(part, tmp_path):
    arguments = f"--part {part} --rounds 2 --examples 300 --batch-size 8 --batches 2"
    plot = tmp_path / "plot.png"
    text = _run("input_pipeline.py", *arguments.split(), "--json", "--plot", plot)
    record = Record.from_json(text[: text.rindex("}") + 1])
    assert record.name.startswith(f"input_pipeline_{part}")
    assert {len(values) for values in record.rounds.values()} == {2}
    assert plot.read_bytes().startswith(b"\x89PNG")
    if part != "starvation":
        assert record.ratios and record.figures
