"""benchmarks/step_overhead.py at tiny sizes, and the figures that are exact."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from jaxaccel.records import Record

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "step_overhead.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("step_overhead", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_prints_records_with_ratios():
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [
            sys.executable,
            str(SCRIPT),
            *"--part overhead --rounds 2 --steps 3 --json".split(),
        ],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    record = Record.from_json(done.stdout)
    assert record.name == "step_overhead"
    assert {"our loop / by hand", "our step / by hand"} <= set(record.ratios)
    assert {len(values) for values in record.rounds.values()} == {2}


def test_all_contenders_train_alike(script):
    module = script.Dense()
    batches = script.make_batches((4, 8, 8, 1), 3)
    by_hand = script.by_hand(module, batches, 6, donate=True, read_every=None)
    ours = script.our_step(module, batches, 6)
    losses = by_hand()
    np.testing.assert_allclose(losses, ours(), rtol=1e-5)
    assert losses[3] < losses[0]


def test_exact_figures(script):
    (guarded,) = script.main(["--part", "guard"])
    for name in script.NETWORKS:
        assert float(guarded.figures[f"{name}: ratio"][:-1]) <= script.GUARD_BOUND
    (memory,) = script.main(["--part", "memory"])
    kept = [
        memory.figures[f"kept for the backward pass, {policy}: MB"]
        for policy in ("everything_saveable", "dots_saveable", "nothing_saveable")
    ]
    assert kept[0] > kept[1] > kept[2]
    held = memory.figures["parameters and optimizer state, bytes"]
    assert memory.figures["aliased by donation, bytes"] >= held
    temporary = [
        memory.figures[f"{name}: temporary MB"]
        for name in ("as it is", "accumulate=2", "accumulate=4", "accumulate=8")
    ]
    assert temporary == sorted(temporary, reverse=True)


def test_keras_is_left_out_where_it_is_missing(script, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(ImportError, match="pip install keras"):
        script.in_keras([], 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert script.all_parts() == [part for part in script.PARTS if part != "keras"]


CARDS = {
    "steps-per-call": ("steps_per_call", ["one step a call / 16 steps a call"]),
    "gradient-accumulation": (
        "step_memory",
        [
            *(
                f"{name}: temporary MB"
                for name in ("as it is", "accumulate=2", "accumulate=4", "accumulate=8")
            ),
            *(f"accumulate={pieces}: memory saved" for pieces in (2, 4, 8)),
        ],
    ),
    "rematerialization": (
        "step_memory",
        [
            *(
                f"kept for the backward pass, {policy}: MB"
                for policy in (
                    "everything_saveable",
                    "dots_saveable",
                    "nothing_saveable",
                )
            ),
            "as it is: temporary MB",
            "rematerialize='dots_saveable': temporary MB",
            "rematerialize='nothing_saveable': temporary MB",
        ],
    ),
    "donation": (
        "step_memory",
        [
            "aliased by donation, bytes",
            "parameters and optimizer state, bytes",
        ],
    ),
}


def read(name):
    return Record.read(ROOT / "benchmarks/results" / f"{name}.json")


def read_card(card):
    text = (ROOT / "docs/methods" / f"{card}.md").read_text(encoding="utf-8")
    return " ".join(text.split())


@pytest.mark.parametrize("card", CARDS)
def test_the_cards_show_what_the_records_hold(card):
    name, figures = CARDS[card]
    record, text = read(name), read_card(card)
    for figure in figures:
        assert str(record.figure(figure)) in text


def test_the_card_of_the_guard_shows_both_versions_of_jax():
    records = [read(f"finite_guard_jax_0_{minor}") for minor in (10, 12)]
    text = read_card("finite-guard")
    versions = " | ".join(f"jax {record.versions['jax']}" for record in records)
    assert f"| {versions} |" in text
    for network in ("dense", "conv"):
        ratios = [record.figures[f"{network}: ratio"] for record in records]
        assert f"| {' | '.join(map(str, ratios))} |" in text


def test_the_card_of_mixed_precision_shows_its_table():
    record, text = read("precision"), read_card("mixed-precision")
    assert f"{record.parameters['epochs']} epochs" in text
    assert f"{record.parameters['seeds']} seeds" in text
    for name in ("float32", "bfloat16", "float16"):
        cells = [
            record.figures[f"{name}, seed {seed}: test accuracy, %"]
            for seed in range(record.parameters["seeds"])
        ]
        gap = record.figures.get(f"{name} - float32, points, mean", "")
        assert " ".join(f"| {name} | {cells[0]} | {cells[1]} | {gap} |".split()) in text
    gaps = [
        float(record.figures[f"bfloat16, seed {seed}: test accuracy, %"])
        - float(record.figures[f"float32, seed {seed}: test accuracy, %"])
        for seed in range(2)
    ]
    assert f"from {gaps[0]:+.2f} to {gaps[1]:+.2f}" in text
