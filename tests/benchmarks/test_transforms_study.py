import importlib
import math
import pathlib
import sys

import jax
import numpy as np
import pytest
from scipy import stats

from jaxaccel.data import ArrayStore
from jaxaccel.records import Record

ROOT = pathlib.Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def _import(name):
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


data = _import("study_data")
runs_module = _import("study_runs")
statistics = _import("study_statistics")
study = _import("transforms_study")
RunList, Outcome = runs_module.RunList, runs_module.Outcome

SETTING = ("fashion_mnist", "residual", "sgd")
SMALL = (
    "--datasets fashion_mnist --networks residual --optimizers sgd "
    "--transforms none centralize --seeds 2 --epochs 2 --train-images 64 "
    "--validation-images 20 --test-images 30 --batch-size 32 --widths 2 2 --blocks 1"
)


def _options(folder, more=""):
    places = f" --runs {folder / 'runs.jsonl'} --out {folder / 'out'} "
    return study.parse((SMALL + places + more).split())


def _outcome(validation, test=None, losses=None):
    return Outcome(
        validation_accuracies=list(validation),
        losses=[1.0] * len(validation) if losses is None else losses,
        test_accuracy=test,
        seconds=[2.0] * len(validation),
        cpu_seconds=[3.0] * len(validation),
        wall_seconds=5.0,
        jax="0",
    )


def _fake(spec):
    """A run whose best learning rate is 0.03, better with centralization."""
    off = abs(math.log10(spec.learning_rate / 0.03))
    gain = 0.05 * (spec.transform == "centralize") + 0.002 * spec.seed
    accuracy = 0.6 - 0.1 * off + gain
    final = spec.phase == "final"
    return _outcome([accuracy - 0.2, accuracy], accuracy - 0.01 if final else None)


# ----------------------------------------------------------------------------- data


def _numbered(height, width):
    """An image whose pixels are all different: their numbers in three bytes."""
    numbers = np.arange(height * width).reshape(height, width)
    return np.stack([numbers >> 16, numbers >> 8, numbers], axis=-1).astype(np.uint8)


def _numbers(images):
    wide = images.astype(np.int64)
    return (wide[..., 0] << 16) + (wide[..., 1] << 8) + wide[..., 2]


