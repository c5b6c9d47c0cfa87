"""Numbers to codes and back: the identities, the layouts, the parity with ONNX."""

import functools
import itertools
import math

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from jaxaccel import quant
from jaxaccel.quant import QParams, QuantSpec

ONE = QParams(np.float32(1), np.int32(0))
SPECS = {
    "int8": QuantSpec(),
    "uint8": QuantSpec(signed=False),
    "int8_symmetric": QuantSpec(symmetric=True),
    "int8_narrow": QuantSpec(symmetric=True, narrow_range=True),
    "uint8_symmetric": QuantSpec(signed=False, symmetric=True),
    "int4_pow2": QuantSpec(bits=4, pow2_scale=True),
    "uint3_half_up": QuantSpec(bits=3, signed=False, rounding="half_up"),
    "int2": QuantSpec(bits=2, symmetric=True),
    "int16": QuantSpec(bits=16),
    "uint16": QuantSpec(bits=16, signed=False),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@functools.cache
def _encode(spec):
    return jax.jit(lambda x, s, z: quant.quantize(x, QParams(s, z), spec))


@functools.cache
def _decode(spec):
    return jax.jit(lambda q, s, z: quant.dequantize(q, QParams(s, z), spec))


@functools.cache
def _covering(spec):
    return jax.jit(lambda x: quant.array_qparams(x, spec))


def _numbers(seed, spread):
    """Sixty-four numbers of any magnitude and sign, 0 among them."""
    x = np.random.default_rng(seed).normal(size=64) * 2.0**spread
    x[0] = 0
    return x.astype(np.float32)


@st.composite
def _arrays(draw):
    x = _numbers(draw(st.integers(0, 2**31)), draw(st.integers(-60, 60)))
    side = draw(st.sampled_from(["both", "positive", "shifted"]))
    if side == "both":
        return x
    return np.abs(x) if side == "positive" else np.abs(x) + np.abs(x).max()


# The identities that hold for every format.


@every_spec
@given(x=_arrays())
def test_round_trip_is_within_half_a_step(spec, x):
    x = np.abs(x) if not spec.signed else x
    scale, zero = _covering(spec)(x)
    q = np.asarray(_encode(spec)(x, scale, zero))
    assert q.dtype == spec.storage_dtype
    assert spec.qmin <= q.min() and q.max() <= spec.qmax
    back = np.asarray(_decode(spec)(q, scale, zero), np.float64)
    # The range moves by up to half a step to where zero has a code.
    bound = float(scale) / 2 * (1 + 1e-5) + np.abs(x) * 2.0**-22
    assert (np.abs(back - x) <= bound).all()


@every_spec
@given(seed=st.integers(0, 2**31), exponent=st.floats(-60, 60))
def test_every_code_survives_the_round_trip(spec, seed, exponent):
    codes = np.arange(spec.qmin, spec.qmax + 1).astype(spec.storage_dtype)
    zero = np.random.default_rng(seed).integers(spec.qmin, spec.qmax + 1)
    zero = np.int32(0 if spec.symmetric else zero)
    scale = np.float32(2.0**exponent)
    back = _encode(spec)(_decode(spec)(codes, scale, zero), scale, zero)
    np.testing.assert_array_equal(np.asarray(back), codes)


@every_spec
@given(x=_arrays())
def test_codes_rise_with_the_numbers(spec, x):
    x = np.sort(np.abs(x) if not spec.signed else x)
    q = np.asarray(_encode(spec)(x, *_covering(spec)(x / 4))).astype(np.int64)
    assert (np.diff(q) >= 0).all()
    # The far numbers are beyond the codes.
    assert q[-1] == spec.qmax or x[-1] < -x[0]


@every_spec
@given(x=_arrays())
def test_zero_is_exact(spec, x):
    x = np.abs(x) if not spec.signed else x
    scale, zero = _covering(spec)(x)
    q = _encode(spec)(np.zeros(64, np.float32), scale, zero)
    assert (np.asarray(q) == int(zero)).all()
    assert (np.asarray(_decode(spec)(q, scale, zero)) == 0).all()


@pytest.mark.parametrize("name", ["int8_symmetric", "int8_narrow", "int2"])
@given(x=_arrays())
def test_the_largest_magnitude_has_the_last_code(name, x):
    """And comes back, but for the rounding of the scale, unlike with 127.5 steps."""
    spec = SPECS[name]
    i = np.argmax(np.abs(x))
    scale, zero = _covering(spec)(x)
    q = np.asarray(_encode(spec)(x, scale, zero))
    assert q[i] == math.copysign(spec.qmax, x[i])
    back = np.asarray(_decode(spec)(q, scale, zero))[i]
    assert abs(back - x[i]) <= np.spacing(np.abs(x[i]))


# Rounding.


@pytest.mark.parametrize("name", ["int8", "uint8", "int16"])
@given(seed=st.integers(0, 2**31), scale=st.floats(2.0**-10, 8.0, width=32))
def test_codes_are_those_of_numpy(name, seed, scale):
    """One true division in float32, then half to even; inside jit as outside."""
    spec, zero = SPECS[name], np.int32(3)
    x = np.random.default_rng(seed).normal(size=4096).astype(np.float32) * 60
    wanted = np.clip(np.round(x / np.float32(scale)) + 3, spec.qmin, spec.qmax)
    got = _encode(spec)(x, np.float32(scale), zero)
    np.testing.assert_array_equal(np.asarray(got), wanted)


def test_a_scale_known_to_the_compiler_divides_alike():
    """Where it is a constant, compilers multiply by its inverse: some codes move."""
    x = np.random.default_rng(0).normal(size=1 << 21).astype(np.float32)
    scale, spec = np.float32(0.007), SPECS["int16"]
    wanted = np.clip(np.round(x / scale), spec.qmin, spec.qmax)
    inverse = np.clip(np.round(x * (1 / scale)), spec.qmin, spec.qmax)
    assert (wanted != inverse).any()
    constant = jax.jit(lambda x: quant.quantize(x, QParams(scale, 0), spec))
    np.testing.assert_array_equal(np.asarray(constant(x)), wanted)


@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 20))
def test_half_up_is_the_floor_of_a_half_more(seed, exponent):
    """As a shift rounds; with scales of powers of two ties are common, and exact."""
    rng, spec = np.random.default_rng(seed), QuantSpec(bits=16, rounding="half_up")
    steps = rng.integers(-80_000, 80_000, 512) / 2.0
    steps[256:] += rng.normal(size=256) * 2.0**-10
    x = (steps * 2.0**exponent).astype(np.float32)
    ratio = x.astype(np.float64) / 2.0**exponent
    wanted = np.clip(np.floor(ratio + 0.5), spec.qmin, spec.qmax)
    got = _encode(spec)(x, np.float32(2.0**exponent), np.int32(0))
    np.testing.assert_array_equal(np.asarray(got), wanted)


