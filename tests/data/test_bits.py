"""pack_bits and unpack_bits against np.packbits."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel.data import (
    ArrayStore,
    BatchPlan,
    Loader,
    pack_bits,
    to_device,
    unpack_bits,
)

UNPACK = jax.jit(unpack_bits, static_argnums=1)


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    shape=st.sampled_from([(), (1,), (8,), (17,), (3, 5), (2, 3, 4)]),
    examples=st.sampled_from([1, 4]),
    seed=st.integers(0, 100),
)
def test_round_trip_and_numpys_bits(shape, examples, seed):
    mask = np.random.default_rng(seed).random((examples, *shape)) < 0.4
    packed = pack_bits(mask)
    assert packed.dtype == np.uint8
    assert packed.shape == (examples, -(-int(np.prod(shape)) // 8))
    for row, one in zip(packed, mask, strict=True):
        np.testing.assert_array_equal(row, np.packbits(one))
    unpacked = UNPACK(packed, shape)
    assert unpacked.dtype == bool
    np.testing.assert_array_equal(unpacked, mask)


def test_masks_travel_as_bits_through_the_loader(rng):
    mask = rng.random((12, 10, 10)) < 0.5
    store = ArrayStore({"keep": pack_bits(mask)})
    plan = BatchPlan(12, 4, epochs=1)
    with to_device(Loader(store, plan)) as batches:
        for step, batch in enumerate(batches):
            np.testing.assert_array_equal(
                UNPACK(batch["keep"], (10, 10)), mask[plan.indices(step)]
            )
    assert batches.bytes_put == 12 * 13


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: pack_bits(np.ones((2, 3), np.uint8)), TypeError, "bool, got uint8"),
        (lambda: pack_bits(np.array(True)), ValueError, "leading axis"),
        (lambda: unpack_bits(jnp.zeros((2, 3)), (3,)), TypeError, "got float32"),
        (
            lambda: unpack_bits(jnp.zeros((2, 3), jnp.uint8), (3, 3)),
            ValueError,
            r"\(3, 3\) take 2 bytes.*got shape \(2, 3\)",
        ),
    ],
)
def test_bad_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()