def test_splits_share_no_pixel(rng):
    height, width = 300, 451
    pixels = _numbered(height, width)
    parts = data.split_blocks(pixels.shape, rng)
    assert [len(part) for part in parts] == [17, 4, 7]
    seen = []
    for blocks in parts:
        numbers = _numbers(data.cut(pixels, blocks, 500, rng))
        rows, columns = np.divmod(numbers, width)
        assert (np.diff(rows, axis=1) == 1).all()
        assert (np.diff(columns, axis=2) == 1).all()
        corners = numbers[:, 0, 0]
        assert len(set(corners.tolist())) == 500
        # First and last pixel of every patch are in blocks of its split.
        own = {(row // 64, column // 64) for row, column in blocks.tolist()}
        for corner in (0, -1):
            places = rows[:, corner, corner] // 64, columns[:, corner, corner] // 64
            assert set(zip(*(x.tolist() for x in places), strict=True)) == own
        seen.append(set(numbers.ravel().tolist()))
    assert not (seen[0] & seen[1] or seen[0] & seen[2] or seen[1] & seen[2])


def test_too_many_patches(rng):
    blocks = np.array([[0, 0]])
    assert len(data.cut(_numbered(64, 64), blocks, 33**2, rng)) == 33**2
    with pytest.raises(ValueError, match="at most 10890 images"):
        data.cut(_numbered(64, 64), blocks, 33**2 + 1, rng)


def test_photo_patches():
    pytest.importorskip("skimage")
    splits = data.load("photo_patches", 45, 20, 31)
    for store, size in zip(
        (splits.train, splits.validation, splits.test), (45, 20, 31), strict=True
    ):
        assert store.spec["image"].shape == (32, 32, 3)
        assert store.spec["image"].dtype == store.spec["label"].dtype == np.uint8
        counts = np.bincount(store.columns["label"], minlength=10)
        assert counts.sum() == size and counts.max() - counts.min() <= 1
    pixels = splits.train.columns["image"] / 255
    np.testing.assert_allclose(splits.mean, pixels.mean((0, 1, 2)))
    np.testing.assert_allclose(splits.std, pixels.std((0, 1, 2)))
    again = data.load("photo_patches", 45, 20, 31)
    assert (again.train.columns["image"] == splits.train.columns["image"]).all()


def test_photos_without_their_packages(monkeypatch):
    monkeypatch.setattr(data.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"jaxaccel\[study\]"):
        data.read_photo("cat")


# ------------------------------------------------------------------------- run list


@pytest.fixture
def spec(tmp_path):
    options = _options(tmp_path)
    return study.make_spec(options, SETTING, "centralize", "tune", 0.1, 0)


def test_run_list_keeps_runs(tmp_path, spec):
    path = tmp_path / "folder" / "runs.jsonl"
    runs = RunList(path)
    outcome = _outcome([0.5], losses=[None])
    assert len(runs) == 0 and spec not in runs
    runs.add(spec, outcome)
    again = RunList(path)
    assert list(again) == [spec] and again[spec] == outcome and outcome.diverged


@pytest.mark.parametrize("kept", [1, 100, -1])
def test_a_line_cut_short_is_run_again(tmp_path, spec, capsys, kept):
    path = tmp_path / "runs.jsonl"
    other = study.make_spec(_options(tmp_path), SETTING, "none", "tune", 0.1, 0)
    runs = RunList(path)
    runs.add(spec, _outcome([0.5]))
    whole = path.read_text()
    runs.add(other, _outcome([0.6]))
    second = path.read_text()[len(whole) :]
    # The line's end is cut as well: all that is left lacks its newline.
    path.write_text(whole + second[:kept].rstrip("}\n"))
    runs = RunList(path)
    assert list(runs) == [spec]
    assert "line 2 is damaged" in capsys.readouterr().err
    runs.add(other, _outcome([0.7]))
    again = RunList(path)
    assert again[spec].validation_accuracies == [0.5]
    assert again[other].validation_accuracies == [0.7]


def test_lines_of_another_kind(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"spec": {"phase": "tune"}}\n')
    with pytest.raises(ValueError, match="runs.jsonl, line 1 is no run"):
        RunList(path)


# ----------------------------------------------------------------------------- plan


@pytest.mark.parametrize("best", [1e-5, 1e-3, 0.03, 0.1, 3.0])
def test_the_walk_finds_the_best_rate_and_its_neighbours(tmp_path, best):
    options, runs = _options(tmp_path), RunList(tmp_path / "runs.jsonl")
    while not isinstance(found := study.tune(options, runs, SETTING, "none"), float):
        assert found not in runs
        off = abs(math.log10(found.learning_rate / best))
        runs.add(found, _outcome([0.9 - 0.1 * off]))
    assert found == best
    tried = [spec.learning_rate for spec in runs]
    index = study.nearest(best)
    assert {study.rate_at(index - 1), best, study.rate_at(index + 1)} <= set(tried)
    assert len(tried) == len(set(tried)) <= 3 + abs(index - study.nearest(0.1))


def test_a_rate_that_diverges_is_never_chosen(tmp_path):
    options, runs = _options(tmp_path), RunList(tmp_path / "runs.jsonl")
    while not isinstance(found := study.tune(options, runs, SETTING, "none"), float):
        lost = found.learning_rate > 0.02
        # As high an accuracy as can be: only the loss tells.
        outcome = _outcome([1.0], losses=[None]) if lost else _outcome([0.2])
        runs.add(found, outcome)
    assert found == 0.01


def test_ends_of_the_grid(tmp_path):
    options, runs = _options(tmp_path), RunList(tmp_path / "runs.jsonl")
    while not isinstance(found := study.tune(options, runs, SETTING, "none"), float):
        runs.add(found, _outcome([min(1.0, 0.3 + 0.01 * found.learning_rate)]))
    assert found == study.rate_at(study.GRID[-1]) == 10.0


def test_interrupted_and_whole_studies_do_the_same_runs(tmp_path):
    options = _options(tmp_path)
    whole = RunList(tmp_path / "whole.jsonl")
    for spec in study.remaining(options, whole):
        whole.add(spec, _fake(spec))
    path = tmp_path / "parts.jsonl"
    done = True
    while done:
        done = 0
        runs = RunList(path)
        for spec in study.remaining(options, runs):
            runs.add(spec, _fake(spec))
            done += 1
            if done == 3:
                break
    assert list(RunList(path)) == list(whole)
    finals = [spec for spec in whole if spec.phase == "final"]
    assert [(s.transform, s.seed) for s in finals] == [
        ("none", 1), ("centralize", 1), ("none", 2), ("centralize", 2),
    ]  # fmt: skip
    assert {spec.learning_rate for spec in finals} == {0.03}


def test_budget(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "train_once", _fake)
    options = _options(tmp_path, "--budget-minutes 1e-6")
    runs = RunList(options.runs)
    study.work(options, runs)
    assert len(runs) == 0 and "out of budget after 0 runs" in capsys.readouterr().out
    options.budget_minutes = math.inf
    study.work(options, runs)
    assert len(runs) == 12
    assert study.count_remaining(options, runs) == (0, 0)


def test_plan_estimates(tmp_path):
    options = _options(tmp_path)
    text = study.describe_plan(options, RunList(options.runs))
    assert "1 settings x 2 transformations: none, centralize" in text
    assert "about 8 runs to tune and 4 to compare" in text


@pytest.mark.parametrize(
    "arguments",
    ["--seeds 1", "--epochs 0", "--budget-minutes 0", "--batch-size 65"],
)
def test_unusable_options(tmp_path, capsys, arguments):
    with pytest.raises(SystemExit):
        _options(tmp_path, arguments)
    assert arguments.split()[0] in capsys.readouterr().err


# ----------------------------------------------------------------------- statistics


def test_mean_is_a_t_interval(rng):
    values = rng.normal(3.0, 2.0, 7)
    found = statistics.mean(values.tolist())
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose((found.low, found.high), expected)
    assert math.isinf(statistics.mean([1.0]).half_width)


@pytest.mark.parametrize(
    ("target", "expected"),
    [(0.1, 0.0), (0.3, 5.0), (0.5, 10.0), (0.6, 20.0), (0.65, 25.0), (0.71, None)],
)
def test_cost_until_the_target(target, expected):
    # From chance, 10 %, to 50 %; a setback; then past 50 % again.
    found = statistics.until([0.5, 0.6, 0.55, 0.7], [10.0, 10.0, 2.0, 6.0], target)
    if target == 0.65:
        expected = 22.0 + 6.0 * (0.65 - 0.55) / (0.7 - 0.55)
    assert found == (None if expected is None else pytest.approx(expected))


def _cell(name, finals, validation):
    outcomes = {
        seed: _outcome([v / 2, v], f)
        for seed, (f, v) in enumerate(zip(finals, validation, strict=True), 1)
    }
    return statistics.Cell(name, 0.1, outcomes, target=0.5)


@pytest.mark.parametrize(
    ("gains", "effect"),
    [
        ([0.05, 0.051, 0.049, 0.05], "better"),
        ([-0.05, -0.051, -0.049, -0.05], "worse"),
        ([0.05, -0.05, 0.04, -0.04], "none shown"),
    ],
)
def test_comparison_is_paired(gains, effect):
    base = [0.5, 0.9, 0.6, 0.8]
    validation = [0.6] * 4
    ours = _cell(
        "centralize", [a + b for a, b in zip(base, gains, strict=True)], validation
    )
    found = statistics.compare(ours, _cell("none", base, validation), comparisons=4)
    assert found.effect == effect
    assert found.accuracy.value == pytest.approx(100 * np.mean(gains))
    assert found.epochs.value == pytest.approx(0.0)


def test_sooner_is_better_and_unreached_targets_are_no_speed():
    base = [0.5, 0.6, 0.7]
    slow = _cell("none", base, [0.6, 0.61, 0.62])
    fast = _cell("znorm", base, [0.9, 0.91, 0.92])
    found = statistics.compare(fast, slow, comparisons=1)
    assert found.effect == "better" and found.epochs.high < 0
    never = _cell("znorm", base, [0.9, 0.91, 0.4])
    assert statistics.compare(never, slow, comparisons=1).epochs is None


def test_one_seed_shows_nothing():
    found = statistics.compare(
        _cell("znorm", [0.9], [0.9]), _cell("none", [0.1], [0.6]), comparisons=1
    )
    assert found.effect == "none shown"


@pytest.mark.parametrize(
    ("effects", "expected"),
    [
        (["none shown", "better"], "helps"),
        (["better", "worse"], "trade-off"),
        (["mixed"], "trade-off"),
        (["none shown", "worse"], "no evidence"),
        (["none shown"], "no evidence"),
    ],
)
def test_verdicts(effects, expected):
    assert statistics.verdict(effects) == expected


# ---------------------------------------------------------------------------- whole


@pytest.fixture
def random_images(monkeypatch):
    def load(*sizes):
        rng = np.random.default_rng(0)
        return tuple(
            ArrayStore(
                {
                    "image": rng.integers(256, size=(n, 8, 8, 1), dtype=np.uint8),
                    "label": rng.integers(10, size=n, dtype=np.uint8),
                }
            )
            for n in sizes
        )

    monkeypatch.setitem(data.LOADERS, "fashion_mnist", load)
    # Optax's schedules and Flax's norms promote, as a user's settings let them.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_a_whole_small_study(tmp_path, random_images, capsys):
    arguments = f"{SMALL} --runs {tmp_path / 'r.jsonl'} --out {tmp_path}".split()
    assert study.main(arguments) == 0
    capsys.readouterr()
    lines = (tmp_path / "r.jsonl").read_text().splitlines()
    text = (tmp_path / "transforms_study.md").read_text()
    png = tmp_path / "transforms_study_fashion_mnist_residual_sgd.png"
    assert png.read_bytes().startswith(b"\x89PNG")
    record = Record.read(tmp_path / "transforms_study_centralize.json")
    assert {len(values) for values in record.rounds.values()} == {2}
    assert record.parameters["seeds of the rounds"] == [1, 2]
    assert "Fashion-MNIST, residual, SGD: effect" in record.figures
    assert "seeds finished: none 2, znorm 0, centralize 2" in text
    assert "**Not run**: Fashion-MNIST, residual, AdamW" in text
    assert str(tmp_path) not in text

    runs = RunList(tmp_path / "r.jsonl")
    final = [spec for spec in runs if spec.phase == "final"]
    assert len(final) == 4
    for spec in runs:
        assert (runs[spec].test_accuracy is None) == (spec.phase == "tune")
        assert len(runs[spec].validation_accuracies) == 2

    # A kill within the last line: that run, and no other, is done again, and from
    # the same seed it ends the same.
    (tmp_path / "r.jsonl").write_text("\n".join([*lines[:-1], lines[-1][:50]]))
    assert study.main(arguments) == 0
    again = RunList(tmp_path / "r.jsonl")
    assert list(again) == list(runs)
    last = list(runs)[-1]
    assert again[last].losses == runs[last].losses
    assert again[last].test_accuracy == runs[last].test_accuracy


def test_report_without_runs(tmp_path, capsys):
    arguments = f"{SMALL} --runs {tmp_path / 'r.jsonl'} --out {tmp_path} --report"
    assert study.main(arguments.split()) == 0
    assert "nothing to report" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


CARDS = {
    "znorm": ["znorm", "znorm_unit"],
    "gradient-centralization": ["centralize"],
    "clipping": ["clip_by_global_norm"],
    "adaptive-clipping": ["adaptive_grad_clip"],
    "zclip": ["zclip"],
    "adagc": ["adagc"],
    "autoclip": ["autoclip"],
    "grokfast": ["grokfast_ema"],
}


@pytest.mark.parametrize("card", CARDS)
def test_the_cards_show_what_the_records_hold(card):
    text = (ROOT / "docs/methods" / f"{card}.md").read_text(encoding="utf-8")
    records = [
        Record.read(ROOT / "benchmarks/results" / f"transforms_study_{name}.json")
        for name in CARDS[card]
    ]
    end = ": accuracy, points"
    settings = [key[: -len(end)] for key in records[0].figures if key.endswith(end)]
    assert len(settings) == 8
    for setting in settings:
        gains = [str(record.figures[setting + end]) for record in records]
        assert f"| {setting} | {' | '.join(gains)} |" in text
