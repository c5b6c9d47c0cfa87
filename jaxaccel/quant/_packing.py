"""Codes of less than eight bits in as few bytes as they need, on the host."""

import math

import numpy as np

from jaxaccel.quant._spec import QuantSpec


def pack_codes(codes: np.ndarray, spec: QuantSpec) -> np.ndarray:
    """Packs codes into bytes, the first one in the lowest bits, as ONNX does.

    In memory a code takes a whole byte, also as `jnp.int4`; this is for files.

    Args:
      codes: Codes of any shape, in row-major order.
      spec: Their format.

    Returns:
      uint8, `ceil(codes.size * bits / 8)` bytes.

    Raises:
      TypeError: If codes are no integers, or not the floating ones of the format.
      ValueError: If a code is out of range.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import quant
      >>> spec = quant.QuantSpec(bits=4)
      >>> packed = quant.pack_codes(np.array([1, -2, 7], np.int8), spec)
      >>> [f"{byte:08b}" for byte in packed]
      ['11100001', '00000111']
      >>> quant.unpack_codes(packed, (3,), spec).tolist()
      [1, -2, 7]
    """
    codes = np.asarray(codes)
    if spec.is_float:
        if codes.dtype != spec.storage_dtype:
            raise TypeError(f"codes must be {spec.storage_dtype}; got {codes.dtype}")
        return np.frombuffer(codes.tobytes(), np.uint8)
    if not np.issubdtype(codes.dtype, np.integer):
        raise TypeError(f"codes must be integers; got {codes.dtype}")
    if codes.size and (codes.min() < spec.qmin or codes.max() > spec.qmax):
        raise ValueError(
            f"codes must be from {spec.qmin} to {spec.qmax}; got {codes.min()} to "
            f"{codes.max()}"
        )
    if spec.bits == 16:
        return np.frombuffer(codes.astype(spec.storage_dtype).tobytes(), np.uint8)
    raw = (codes.astype(np.int16).ravel() & 0xFF).astype(np.uint8)
    bits = np.unpackbits(raw[:, None], axis=1, bitorder="little")[:, : spec.bits]
    return np.packbits(bits.ravel(), bitorder="little")


def unpack_codes(
    packed: np.ndarray, shape: tuple[int, ...], spec: QuantSpec
) -> np.ndarray:
    """Undoes `pack_codes`.

    Args:
      packed: Its bytes.
      shape: Of the codes.
      spec: Their format.

    Returns:
      Codes in `spec.storage_dtype`.

    Raises:
      ValueError: If the number of bytes is another.
    """
    wanted = packed_nbytes(math.prod(shape), spec)
    if packed.shape != (wanted,):
        raise ValueError(
            f"{shape} codes of {spec.bits} bits are {wanted} bytes; got an array of "
            f"shape {packed.shape}"
        )
    if spec.is_float or spec.bits == 16:
        return np.frombuffer(packed.tobytes(), spec.storage_dtype).reshape(shape)
    count = math.prod(shape)
    bits = np.unpackbits(packed, bitorder="little", count=count * spec.bits)
    weights = 1 << np.arange(spec.bits, dtype=np.int32)
    codes = bits.reshape(-1, spec.bits).astype(np.int32) @ weights
    if spec.signed:
        codes -= (codes >> (spec.bits - 1)) << spec.bits
    return codes.astype(spec.storage_dtype).reshape(shape)


def packed_nbytes(count: int, spec: QuantSpec) -> int:
    """Bytes of so many packed codes."""
    return -(-count * spec.bits // 8)