def test_half_up_does_not_add_a_half_in_float32():
    """The sum would round up: the classic fault of floor(x + 0.5)."""
    below = np.nextafter(np.float32(0.5), np.float32(0))
    assert np.floor(below + np.float32(0.5)) == 1
    spec = QuantSpec(rounding="half_up")
    x = np.array([below, 0.5, -0.5, -1.5, -below, -1e-10], np.float32)
    assert quant.quantize(x, ONE, spec).tolist() == [0, 1, 0, -1, 0, 0]


def test_ties_by_rounding():
    x = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5], np.float32)
    assert quant.quantize(x, ONE, QuantSpec()).tolist() == [-2, -2, 0, 0, 2, 2]
    up = QuantSpec(rounding="half_up")
    assert quant.quantize(x, ONE, up).tolist() == [-2, -1, 0, 1, 2, 3]


STOCHASTIC = QuantSpec(rounding="stochastic")


@pytest.mark.parametrize("value", [0.125, -2.75, 3.5])
def test_stochastic_rounding_is_unbiased(key, value):
    count = 40_000
    x = jnp.full(count, value)
    q = np.asarray(quant.quantize(x, ONE, STOCHASTIC, key=key))
    assert set(q.tolist()) == {math.floor(value), math.ceil(value)}
    share = value - math.floor(value)
    sigma = math.sqrt(share * (1 - share) / count)
    assert abs(q.mean() - value) < 4 * sigma


