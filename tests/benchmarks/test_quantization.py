"""benchmarks/quantization.py at a tiny size, its records, and the cards they feed."""

import dataclasses
import importlib
import pathlib
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from jaxaccel import quant
from jaxaccel.records import Record

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
MODULES = ("quantization_networks", "quantization_exports", "quantization")


@pytest.fixture(scope="module")
def scripts():
    """The script and the two modules beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))

        networks, exports, script = map(importlib.import_module, MODULES)
        yield script, exports, networks
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def network(scripts):
    """The digits network, folded, with statistics that are not those of the start."""
    _, _, networks = scripts
    model = networks.create("digits", 0)
    with jax.numpy_rank_promotion("allow"):
        model(networks.calibration("digits"))
        model.eval()
        return networks.fold(model)


@pytest.fixture(autouse=True)
def as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_rescaled_and_equalized_networks_are_the_same_function(scripts, network):
    _, _, networks = scripts
    images = networks.calibration("digits")[:16]
    expected = network(images)
    twin = networks.rescaled(network, 0)
    even = networks.equalized(twin)
    scale = float(abs(expected).max())
    for model in (twin, even):
        np.testing.assert_allclose(model(images), expected, atol=1e-4 * scale)
    spread = [
        float(np.ptp(np.log2(abs(m.convs[1].kernel[...]).max(axis=(0, 1, 2)))))
        for m in (network, twin, even)
    ]
    assert spread[1] > spread[0] + 2 and spread[2] < spread[1] - 2


def test_all_exports_of_the_network_agree(scripts, network, tmp_path):
    script, exports, networks = scripts
    pytest.importorskip("onnxruntime")
    quantized = script.after_training(network, "digits", script.MINMAX(8))
    graph = networks.lower_trained(quantized, "digits")
    images = networks.split("digits", "test")[0][:64]
    codes = np.asarray(quant.integer_apply(graph, images))
    found = exports.run_onnx(quant.to_onnx_qdq(graph), images)
    assert abs(found.astype(int) - codes.astype(int)).max() <= 1
    if exports.has_gcc():
        program = exports.compile_c(quant.to_c(graph, tmp_path))
        np.testing.assert_array_equal(exports.run_c(program, images), codes)
        assert exports.text_bytes(tmp_path) > 40_000
    floating = exports.run_onnx(
        exports.float_onnx(network, (8, 8, 1)), networks.calibration("digits")[:8]
    )
    expected = network(networks.calibration("digits")[:8])
    np.testing.assert_allclose(floating, expected, rtol=1e-3, atol=1e-4)


def test_the_cache_gives_back_the_network(scripts, tmp_path, monkeypatch):
    _, _, networks = scripts
    problem = networks.PROBLEMS["digits"]
    short = dataclasses.replace(problem, epochs=1, features=(4,), strides=(2,))
    short = dataclasses.replace(short, pooled=(False,), hidden=())
    monkeypatch.setitem(networks.PROBLEMS, "digits", short)
    first = networks.trained("digits", 3, tmp_path)
    monkeypatch.setattr(networks, "fit", None)  # a second training would fail
    second = networks.trained("digits", 3, tmp_path)
    for ours, theirs in zip(
        jax.tree.leaves(nnx.state(first)),
        jax.tree.leaves(nnx.state(second)),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


# --------------------------------------------------------------- records and cards


def read(name):
    return Record.read(ROOT / "benchmarks/results" / f"quantization_{name}.json")


@pytest.mark.parametrize("name", ["accuracy", "twin", "qat", "size", "agree"])
def test_the_exact_claims_hold(name):
    assert read(name).verdict == "helps"


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def card(name):
    text = (ROOT / "docs/methods" / f"{name}.md").read_text(encoding="utf-8")
    return " ".join(text.split())


def test_the_card_of_ptq_shows_the_records():
    text, figures = card("ptq"), read("accuracy").figures
    for name, title in (("fashion_mnist", "Fashion-MNIST"), ("digits", "digits")):
        cells = [
            f"{figures[f'{name}, {scheme}: test accuracy, %']:.2f}"
            for scheme in ("float32", "W8A8", "per tensor")
        ]
        assert row(title, *cells) in text
        mean, worst = (figures[f"{name}: {x} drop, points"] for x in ("mean", "worst"))
        assert f"{mean:.2f} points on {title} ({worst:.2f} at worst)" in text
    figures = read("twin").figures
    for scheme in (
        "one scale a kernel",
        "a scale a channel",
        "equalized, one scale a kernel",
    ):
        value = figures[f"{scheme}: test accuracy, %"]
        assert row(f"W8A8, {scheme}", f"{value:.2f}") in text


def test_the_card_of_qat_shows_the_records():
    text, figures = card("qat"), read("qat").figures
    for scheme in ("W4A4", "W3A8", "W2A8"):
        cells = [
            f"{figures[f'{scheme}, {variant}: test accuracy, %']:.2f}"
            for variant in ("PTQ", "QAT", "QAT, LSQ")
        ]
        assert row(scheme, *cells) in text
    assert f"float32 has {figures['float32: test accuracy, %']:.2f}" in text
    peers = read("peers")
    assert str(peers.figure("Qwix / ours")) in text
    for name, words in (("ours", "% here"), ("Qwix", "% there")):
        assert f"{peers.figures[f'{name}: test accuracy, %']:.2f} {words}" in text
    step = read("step")
    for ratio in ("quantized / float32", "quantized, LSQ / float32"):
        assert str(step.figure(ratio)) in text


def test_the_cards_of_fake_quant_and_exports_show_the_records():
    text, figures = card("fake-quant"), read("agree").figures
    for name in ("digits", "fashion_mnist"):
        share = figures[f"{name}, float twin: codes that differ, %"]
        assert f"{share:.2f} %" in text
        assert figures[f"{name}, float twin: largest difference, LSB"] in (0, 1)
        assert figures[f"{name}, C: largest difference, LSB"] == 0
    text, sizes = card("integer-export"), read("size").figures
    share = figures["fashion_mnist, ONNX Runtime: codes that differ, %"]
    assert f"{share:.3f} % of the outputs" in text
    for kind, before, after, ratio in (
        ("parameters", "float32: parameter", "int8: parameter", "parameters, int8"),
        (
            "parameters, packed int4",
            "float32: parameter",
            "int4: parameter",
            "parameters, int4",
        ),
        ("ONNX file", "float32: ONNX", "int8: ONNX", "ONNX file"),
    ):
        cells = [f"{sizes[f'{key} bytes']:,}" for key in (before, after)]
        assert row(kind, *cells, sizes[f"{ratio}: ratio"]) in text
    record = read("latency")
    for batch in (1, 8):
        name = f"float32, batch {batch} / int8, batch {batch}"
        assert str(record.figure(name)) in text
