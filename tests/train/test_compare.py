"""Runs side by side, from logs of both kinds."""

import numpy as np
import pytest
from PIL import Image

from jaxaccel import train


def write(writer, losses, accuracies):
    with writer:
        for step, loss in enumerate(losses):
            writer.scalars(step, {"loss": loss})
        for step, accuracy in accuracies.items():
            writer.scalars(step, {"eval": {"accuracy": accuracy}})


@pytest.fixture
def runs(tmp_path):
    json_dir, board_dir = tmp_path / "grid" / "a", tmp_path / "grid" / "b"
    write(train.JsonLinesWriter(json_dir), [3.0, 1.0, 2.0], {0: 0.25, 2: 0.125})
    write(train.TensorBoardWriter(board_dir), [3.0, float("nan")], {1: 0.5})
    return [json_dir, board_dir]


def test_values_and_table(runs):
    comparison = train.compare(runs)
    assert list(comparison.runs) == ["a", "b"]
    assert comparison.metrics == ("loss", "eval/accuracy")
    steps, values = comparison.runs["a"]["loss"]
    assert steps.tolist() == [0, 1, 2] and values.tolist() == [3.0, 1.0, 2.0]
    steps, values = comparison.runs["b"]["eval/accuracy"]
    assert steps.tolist() == [1] and values.tolist() == [0.5]
    assert str(comparison).splitlines() == [
        "                          a        b",
        "loss                  2 (1)  nan (3)",
        "eval/accuracy  0.125 (0.25)      0.5",
    ]
    assert comparison.table(["loss"]).count("\n") == 1


def test_the_later_value_of_a_step_counts_and_steps_are_sorted(tmp_path):
    with train.JsonLinesWriter(tmp_path) as writer:
        for step, loss in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 20.0)]:
            writer.scalars(step, {"loss": loss})
        writer.text(3, "note", "hello")
    [run] = train.compare([tmp_path]).runs.values()
    assert list(run) == ["loss"]
    assert run["loss"][1].tolist() == [1.0, 20.0, 3.0]


def test_plot_is_a_picture_with_a_line_a_run(runs, tmp_path):
    path = tmp_path / "runs.png"
    train.compare(runs).plot(path, ["loss"])
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    colours = {tuple(x) for x in pixels.tolist()}
    assert (31, 119, 180) in colours and (255, 127, 14) in colours


def test_a_metric_that_one_run_lacks(tmp_path):
    for name in ("a", "b"):
        with train.JsonLinesWriter(tmp_path / name) as writer:
            writer.scalars(0, {"loss": 1.0, name: 2.0})
    comparison = train.compare([tmp_path / "a", tmp_path / "b"])
    assert comparison.table(["a"]).splitlines()[1].split() == ["a", "2", "-"]
    with pytest.raises(ValueError, match=r"no run has \['c'\].*'loss', 'a', 'b'"):
        comparison.table(["c"])


def test_a_killed_runs_event_file_and_a_damaged_one(runs):
    [path] = runs[1].glob("events.*")
    data = path.read_bytes()
    path.write_bytes(data[:-3])
    assert "eval/accuracy" not in train.compare([runs[1]]).runs["b"]
    path.write_bytes(b"\xff" * 8 + data[8:])
    with pytest.raises(ValueError, match="damaged before byte 12; remove"):
        train.compare([runs[1]])


def test_folders_are_checked(runs, tmp_path):
    with pytest.raises(ValueError, match="pass their log folders"):
        train.compare([])
    with pytest.raises(ValueError, match="named once"):
        train.compare([runs[0], runs[0]])
    with pytest.raises(ValueError, match="holds no log: neither metrics.jsonl"):
        train.compare([tmp_path / "missing"])
    assert list(train.compare([runs[0], runs[0].parent / "b"]).runs) == ["a", "b"]