def test_stochastic_rounding_is_a_function_of_the_key(key):
    x = jnp.full(1000, 0.5)
    first = quant.quantize(x, ONE, STOCHASTIC, key=key)
    again = quant.quantize(x, ONE, STOCHASTIC, key=key)
    other = quant.quantize(x, ONE, STOCHASTIC, key=jax.random.key(1))
    assert (first == again).all() and (first != other).any()


def test_stochastic_rounding_leaves_codes_alone(key):
    x = np.arange(-128, 128).astype(np.float32)
    q = quant.quantize(x, ONE, STOCHASTIC, key=key)
    np.testing.assert_array_equal(np.asarray(q), x)
    infinite = np.array([-np.inf, np.inf], np.float32)
    q = quant.quantize(infinite, ONE, STOCHASTIC, key=key)
    assert q.tolist() == [-128, 127]


# Numbers that are none, and far ones.


@every_spec
def test_infinities_and_nan(spec):
    """Out of range saturates; NaN, which only jit lets through, is the code of 0."""
    zero = np.int32(0 if spec.symmetric else (spec.qmin + spec.qmax) // 2)
    x = np.array([-np.inf, -1e30, np.nan, 1e30, np.inf], np.float32)
    q = _encode(spec)(x, np.float32(1), zero)
    wanted = [spec.qmin, spec.qmin, zero, spec.qmax, spec.qmax]
    assert np.asarray(q).tolist() == wanted


def test_far_float64_saturates():
    x = np.array([-1e300, 0.0, 1e300])
    assert quant.quantize(x, ONE, QuantSpec()).tolist() == [-128, 0, 127]


def test_an_empty_array():
    q = quant.quantize(np.zeros((0, 3), np.float32), ONE, QuantSpec())
    assert q.shape == (0, 3)


def test_bfloat16_computes_in_float32():
    """In bfloat16 the quotient of 99.5 and 0.1 would have no digits to round."""
    x = jnp.array([99.5, 0.35, -7.1], jnp.bfloat16)
    qparams, spec = QParams(np.float32(0.1), np.int32(0)), QuantSpec(bits=16)
    wanted = np.round(np.asarray(x, np.float32) / np.float32(0.1))
    np.testing.assert_array_equal(np.asarray(quant.quantize(x, qparams, spec)), wanted)
    in_bfloat16 = np.asarray(jnp.round(x / jnp.bfloat16(0.1)), np.float32)
    assert (in_bfloat16 != wanted).any()
    back = quant.dequantize(np.array([3], np.int16), qparams, spec, dtype=jnp.bfloat16)
    assert back.dtype == jnp.bfloat16


# Floating codes.


@pytest.mark.parametrize(
    "spec, dtype",
    [
        (quant.FP8_E4M3, ml_dtypes.float8_e4m3fn),
        (quant.FP8_E5M2, ml_dtypes.float8_e5m2),
    ],
)
def test_float8_clips_before_it_casts(spec, dtype):
    """A bare cast of what lies beyond the largest number is NaN or infinite."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=50_000) * 2.0 ** rng.uniform(-20, 20, 50_000)
    x = np.append(x, [spec.qmax, spec.qmax * 1.04, 1e6, -1e6, np.inf, -np.inf, 0, -0.0])
    x = x.astype(np.float32)
    wanted = np.clip(x, -spec.qmax, spec.qmax).astype(dtype)
    got = np.asarray(_encode(spec)(x, np.float32(1), np.int32(0)))
    np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))
    assert np.isfinite(got.astype(np.float32)).all()
    assert not np.isfinite(np.array([1e6]).astype(dtype).astype(np.float32)).all()


@pytest.mark.parametrize("spec", [quant.FP8_E4M3, quant.FP8_E5M2])
def test_float8_round_trips(spec):
    codes = np.arange(256).astype(np.uint8).view(spec.storage_dtype)
    codes = codes[np.isfinite(codes.astype(np.float32))]
    scale = np.float32(0.37)
    back = _encode(spec)(_decode(spec)(codes, scale, np.int32(0)), scale, np.int32(0))
    np.testing.assert_array_equal(
        np.asarray(back).astype(np.float32), codes.astype(np.float32)
    )
    x = np.array([-3.0, 1.0, 2.0], np.float32)
    qparams = quant.array_qparams(x, spec)
    np.testing.assert_allclose(float(qparams.scale) * spec.qmax, 3.0, rtol=1e-6)
    assert quant.quantize(x, qparams, spec)[0] == -spec.qmax


# Layouts: each channel is its own array.

LAYOUTS = {
    "conv": ((3, 3, 4, 6), -1),
    "conv_from_the_front": ((3, 3, 4, 6), 3),
    "depthwise": ((3, 3, 1, 6), -1),
    "dense": ((7, 6), -1),
    "conv_transpose_kernel": ((3, 3, 6, 4), -2),
    "first_axis": ((6, 5), 0),
}


@pytest.mark.parametrize("shape, axis", LAYOUTS.values(), ids=LAYOUTS)
def test_channels_are_arrays_by_themselves(rng, shape, axis):
    kernel = rng.normal(size=shape).astype(np.float32)
    base, spec = QuantSpec(bits=4), QuantSpec(bits=4, channel_axis=axis)
    scale, zero = map(np.asarray, _covering(spec)(kernel))
    q = np.asarray(_encode(spec)(kernel, scale, zero))
    back = np.asarray(_decode(spec)(q, scale, zero))
    assert scale.shape == (6,)
    for c in range(6):
        part = np.ascontiguousarray(np.take(kernel, c, axis))
        alone = _covering(base)(part)
        assert alone.scale == scale[c] and alone.zero_point == zero[c]
        codes = _encode(base)(part, *alone)
        np.testing.assert_array_equal(np.take(q, c, axis), np.asarray(codes))
        wanted = _decode(base)(codes, *alone)
        np.testing.assert_array_equal(np.take(back, c, axis), np.asarray(wanted))


@pytest.mark.parametrize(
    "shape, axis, size, split",
    [
        ((8, 3), -1, 4, 0),
        ((2, 2, 6, 3), -1, 2, 2),
        ((3, 8), 0, 4, 1),
        ((8,), None, 2, 0),
    ],
)
def test_blocks_are_arrays_by_themselves(rng, shape, axis, size, split):
    """ONNX's form: along the split axis blocks, for every other index its own."""
    x = rng.normal(size=shape).astype(np.float32)
    spec = QuantSpec(bits=4, channel_axis=axis, block_size=size)
    base = QuantSpec(bits=4)
    scale, zero = map(np.asarray, _covering(spec)(x))
    q = np.asarray(_encode(spec)(x, scale, zero))
    assert scale.shape == tuple(
        n // size if i == split else n for i, n in enumerate(shape)
    )
    for where in itertools.product(*map(range, scale.shape)):
        inside = tuple(
            slice(i * size, (i + 1) * size) if axis == split else slice(i, i + 1)
            for axis, i in enumerate(where)
        )
        part = np.ascontiguousarray(x[inside]).ravel()
        alone = _covering(base)(part)
        assert alone.scale == scale[where] and alone.zero_point == zero[where]
        codes = _encode(base)(part, *alone)
        np.testing.assert_array_equal(q[inside].ravel(), np.asarray(codes))


def test_vmap_is_a_loop(rng):
    spec = QuantSpec(bits=4, channel_axis=-1)
    x = rng.normal(size=(3, 5, 2)).astype(np.float32)

    @jax.jit
    def both(x):
        qparams = quant.array_qparams(x, spec)
        return quant.quantize(x, qparams, spec)

    together = jax.vmap(both)(x)
    alone = np.stack([np.asarray(both(part)) for part in x])
    np.testing.assert_array_equal(np.asarray(together), alone)


# ONNX Runtime.

NARROW = ["INT8", "UINT8"]


@functools.cache
def _session(op, kind, opset, attributes=(), rank=1, params_rank=0):
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    kinds = onnx.TensorProto
    source, target = kinds.FLOAT, getattr(kinds, kind)
    if op == "DequantizeLinear":
        source, target = target, source
    codes = getattr(kinds, kind)

    def info(name, kind, rank):
        return onnx.helper.make_tensor_value_info(name, kind, [None] * rank)

    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(op, ["x", "s", "z"], ["y"], **dict(attributes))],
        op,
        [
            info("x", source, rank),
            info("s", kinds.FLOAT, params_rank),
            info("z", codes, params_rank),
        ],
        [info("y", target, rank)],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10
    )
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    return runtime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _run(op, kind, opset, feeds, *others):
    (wanted,) = _session(op, kind, opset, *others).run(None, feeds)
    return np.asarray(wanted)


