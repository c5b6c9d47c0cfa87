"""Quantization: fake-quant inside the step, and an integer network at the end."""

from jaxaccel.quant._fake_quant import fake_quant
from jaxaccel.quant._qparams import QParams, compute_qparams
from jaxaccel.quant._quantize import dequantize, quantize
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

__all__ = (
    "FP8_E4M3",
    "FP8_E5M2",
    "INT4_WEIGHT",
    "INT8_ACTIVATION",
    "INT8_WEIGHT",
    "INT16_ACTIVATION",
    "QParams",
    "QuantSpec",
    "UINT8_ACTIVATION",
    "compute_qparams",
    "dequantize",
    "fake_quant",
    "quantize",
)
