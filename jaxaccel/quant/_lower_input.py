"""Takes the normalization of images into the codes of the network's input."""

import dataclasses

import numpy as np

from jaxaccel.quant._lower_plan import Edge, Given, Pending


def settle(mapped: Pending, source: Edge, *, exact: bool) -> Edge | Pending:
    """Takes what it can of a map into scale and zero point of the input.

    Args:
      mapped: A map of an edge; nothing is done unless that is the input, mapped by
        one positive number for all channels to a range with 0 in it.
      source: The input, whose range is changed.
      exact: Only if no part of the zero point is left over.

    Returns:
      The input itself; or the map of it that is left, an offset of half a code at
      most; or `mapped` as it was.
    """
    found = source.range
    gain, bias = np.asarray(mapped.gain), np.asarray(mapped.bias)
    whole = mapped.inputs[0] is source and not gain.ndim and not bias.ndim
    if not (whole and mapped.open and isinstance(found, Given) and gain > 0):
        return mapped
    if gain == 1 and bias == 0:
        return source
    scale = float(np.float32(found.scale * gain))
    zero = found.zero_point - float(bias) / scale
    rounded = int(np.rint(zero))
    left = scale * (rounded - zero)
    negligible = abs(rounded - zero) < 1e-3
    spec = found.spec
    inside = spec.qmin <= rounded <= spec.qmax and (rounded == 0 or not spec.symmetric)
    if not inside or (exact and not negligible):
        return mapped
    source.range = Given(scale, rounded, spec)
    if negligible:
        return source
    return Pending("affine", (source,), mapped.shape, bias=left)


def absorb_quantizer(mapped: Pending, source: Edge, wanted: Given) -> Edge | None:
    """Makes the input's codes those of a quantizer after the normalization.

    That is so if each code of the input gives the quantizer's code up to one
    difference for all, as the ranges of whole images do.

    Returns:
      The input with the quantizer's scale; None, and nothing changed, if not.
    """
    found = source.range
    gain, bias = np.asarray(mapped.gain), np.asarray(mapped.bias)
    if mapped.inputs[0] is not source or not isinstance(found, Given):
        return None
    if gain.ndim or bias.ndim or not mapped.open or found.spec.bits > 8:
        return None
    codes = np.arange(found.spec.qmin, found.spec.qmax + 1)
    numbers = gain * (found.scale * (codes - found.zero_point)) + bias
    target = np.rint(numbers / wanted.scale) + wanted.zero_point
    target = np.clip(target, wanted.spec.qmin, wanted.spec.qmax)
    shift = target - codes
    if (shift != shift[0]).any():
        return None
    zero = wanted.zero_point - int(shift[0])
    if not found.spec.qmin <= zero <= found.spec.qmax:
        return None
    source.range = dataclasses.replace(found, scale=wanted.scale, zero_point=zero)
    return source
