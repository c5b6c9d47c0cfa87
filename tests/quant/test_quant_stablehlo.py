"""The StableHLO archive gives the bits of the reference, for any batch."""

import numpy as np
import pytest
from jax import export

from jaxaccel import quant


@pytest.mark.parametrize(
    ("name", "rounding"), [("plain", "double"), ("residual", "single")]
)
def test_round_trip(name, rounding, make_graph, random_codes):
    graph = make_graph(name)
    data = quant.to_stablehlo(graph, rounding=rounding)
    network = export.deserialize(bytearray(data))
    for batch in (2, 32):
        codes = random_codes(graph, batch)
        want = quant.integer_apply(graph, codes, rounding=rounding)
        got = network.call(codes)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_integers_only(make_graph):
    data = quant.to_stablehlo(make_graph("plain"))
    network = export.deserialize(bytearray(data))
    text = network.mlir_module()
    assert "xi8>" in text and "xi32>" in text
    assert not any(kind in text for kind in ("f32", "f64", "i64>, tensor<?x"))


def test_bad_rounding(make_graph):
    with pytest.raises(ValueError, match="rounding must be"):
        quant.to_stablehlo(make_graph("plain"), rounding="up")
