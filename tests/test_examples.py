"""Runs every numbered example as a user would, and checks the figures it prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
MAX_LINES = 100


def check_chain_a_transform(out: str) -> None:
    accuracies = dict(re.findall(r"^(.*?) +test accuracy +([\d.]+)%$", out, re.M))
    found = {name: float(value) for name, value in accuracies.items()}
    assert len(found) == 4
    at_sgds_rate = found.pop("znorm, sgd(0.1)")
    assert min(found.values()) > 96 and max(found.values()) < 100
    assert at_sgds_rate < 50


def check_ship_uint8(out: str) -> None:
    usual, uint8 = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) bytes", out))
    batches, pixels, label = 1437 // 128, 64, 1
    assert uint8 == batches * 128 * (pixels + label)
    assert usual == 4 * uint8
    assert re.search(r"^ratio: +4\.00$", out, re.M)
    assert float(out.split()[-1]) < 1e-6


def check_one_jitted_step(out: str) -> None:
    found = re.findall(r"^step +(\d+): loss ([\d.]+), accuracy ([\d.]+)%$", out, re.M)
    assert [int(step) for step, _, _ in found] == [55, 110, 165, 220]
    losses, accuracies = ([float(row[i]) for row in found] for i in (1, 2))
    assert losses[-1] < losses[0] < 2.3
    assert accuracies[-1] > 80
    assert "compilations of the step: 1\n" in out
    assert "first parameters was reused: True\n" in out
    assert "own arrays are alive: True\n" in out


def check_linen_and_nnx(out: str) -> None:
    rows = re.findall(r"^step +(\d+): linen ([\d.]+), nnx ([\d.]+)$", out, re.M)
    assert [int(step) for step, _, _ in rows] == [1, 10, 44]
    for _, linen, nnx in rows:
        assert float(linen) == pytest.approx(float(nnx), abs=2e-4)
    assert float(rows[-1][1]) < float(rows[0][1]) / 2
    assert float(out.split()[-1]) < 1e-4


def check_a_transform_of_your_own(out: str) -> None:
    rows = re.findall(r"^(\w.*?) +first loss ([\d.]+), last loss ([\d.]+)$", out, re.M)
    assert [name for name, _, _ in rows] == ["seed 0", "again", "seed 1"]
    first, last = ([row[i] for row in rows] for i in (1, 2))
    # The first loss is computed before any noise.
    assert len(set(first)) == 1
    assert last[0] == last[1] != last[2]
    assert max(map(float, last)) < float(first[0]) / 2


def check_read_any_format(out: str) -> None:
    rows = re.findall(
        r"^(\w+)\((\d+) examples, image: uint8\[8, 8, 1\], label: uint8\[\]\), "
        r"pixels as they were: (\w+)$",
        out,
        re.M,
    )
    assert rows == [(k, "1437", "True") for k in ("ImageFolderStore", "ArrowStore")]
    assert "\n1437 examples compared with their sidecar\n" in out
    assert 90 < float(re.findall(r"^test accuracy ([\d.]+)%$", out, re.M)[0]) < 100


def check_resume(out: str) -> None:
    first, killed, resumed, whole, bits = out.splitlines()
    assert first == whole == "from step 0 on"
    assert killed == "the process ended with code -9"
    # Saved every ten steps, killed at 37: the last one may not be complete yet.
    assert resumed in ("from step 20 on", "from step 30 on")
    found = re.fullmatch(r"(\d+) bytes, the same bits: True", bits)
    assert found and int(found[1]) > 3 * 4 * (64 * 32 + 32 * 10)


def check_quantize(out: str) -> None:
    sizes = re.findall(r"^(conv\w+|dense\w+|total) .* ([\d.]+)$", out, re.M)
    assert [name.split("_")[0] for name, _ in sizes] == ["conv", "dense", "total"]
    assert 3.5 < float(sizes[-1][1]) < 4
    found = dict(re.findall(r"^(float32|int8) +([\d.]+)%$", out, re.M))
    accuracies = {name: float(value) for name, value in found.items()}
    assert set(accuracies) == {"float32", "int8"} and accuracies["float32"] > 95
    assert abs(accuracies["int8"] - accuracies["float32"]) < 1
    assert out.endswith("C: main.c, net.c, net.h\n")


# One entry an example: a new one fails until it says here what it prints.
CHECKS = {
    "01_chain_a_transform": check_chain_a_transform,
    "02_ship_uint8": check_ship_uint8,
    "03_one_jitted_step": check_one_jitted_step,
    "04_linen_and_nnx": check_linen_and_nnx,
    "05_a_transform_of_your_own": check_a_transform_of_your_own,
    "06_read_any_format": check_read_any_format,
    "07_resume": check_resume,
    "08_quantize": check_quantize,
}


def run(script: Path, folder: Path) -> str:
    # The suite's eight virtual devices are not what a user has.
    env = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder,
        env={**env, "JAXACCEL_DATA": str(folder), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example(script, tmp_path):
    CHECKS[script.stem](run(script, tmp_path))
    assert not any(tmp_path.iterdir()), "an example must leave nothing behind"


def test_every_check_has_its_example():
    assert set(CHECKS) == {script.stem for script in EXAMPLES}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_is_short_and_says_how_to_run_it(script):
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) < MAX_LINES
    docstring = text.split('"""')[1].strip().splitlines()
    assert docstring[-1] == f"    python examples/{script.name}"
    prose = [line for line in docstring[1:-1] if line]
    assert 2 <= len(prose) <= 5, "title line, then 2 to 5 lines of what it shows"


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda script: script.stem)
def test_example_uses_public_names_alone(script):
    text = script.read_text(encoding="utf-8")
    assert not re.search(r"(from|import) jaxaccel[\w.]*\._", text)
    assert not re.search(r"\b(data|train|transforms)\._\w", text)
