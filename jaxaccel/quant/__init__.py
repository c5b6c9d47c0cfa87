"""Quantization: fake-quant inside the step, and an integer network at the end."""

from jaxaccel.quant._c_code import to_c
from jaxaccel.quant._equalize import (
    bias_correction,
    cross_layer_equalize,
    smoothquant_scales,
)
from jaxaccel.quant._fake_quant import fake_quant
from jaxaccel.quant._fold import fold_batch_norm, fold_batch_norms
from jaxaccel.quant._graph import GraphSize, IntGraph
from jaxaccel.quant._graph_builder import IntGraphBuilder
from jaxaccel.quant._histogram import HistogramState, mse_range, percentile
from jaxaccel.quant._integer import integer_apply
from jaxaccel.quant._integer_simulate import simulate
from jaxaccel.quant._learned import lsq, lsq_init, pact, ste_round
from jaxaccel.quant._linen_hooks import fake_quantize, observe
from jaxaccel.quant._lower import lower_integer
from jaxaccel.quant._nnx_hooks import Quantizer, QuantStat, attach, calibrate, detach
from jaxaccel.quant._observers import Observer, RangeState, ema_minmax, minmax
from jaxaccel.quant._onnx import to_onnx_qdq
from jaxaccel.quant._packing import pack_codes, unpack_codes
from jaxaccel.quant._policy import LayerRule
from jaxaccel.quant._qparams import QParams, compute_qparams
from jaxaccel.quant._qtensor import QTensor
from jaxaccel.quant._quantize import dequantize, quantize
from jaxaccel.quant._ranges import array_qparams
from jaxaccel.quant._requantize import quantize_multiplier, requantize
from jaxaccel.quant._spec import (
    FP8_E4M3,
    FP8_E5M2,
    INT4_WEIGHT,
    INT8_ACTIVATION,
    INT8_WEIGHT,
    INT16_ACTIVATION,
    UINT8_ACTIVATION,
    QuantSpec,
)
from jaxaccel.quant._stablehlo import to_stablehlo
from jaxaccel.quant._trees import (
    SizeReport,
    dequantize_params,
    fake_quant_params,
    quantize_params,
    size_report,
)

__all__ = (
    "FP8_E4M3",
    "FP8_E5M2",
    "GraphSize",
    "HistogramState",
    "INT16_ACTIVATION",
    "INT4_WEIGHT",
    "INT8_ACTIVATION",
    "INT8_WEIGHT",
    "IntGraph",
    "IntGraphBuilder",
    "LayerRule",
    "Observer",
    "QParams",
    "QTensor",
    "QuantSpec",
    "QuantStat",
    "Quantizer",
    "RangeState",
    "SizeReport",
    "UINT8_ACTIVATION",
    "array_qparams",
    "attach",
    "bias_correction",
    "calibrate",
    "compute_qparams",
    "cross_layer_equalize",
    "dequantize",
    "dequantize_params",
    "detach",
    "ema_minmax",
    "fake_quant",
    "fake_quant_params",
    "fake_quantize",
    "fold_batch_norm",
    "fold_batch_norms",
    "integer_apply",
    "lower_integer",
    "lsq",
    "lsq_init",
    "minmax",
    "mse_range",
    "observe",
    "pack_codes",
    "pact",
    "percentile",
    "quantize",
    "quantize_multiplier",
    "quantize_params",
    "requantize",
    "simulate",
    "size_report",
    "smoothquant_scales",
    "ste_round",
    "to_c",
    "to_onnx_qdq",
    "to_stablehlo",
    "unpack_codes",
)
