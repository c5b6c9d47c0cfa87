"""benchmarks/device_augment.py at tiny sizes: it runs, and both sides do the same."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxaccel.records import Record

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "device_augment.py"
NAMES = [
    "crop, flip, normalize",
    "resized crop",
    "colour jitter",
    "cutout",
    "random erasing",
    "mixup",
    "cutmix",
]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("device_augment", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_prints_a_record():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            *"--rounds 2 --batch-size 4 --size 8 --json".split(),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    record = Record.from_json(done.stdout)
    assert record.name == "device_augment"
    assert list(record.ratios) == [f"{x}, host / {x}, device" for x in NAMES]
    assert {len(values) for values in record.rounds.values()} == {2}


def test_both_sides_make_the_same_kind_of_batch(script, rng):
    # Eager and unchecked by rank, as the benchmark's own host code is.
    images = rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    labels = rng.integers(0, 10, 6).astype(np.uint8)
    host = script.on_host(images, labels)
    device = script.on_device(images, labels)
    assert list(host) == list(device) == NAMES
    for name in ("cutout", "cutmix", "mixup"):
        ours, theirs = device[name](), host[name]()
        if isinstance(ours, dict):
            ours = (ours["image"], ours["label"])
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_the_plot(script, tmp_path):
    names = [f"{x}, {where}" for x in NAMES for where in ("host", "device")]
    record = Record.create(
        "device_augment",
        "claim",
        verdict="helps",
        parameters={"batch_size": 4, "size": 8, "rounds": 2},
        rounds={name: [1.0 + i, 2.0 + i] for i, name in enumerate(names)},
        ratios=[f"{x}, host / {x}, device" for x in NAMES],
    )
    script.draw(record, tmp_path / "plot.png")
    png = (tmp_path / "plot.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--rounds", "1"], "--rounds must be"), (["--size", "4"], "--size must be")],
)
def test_unusable_options(script, arguments, words, capsys):
    with pytest.raises(SystemExit):
        script.parse(arguments)
    assert words in capsys.readouterr().err


def test_the_method_card_shows_the_records():
    root = SCRIPT.parents[1]
    small, large = (
        Record.read(root / "benchmarks" / "results" / f"device_augment{suffix}.json")
        for suffix in ("", "_large")
    )
    card = (root / "docs" / "methods" / "device-augment.md").read_text(encoding="utf-8")
    for name in NAMES:
        key = f"{name}, host / {name}, device"
        assert f"| {name} | {small.ratios[key]} | {large.ratios[key]} |" in card
