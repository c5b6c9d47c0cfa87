"""The main trainer, on the data set that needs no network."""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jaxaccel import data

SCRIPT = (
    pathlib.Path(__file__).parents[2] / "examples" / "trainers" / "image_classifier.py"
)


@pytest.fixture(scope="module")
def trainer():
    spec = importlib.util.spec_from_file_location("image_classifier", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # A script finds the modules beside it.
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        patch.setitem(sys.modules, "image_classifier", module)
        spec.loader.exec_module(module)
        yield module


def run(trainer, *options):
    # As users run it; Optax's adam needs implicit promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return trainer.main(["--dataset", "digits", *map(str, options)])


def events_of(logdir):
    events = EventAccumulator(str(logdir))
    events.Reload()
    return events


@pytest.fixture(scope="module")
def finished(trainer, tmp_path_factory):
    """Results, log folder and printed text of one whole run."""
    logdir, printed = tmp_path_factory.mktemp("logs"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        results = run(trainer, "--epochs", 12, "--batch-size", 64, "--logdir", logdir)
    return results, logdir, printed.getvalue()


def test_three_rows_exact_bytes_and_one_compilation_each(finished):
    results, _, printed = finished
    host, device, znorm = results
    # The usual way ships float32 pixels and int32 labels, 1437 // 64 batches.
    assert host.bytes_per_epoch == 22 * 64 * (8 * 8 * 4 + 4)
    assert host.bytes_per_epoch == 4 * device.bytes_per_epoch
    assert device.bytes_per_epoch == znorm.bytes_per_epoch
    for result in results:
        assert result.compilations == 1
        assert result.reading.examples == (12 * 22 - 1) * 64
        assert len(result.accuracies) == len(result.losses) == 12
        assert result.accuracies[-1] > 0.8
        assert result.losses[-1] < 0.5 * result.losses[0]
    assert "a / b: 4.00x" in printed
    for name in ("a float32 on the host", "b uint8, in the step", "c b + znorm"):
        assert name in printed


def test_logs_hold_scalars_layer_norms_and_images(finished):
    _, logdir, _ = finished
    assert (logdir / "learning_curves.png").stat().st_size > 10_000
    assert all((logdir / row / "weights").is_dir() for row in "abc")
    for row in "abc":
        events = events_of(logdir / row)
        tags = set(events.Tags()["scalars"])
        assert {"loss", "accuracy", "learning_rate", "held_out/accuracy"} <= tags
        assert {"gradient_norm/convs/0/kernel", "gradient_norm/head/bias"} <= tags
        assert [e.step for e in events.Scalars("loss")] == list(range(1, 12 * 22 + 1))
        assert all(e.value > 0 for e in events.Scalars("gradient_norm/head/kernel"))
        assert events.Tags()["images"]


@pytest.mark.parametrize(
    "options",
    [
        ("--transform", "none", "--augment", "none", "--optimizer", "adam"),
        ("--transform", "clip", "--precision", "bfloat16", "--crop-pad", "2"),
        ("--transform", "none", "--precision", "float16", "--optimizer", "adam"),
    ],
    ids=lambda options: " ".join(options),
)
def test_options_train(trainer, tmp_path, options):
    results = run(trainer, "--epochs", 2, "--logdir", tmp_path, *options)
    assert len(results) == (2 if "none" in options[:2] else 3)
    for result in results:
        assert np.all(np.isfinite(result.losses))
        assert result.losses[-1] < result.losses[0]


@pytest.mark.slow
def test_tune_never_sees_the_test_set(trainer, capsys, monkeypatch):
    dataset = data.load_dataset("digits")
    seen = []
    monkeypatch.setattr(
        trainer,
        "evaluate",
        lambda step, state, store: seen.append(store) or {"accuracy": 0.5},
    )
    run(trainer, "--epochs", 1, "--tune")
    lines = [x for x in capsys.readouterr().out.splitlines() if "held-out" in x]
    assert len(lines) == len(trainer.GRIDS["sgd", "znorm"]) == len(seen)
    cut = len(dataset.train) * 5 // 6
    want = dataset.train[cut:].take(np.arange(10))["image"]
    for store in seen:
        np.testing.assert_array_equal(store.take(np.arange(10))["image"], want)


def test_host_and_device_normalize_alike(trainer, key, rng):
    args = trainer.parse_arguments(["--augment", "none"])
    dataset = data.load_dataset("digits")
    batch = dataset.train.take(np.arange(32))
    mean, std = (np.asarray(x, np.float32) for x in (dataset.mean, dataset.std))
    host = trainer.host_transform(args, mean, std)(dict(batch), rng)
    normalize = data.make_normalizer(dataset.mean, dataset.std)
    device = trainer.device_preprocess(args, normalize, augment=True)(batch, key)
    assert host["image"].dtype == np.float32 and host["label"].dtype == np.int32
    np.testing.assert_allclose(host["image"], device["image"], atol=2e-6)


def test_host_augmentation_draws_from_the_same_crops_as_the_device(trainer, rng):
    image = rng.integers(0, 256, (1, 5, 4, 1)).astype(np.uint8)
    padded = np.pad(image[0], ((1, 1), (1, 1), (0, 0)), mode="reflect")
    crops = [padded[y : y + 5, x : x + 4] for y in range(3) for x in range(3)]
    crops = {c.tobytes() for crop in crops for c in (crop, crop[:, ::-1])}
    got = trainer.host_crop_flip(np.repeat(image, 500, axis=0), 1, rng)
    assert {x.tobytes() for x in got} == crops
    batch = {"image": jnp.asarray(np.repeat(image, 500, axis=0))}
    args = trainer.parse_arguments([])
    device = trainer.device_preprocess(args, lambda images: images, augment=True)
    got = np.asarray(device(batch, jax.random.key(0))["image"])
    assert {x.tobytes() for x in got} == crops


def test_offline_it_trains_on_digits_and_says_so(trainer, monkeypatch, capsys):
    real = data.load_dataset

    def offline(name):
        if name == "fashion_mnist":
            raise data.DatasetUnavailableError("no source of fashion_mnist works")
        return real(name)

    monkeypatch.setattr(data, "load_dataset", offline)
    assert trainer.load(None).name == "digits"
    message = capsys.readouterr().err
    assert "no source of fashion_mnist works" in message
    assert "TRAINING ON DIGITS INSTEAD" in message
    with pytest.raises(data.DatasetUnavailableError):
        trainer.load("fashion_mnist")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", "2000"), "error: .*2000.*1437"),
        (("--logdir", "{file}/logs"), "error: --logdir .* cannot be written"),
        (("--epochs", "0"), "must be at least 1 and finite, got 0"),
        (("--seed", "-1"), "--seed: must be at least 0"),
        (("--learning-rate", "inf"), "must be above 0 and finite, got inf"),
        (("--crop-pad", "9"), "--crop-pad 9 .* use 7 at most"),
        (("--record", "{file}/records"), "--record .* cannot be written"),
        (("--dataset", "imagenet"), "invalid choice: 'imagenet'"),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_mistakes_end_with_one_clear_line(tmp_path, options, message):
    (tmp_path / "file").write_text("")
    filled = [option.format(file=tmp_path / "file") for option in options]
    command = [sys.executable, str(SCRIPT), "--dataset", "digits", *filled]
    if "--logdir" not in options:
        command += ["--logdir", str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode not in (0, 130)
    assert "Traceback" not in done.stderr
    assert re.search(message, done.stderr), done.stderr


def test_interrupt_leaves_complete_logs(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "--dataset", "digits", "--epochs", "100000"]
        + ["--logdir", str(tmp_path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    first = process.stderr.readline()  # a progress line: training has begun
    assert "examples/s" in first, first + process.stderr.read()
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "complete" in errors
    losses = events_of(tmp_path / "a").Scalars("loss")
    # Not only the multiples of the log interval: the rest was flushed as well.
    assert [e.step for e in losses] == list(range(1, len(losses) + 1))
    assert len(losses) >= 11  # an epoch, after which the first line appears