def _many_numbers(scale):
    """Two hundred thousand, every tie and its neighbours among them, and infinities."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=150_000) * scale * 60
    tiny = rng.normal(size=46_924) * 2.0 ** rng.uniform(-120, 100, 46_924)
    ties = (np.arange(-512, 512) + 0.5) * scale
    ties = ties.astype(np.float32)
    above, below = np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)
    ends = [np.inf, -np.inf, 0.0, -0.0]
    x = np.concatenate([wide, tiny, ties, above, below, ends]).astype(np.float32)
    assert len(x) == 200_000
    return x


@pytest.mark.parametrize("scale", [0.25, 0.1, 0.0123])
@pytest.mark.parametrize("kind, opset", [("INT8", 19), ("UINT8", 19), ("INT16", 21)])
def test_onnx_runtime_quantizes_alike(kind, opset, scale):
    spec = QuantSpec(bits=16 if "16" in kind else 8, signed=kind[0] == "I")
    scale, zero = np.float32(scale), np.int32(7)
    x = _many_numbers(scale)
    z = np.array(zero, spec.storage_dtype)
    feeds = {"x": x, "s": np.array(scale), "z": z}
    wanted = _run("QuantizeLinear", kind, opset, feeds)
    outside = quant.quantize(x, QParams(scale, zero), spec)
    np.testing.assert_array_equal(np.asarray(outside), wanted)
    np.testing.assert_array_equal(np.asarray(_encode(spec)(x, scale, zero)), wanted)


@pytest.mark.parametrize("kind", NARROW)
def test_onnx_runtime_dequantizes_alike(kind):
    spec = QuantSpec(signed=kind == "INT8")
    q = np.arange(spec.qmin, spec.qmax + 1).astype(spec.storage_dtype)
    for scale, zero in ((0.1, 3), (1 / 3, 120), (1e-30, 0)):
        feeds = {"x": q, "s": np.array(scale, np.float32), "z": np.array(zero, q.dtype)}
        wanted = _run("DequantizeLinear", kind, 19, feeds)
        got = _decode(spec)(q, np.float32(scale), np.int32(zero))
        np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.mark.parametrize(
    "attributes, spec, params_rank",
    [
        ((("axis", 1),), QuantSpec(channel_axis=1), 1),
        (
            (("axis", 0), ("block_size", 4)),
            QuantSpec(channel_axis=-1, block_size=4),
            2,
        ),
        ((("axis", 1), ("block_size", 3)), QuantSpec(block_size=3), 2),
    ],
    ids=["channels", "blocks_of_inputs", "blocks_of_the_last_axis"],
)
def test_onnx_runtime_groups_alike(rng, attributes, spec, params_rank):
    x = rng.normal(size=(8, 6)).astype(np.float32)
    scale, zero = map(np.asarray, quant.array_qparams(x, spec))
    feeds = {"x": x, "s": scale, "z": zero.astype(np.int8)}
    wanted = _run("QuantizeLinear", "INT8", 21, feeds, attributes, 2, params_rank)
    got = quant.quantize(x, QParams(scale, zero), spec)
    np.testing.assert_array_equal(np.asarray(got), wanted)


@pytest.mark.parametrize(
    "spec, kind", [(quant.FP8_E4M3, "FLOAT8E4M3FN"), (quant.FP8_E5M2, "FLOAT8E5M2")]
)
def test_onnx_reference_casts_to_float8_alike(rng, spec, kind):
    onnx = pytest.importorskip("onnx")
    from onnx.reference import ReferenceEvaluator

    x = (rng.normal(size=400) * 2.0 ** rng.uniform(-10, 18, 400)).astype(np.float32)
    target = getattr(onnx.TensorProto, kind)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Cast", ["x"], ["y"], to=target, saturate=1)],
        "cast",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None])],
        [onnx.helper.make_tensor_value_info("y", target, [None])],
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 19)]
    )
    (wanted,) = ReferenceEvaluator(model).run(None, {"x": x})
    got = np.asarray(quant.quantize(x, ONE, spec))
    np.testing.assert_array_equal(
        got.astype(np.float32), np.asarray(wanted).astype(np.float32)
    )


# Bad input.

X = np.ones((2, 3), np.float32)
CHANNELS = QuantSpec(channel_axis=-1)


@pytest.mark.parametrize(
    "qparams, spec, message",
    [
        (QParams(0.0, 0), QuantSpec(), "scale must be positive and finite; got 0.0"),
        (QParams(-1.0, 0), QuantSpec(), "scale must be positive and finite; got -1.0"),
        (QParams(math.nan, 0), QuantSpec(), "scale must be positive.*got nan"),
        (QParams(math.inf, 0), QuantSpec(), "scale must be positive.*got inf"),
        (
            QParams(1.0, 128),
            QuantSpec(),
            "zero_point must be from -128 to 127.*got 128",
        ),
        (QParams(1.0, -1), QuantSpec(signed=False), "from 0 to 255.*got -1"),
        (QParams(1.0, 5), QuantSpec(symmetric=True), "from 0 to 0.*got 5"),
        (
            QParams(np.ones(2), np.zeros(2, np.int32)),
            CHANNELS,
            r"scale must be of shape \(3,\).*got \(2,\)",
        ),
        (
            QParams(np.ones(3), np.int32(0)),
            CHANNELS,
            r"zero_point must be of shape \(3,\).*got \(\)",
        ),
        (
            QParams(np.array([1.0, 0.0, 1.0]), np.zeros(3, np.int32)),
            CHANNELS,
            "scale must be positive and finite; got 0.0",
        ),
        (ONE, QuantSpec(rounding="stochastic"), "needs a key=; got None"),
        (ONE, QuantSpec(channel_axis=2), "channel_axis=2 is out of range"),
    ],
)
def test_bad_parameters(qparams, spec, message):
    with pytest.raises(ValueError, match=message):
        quant.quantize(X, qparams, spec)
    with pytest.raises(ValueError, match=message):
        quant.fake_quant(X, qparams, spec)


@pytest.mark.parametrize(
    "qparams",
    [QParams(0.0, 0), QParams(1.0, 200), QParams(np.ones(2), np.zeros(2, int))],
)
def test_bad_parameters_of_codes(qparams):
    with pytest.raises(ValueError, match="scale must be|zero_point must be"):
        quant.dequantize(np.zeros(3, np.int8), qparams, QuantSpec())


def test_zero_points_are_integers():
    with pytest.raises(TypeError, match="zero_point must be integers; got float"):
        quant.quantize(X, QParams(1.0, 0.5), QuantSpec())


@pytest.mark.parametrize("function", [quant.quantize, quant.fake_quant])
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, np.complex64])
def test_only_floating_numbers_have_codes(function, dtype):
    name = np.dtype(dtype).name
    with pytest.raises(TypeError, match=f"x must be floating numbers; got {name}"):
        function(X.astype(dtype), ONE, QuantSpec())


@pytest.mark.usefixtures("unchecked")
def test_lists_are_no_arrays():
    with pytest.raises(TypeError, match="x must be an array; got list"):
        quant.quantize([1.0, 2.0], ONE, QuantSpec())  # type: ignore


def test_nan_has_no_code_on_the_host():
    with pytest.raises(ValueError, match="x must not hold NaN"):
        quant.quantize(np.array([1.0, np.nan]), ONE, QuantSpec())
    with pytest.raises(ValueError, match="x must not hold NaN"):
        quant.quantize(jnp.array([jnp.nan], jnp.bfloat16), ONE, QuantSpec())


def test_codes_have_the_kind_of_their_format():
    with pytest.raises(TypeError, match="codes of integer are int8; got float32"):
        quant.dequantize(X, ONE, QuantSpec())
    with pytest.raises(TypeError, match="codes of float8_e4m3fn are.*got int8"):
        quant.dequantize(X.astype(np.int8), ONE, quant.FP8_E4M3)


def test_an_array_without_entries_has_no_range():
    with pytest.raises(ValueError, match=r"without entries has no range.*\(0, 3\)"):
        quant.array_qparams(np.zeros((0, 3), np.float32), QuantSpec())
    with pytest.raises(ValueError, match="lo must be finite; got nan"):
        quant.array_qparams(np.array([1.0, np.nan]), QuantSpec())
