"""The quantizing trainer, on the data set that needs no network."""

import importlib.util
import pathlib
import shutil
import sys

import jax
import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "examples" / "trainers"

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def load(name, patch):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def trainers():
    """Both trainers: the one that saves weights, and the one that reads them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield load("image_classifier", patch), load("quantize_classifier", patch)


def run(trainer, *options):
    # As users run it; Optax's adam needs implicit promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return trainer.main(["--dataset", "digits", *map(str, options)])


@pytest.fixture(scope="module")
def finished(trainers, tmp_path_factory):
    """Rows and folder of one whole run, from weights that the main trainer saved."""
    classifier, quantizer = trainers
    logs, out = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("out")
    options = ("--epochs", 8, "--batch-size", 64, "--logdir", logs)
    results = run(classifier, *options)
    weights = logs / "b" / "weights"
    options = ("--checkpoint", weights, "--qat-epochs", 2, "--out", out)
    return run(quantizer, *options), out, results[1].accuracies[-1]


def test_every_row_is_about_the_saved_network(finished):
    rows, _, accuracy = finished
    assert rows[0].accuracy == pytest.approx(accuracy, abs=1e-6)
    for row in rows[1:]:
        assert row.accuracy >= accuracy - 0.02, row.scheme
    expected = {"float32", "PTQ W8A8", "QAT W8A8"}
    assert {row.scheme.split(",")[0] for row in rows} == expected


def test_integers_agree_to_the_bit_and_are_smaller(finished):
    rows, _, _ = finished
    for row in rows[1:]:
        assert rows[0].parameter_bytes / row.parameter_bytes > 3.5
        assert row.agreement is not None
        # ONNX Runtime rounds an input that is rescaled in floating numbers.
        assert row.agreement == 1 or ("ONNX" in row.scheme and row.agreement > 0.99)
    if shutil.which("gcc"):
        assert sum(row.scheme.endswith(", C") for row in rows) == 2


def test_both_exports_are_there(finished):
    _, out, _ = finished
    for scheme in ("ptq", "qat"):
        assert (out / scheme / "network.onnx").stat().st_size > 10_000
        assert (out / scheme / "c" / "net.c").is_file()


def test_weights_of_another_network_are_refused(trainers, tmp_path):
    _, quantizer = trainers
    with pytest.raises(SystemExit, match="holds no weights for digits"):
        run(quantizer, "--checkpoint", tmp_path / "none", "--out", tmp_path / "out")


def test_the_float_network_is_exported_as_it_is(trainers):
    classifier, quantizer = trainers
    import onnxruntime
    from flax import nnx

    model = classifier.ConvNet((28, 28, 1), 10, rngs=nnx.Rngs(0))
    images = np.random.default_rng(0).normal(size=(4, 28, 28, 1)).astype(np.float32)
    with jax.numpy_rank_promotion("allow"):
        model(images)  # statistics that are not those of the start
        model.eval()
        expected = model(images)
        exported = quantizer.float_onnx(model, (28, 28, 1))
    session = onnxruntime.InferenceSession(exported, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": images})
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-5)
