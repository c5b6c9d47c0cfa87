"""Quantized arrays as pytrees, and codes packed into bytes."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxaccel import quant
from jaxaccel.quant import QTensor, QuantSpec

# Many small operations one by one take longer to compile than one function.
_of = functools.partial(jax.jit, static_argnums=1)(QTensor.of)
BITS = (2, 3, 4, 5, 6, 7, 8, 16)


def _packed_by_shifts(codes, bits):
    """One integer with the first code in its lowest bits."""
    number = 0
    for i, code in enumerate(codes):
        number |= (int(code) & (2**bits - 1)) << (i * bits)
    return list(number.to_bytes(-(-len(codes) * bits // 8), "little"))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("signed", [True, False])
@given(seed=st.integers(0, 2**31), count=st.integers(0, 21))
def test_packing_is_shifting(bits, signed, seed, count):
    spec = QuantSpec(bits=bits, signed=signed)
    rng = np.random.default_rng(seed)
    codes = rng.integers(spec.qmin, spec.qmax + 1, count).astype(spec.storage_dtype)
    packed = quant.pack_codes(codes, spec)
    assert packed.dtype == np.uint8
    assert packed.tolist() == _packed_by_shifts(codes, bits)
    back = quant.unpack_codes(packed, codes.shape, spec)
    assert back.dtype == spec.storage_dtype
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("signed", [True, False])
def test_every_code_packs(bits, signed):
    spec = QuantSpec(bits=bits, signed=signed)
    codes = np.arange(spec.qmin, spec.qmax + 1).astype(spec.storage_dtype)
    codes = codes.reshape(2, -1)
    packed = quant.pack_codes(codes, spec)
    assert packed.nbytes == -(-codes.size * bits // 8)
    back = quant.unpack_codes(packed, codes.shape, spec)
    np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("spec", [quant.FP8_E4M3, quant.FP8_E5M2])
def test_floating_codes_are_their_bytes(rng, spec):
    codes = np.asarray(_of(rng.normal(size=(3, 5)), spec).values)
    packed = quant.pack_codes(codes, spec)
    assert packed.tolist() == codes.view(np.uint8).ravel().tolist()
    back = quant.unpack_codes(packed, codes.shape, spec)
    np.testing.assert_array_equal(back.view(np.uint8), codes.view(np.uint8))


@pytest.mark.parametrize("name, bits", [("INT4", 4), ("UINT4", 4), ("INT8", 8)])
def test_onnx_unpacks_alike(rng, name, bits):
    onnx = pytest.importorskip("onnx")
    spec = QuantSpec(bits=bits, signed=name[0] == "I")
    codes = rng.integers(spec.qmin, spec.qmax + 1, 7).astype(spec.storage_dtype)
    tensor = onnx.TensorProto(
        data_type=getattr(onnx.TensorProto, name),
        dims=codes.shape,
        raw_data=quant.pack_codes(codes, spec).tobytes(),
    )
    unpacked = onnx.numpy_helper.to_array(tensor).astype(np.int32)
    np.testing.assert_array_equal(unpacked, codes)


def test_packing_refuses_what_is_no_code():
    with pytest.raises(ValueError, match="codes must be from -8 to 7; got -9 to 3"):
        quant.pack_codes(np.array([3, -9]), QuantSpec(bits=4))
    with pytest.raises(ValueError, match="from -32768 to 32767; got 0 to 40000"):
        quant.pack_codes(np.array([0, 40000]), QuantSpec(bits=16))
    with pytest.raises(TypeError, match="codes must be integers; got float64"):
        quant.pack_codes(np.array([1.5]), QuantSpec())
    with pytest.raises(TypeError, match="codes must be float8_e5m2; got int8"):
        quant.pack_codes(np.array([1], np.int8), quant.FP8_E5M2)


def test_unpacking_counts_bytes():
    with pytest.raises(ValueError, match=r"\(3,\) codes of 4 bits are 2 bytes.*\(3,\)"):
        quant.unpack_codes(np.zeros(3, np.uint8), (3,), QuantSpec(bits=4))


# The tensor.


def _written(tensor):
    """Bytes of what a file has to hold to give the tensor back."""
    parts = [
        quant.pack_codes(np.asarray(tensor.values), tensor.spec),
        np.asarray(tensor.qparams.scale),
    ]
    zero = np.asarray(tensor.qparams.zero_point)
    if zero.any():
        parts.append(zero.astype(tensor.spec.storage_dtype))
    return sum(len(part.tobytes()) for part in parts)


@pytest.mark.parametrize(
    "spec",
    [
        quant.INT8_WEIGHT,
        quant.INT4_WEIGHT,
        QuantSpec(bits=3, symmetric=True),
        QuantSpec(channel_axis=-1),
        QuantSpec(bits=4, symmetric=True, channel_axis=-1, block_size=8),
        QuantSpec(bits=16),
        quant.FP8_E4M3,
    ],
    ids=lambda spec: f"{spec.number_format}{spec.bits}",
)
def test_bytes_of_a_file(rng, spec):
    tensor = _of(rng.normal(size=(16, 10)) + 0.1, spec)
    assert tensor.nbytes_packed == _written(tensor)


def test_four_bits_are_seven_times_smaller():
    kernel = np.random.default_rng(0).normal(size=(1024, 1024)).astype(np.float32)
    tensor = _of(kernel, quant.INT4_WEIGHT)
    assert _written(tensor) == tensor.nbytes_packed < kernel.nbytes / 7.9
    eight = _of(kernel, quant.INT8_WEIGHT)
    assert eight.nbytes_packed < kernel.nbytes / 3.98


def test_a_pytree_with_a_static_format(rng):
    tensor = QTensor.of(rng.normal(size=(4, 3)).astype(np.float32), quant.INT8_WEIGHT)
    leaves, structure = jax.tree.flatten({"kernel": tensor})
    assert [leaf.dtype for leaf in leaves] == [jnp.int8, jnp.float32, jnp.int32]
    again = jax.tree.unflatten(structure, leaves)["kernel"]
    assert again.spec == tensor.spec and again.shape == (4, 3)
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(tensor)]
    assert paths == [".values", ".qparams.scale", ".qparams.zero_point"]
    compiled = jax.jit(lambda t: t.dequantize())(tensor)
    np.testing.assert_array_equal(np.asarray(compiled), np.asarray(tensor.dequantize()))


def test_of_an_abstract_array():
    kernel = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    tensor = jax.eval_shape(lambda x: QTensor.of(x, quant.INT4_WEIGHT), kernel)
    assert tensor.shape == (4, 3)
    assert tensor.values.dtype == jnp.int8
    assert tensor.qparams.scale.shape == (3,)
    assert tensor.nbytes_packed == 4 * 3 // 2 + 3 * 4


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_of_numpy(rng, dtype):
    x = rng.normal(size=(4, 3)).astype(dtype)
    tensor = QTensor.of(x, quant.INT8_WEIGHT)
    wide = QTensor.of(jnp.asarray(x, jnp.float32), quant.INT8_WEIGHT)
    np.testing.assert_array_equal(np.asarray(tensor.values), np.asarray(wide.values))


def test_numpy_leaves_of_a_restored_checkpoint(rng):
    tensor = _of(rng.normal(size=(4, 3)), quant.INT8_WEIGHT)
    restored = jax.tree.map(np.asarray, tensor)
    assert isinstance(restored.values, np.ndarray)
    np.testing.assert_array_equal(
        np.asarray(restored.dequantize()), np.asarray(tensor.dequantize())
    )
    assert restored.nbytes_packed == tensor.nbytes_packed


def test_dequantize_into_bfloat16(rng):
    tensor = _of(rng.normal(size=(4, 3)), quant.INT8_WEIGHT)
    narrow = tensor.dequantize(jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    wanted = tensor.dequantize().astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(narrow), np.asarray(wanted))


def test_stochastic_codes_need_a_key(key):
    spec = QuantSpec(rounding="stochastic")
    x = np.linspace(-1, 1, 50)
    with pytest.raises(ValueError, match="needs a key"):
        QTensor.of(x, spec)
    make = functools.partial(QTensor.of, x, spec)
    first, again = make(key=key), make(key=key)
    np.testing.assert_array_equal(np.asarray(first.values), np.asarray(again.values))


def test_of_bad_arrays():
    with pytest.raises(TypeError, match="x must be floating numbers; got int32"):
        QTensor.of(np.ones(3, np.int32), QuantSpec())
    with pytest.raises(ValueError, match="lo must be finite; got nan"):
        QTensor.of(np.array([1.0, np.nan]), QuantSpec())
