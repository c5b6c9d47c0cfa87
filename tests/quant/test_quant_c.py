"""The C export, compiled with gcc, against the reference in jax: every bit."""

import re
import shutil
import subprocess

import numpy as np
import pytest

from jaxaccel import quant
from jaxaccel.quant._c_arena import arena_offsets, buffers

WARNINGS = "-std=c99 -Wall -Wextra -Werror -pedantic -O1".split()
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")


def _build(graph, folder, *flags, rounding="single"):
    quant.to_c(graph, folder, rounding=rounding)
    files = ["net.c", "main.c"]
    command = ["gcc", *WARNINGS, *flags, *files, "-o", "net"]
    subprocess.run(command, cwd=folder, check=True)


def _run(folder, codes, *arguments):
    command = [str(folder / "net"), *arguments]
    result = subprocess.run(command, input=codes.tobytes(), capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
    lines = result.stdout.decode().splitlines()
    return np.array([[int(code) for code in line.split()] for line in lines])


@needs_gcc
@pytest.mark.parametrize(
    ("name", "rounding"),
    [
        ("plain", "single"),
        ("residual", "single"),
        ("argmax", "single"),
        ("narrow", "single"),
        ("power of two", "single"),
        ("16x8", "single"),
        ("residual", "double"),
        ("16x8", "double"),
    ],
)
def test_c_equals_integer_apply(name, rounding, make_graph, random_codes, tmp_path):
    graph = make_graph(name)
    codes = random_codes(graph, 32)
    want = np.asarray(quant.integer_apply(graph, codes, rounding=rounding))
    _build(graph, tmp_path, rounding=rounding)
    got = _run(tmp_path, codes)
    np.testing.assert_array_equal(got, want.reshape(got.shape))
    assert len(np.unique(want)) > 1


@needs_gcc
@pytest.mark.parametrize("name", ["residual", "16x8"])
def test_c_is_clean_under_sanitizers(name, make_graph, random_codes, tmp_path):
    graph = make_graph(name)
    codes = random_codes(graph, 32)
    sanitize = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    _build(graph, tmp_path, *sanitize)
    want = np.asarray(quant.integer_apply(graph, codes))
    np.testing.assert_array_equal(_run(tmp_path, codes), want)


@needs_gcc
def test_c_prints_the_class(make_graph, random_codes, tmp_path):
    graph = make_graph("dequantize")
    codes = random_codes(graph, 32)
    _build(graph, tmp_path)
    want = np.asarray(quant.integer_apply(graph, codes)).argmax(-1)
    np.testing.assert_array_equal(_run(tmp_path, codes, "--class")[:, 0], want)


@needs_gcc
def test_c_reports_a_cut_image(make_graph, random_codes, tmp_path):
    graph = make_graph("plain")
    _build(graph, tmp_path)
    cut = random_codes(graph, 2).tobytes()[:-1]
    result = subprocess.run(
        [str(tmp_path / "net")], input=cut, capture_output=True, text=False
    )
    assert result.returncode == 1 and b"cut off: 215 of 216" in result.stderr


@pytest.mark.parametrize("name", ["plain", "residual", "power of two"])
def test_c_has_no_float_and_no_malloc(name, make_graph, tmp_path):
    quant.to_c(make_graph(name), tmp_path)
    text = (tmp_path / "net.c").read_text()
    assert not re.search(r"\b(float|double|malloc|free)\b|[0-9]\.[0-9]", text)
    assert re.findall(r"#include (.*)", text) == ['"net.h"']
    # Multiplications of 64 bits only where scales are no powers of two.
    assert ("acc * m0" in text) == (name != "power of two")


def test_header_counts(make_graph, tmp_path):
    graph = make_graph("plain")
    quant.to_c(graph, tmp_path)
    text = (tmp_path / "net.h").read_text()
    macs = 72 * 8 * 27 + 20 * 6 * 72 + graph.tensors["conv_3"].size * 18
    macs += graph.tensors["conv_3"].size * 12 + 12 * 5
    assert f"#define NET_MACS {macs}\n" in text
    assert f"#define NET_PARAMETER_BYTES {graph.nbytes}\n" in text
    assert "#define NET_CYCLES (NET_CYCLES_PER_MAC * NET_MACS)" in text


@pytest.mark.parametrize("name", ["plain", "residual", "16x8"])
def test_arena_shares_memory_without_overlap(name, make_graph):
    graph = make_graph(name)
    offsets, total = arena_offsets(graph)
    owner = buffers(graph)
    nbytes = {n: t.size * t.dtype.itemsize for n, t in graph.tensors.items()}
    written, last = {}, {}
    for step, node in enumerate(graph.nodes):
        for tensor in (*node.inputs, node.output):
            last[owner[tensor]] = step
        written.setdefault(owner[node.output], step)
    for a in offsets:
        assert offsets[a] + nbytes[a] <= total and offsets[a] % 4 == 0
        for b in offsets:
            if a < b and written[a] <= last[b] and written[b] <= last[a]:
                apart = offsets[a] + nbytes[a] <= offsets[b]
                assert apart or offsets[b] + nbytes[b] <= offsets[a]
    assert total < sum(nbytes[name] for name in offsets)


def test_bad_rounding(make_graph, tmp_path):
    with pytest.raises(ValueError, match="rounding must be"):
        quant.to_c(make_graph("plain"), tmp_path, rounding="up")
