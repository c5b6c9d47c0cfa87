"""MaxK against NumPy's stable sort, and what it does with ties, NaN and infinity."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxaccel import ops


def by_sorting(x, k):
    """Keeps the k largest of the last axis; of equal ones those of lower index."""
    order = np.argsort(-x, axis=-1, kind="stable")[..., :k]
    mask = np.zeros(x.shape, bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return np.where(mask, x, 0), mask


@hypothesis.given(
    st.integers(1, 5), st.integers(1, 40), st.data(), st.sampled_from("efd")
)
def test_the_k_largest_pass_ties_by_index(rows, length, data, code):
    k = data.draw(st.integers(1, length))
    # Few different numbers: many ties.
    values = st.lists(
        st.integers(-3, 3), min_size=rows * length, max_size=rows * length
    )
    x = np.array(data.draw(values), np.dtype(code)).reshape(rows, length) / 2
    wanted, mask = by_sorting(x.astype(np.float32), k)
    found, back = jax.vjp(lambda x: ops.maxk(x, k), jnp.asarray(x))
    np.testing.assert_array_equal(found, wanted)
    (gradient,) = back(jnp.full_like(found, 3))
    np.testing.assert_array_equal(gradient, np.where(mask, 3, 0))
    rows_of = ops.maxk_rows(x, k)
    assert rows_of.columns.dtype == np.uint8
    np.testing.assert_array_equal(np.diff(rows_of.columns.astype(np.int32)) > 0, True)
    np.testing.assert_array_equal(rows_of.columns, np.nonzero(mask)[1].reshape(rows, k))
    np.testing.assert_array_equal(rows_of.values, x[mask].reshape(rows, k))
    words = np.asarray(rows_of.bitmap)
    bits = (words[..., None] >> np.arange(32, dtype=np.uint32)) & 1
    np.testing.assert_array_equal(bits.reshape(rows, -1)[:, :length], mask)


@pytest.mark.parametrize("axis", [0, 1, -2])
def test_any_axis(axis, rng):
    x = rng.normal(size=(4, 5, 6)).astype(np.float32)
    found = np.moveaxis(np.asarray(ops.maxk(x, 2, axis=axis)), axis, -1)
    np.testing.assert_array_equal(found, by_sorting(np.moveaxis(x, axis, -1), 2)[0])


def test_it_holds_a_relu_of_k_units(rng):
    z = rng.normal(size=(9, 16)).astype(np.float32)
    y = ops.maxk(np.concatenate([z, -z], axis=1), 16)
    wanted = np.concatenate([np.maximum(z, 0), np.maximum(-z, 0)], axis=1)
    np.testing.assert_array_equal(y, wanted)


def test_nan_and_infinity_are_kept_first():
    x = jnp.array([[1.0, jnp.nan, jnp.inf, 5.0], [-jnp.inf, -1.0, -2.0, -3.0]])
    y = ops.maxk(x, 2)
    assert np.isnan(y[0, 1]) and y[0, 2] == np.inf and (y[0, ::3] == 0).all()
    np.testing.assert_array_equal(y[1], [0, -1, -2, 0])
    np.testing.assert_array_equal(ops.maxk(jnp.array([-0.0, 0.0, -1.0]), 1)[1:], [0, 0])


@pytest.mark.parametrize("length", [256, 300, 70_000])
def test_columns_are_as_narrow_as_they_can_be(length):
    x = jnp.zeros((1, length)).at[0, length - 1].set(1.0)
    rows = ops.maxk_rows(x, 1)
    wanted = {256: np.uint8, 300: np.uint16, 70_000: np.int32}[length]
    assert rows.columns.dtype == wanted and int(rows.columns[0, 0]) == length - 1


def test_under_jit_vmap_and_in_bfloat16(rng):
    x = jnp.asarray(rng.normal(size=(3, 4, 8)), jnp.bfloat16)
    found = jax.jit(jax.vmap(lambda x: ops.maxk(x, 3)))(x)
    assert found.dtype == jnp.bfloat16
    wanted, _ = by_sorting(np.asarray(x, np.float32), 3)
    np.testing.assert_array_equal(found.astype(jnp.float32), wanted)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("x", "k", "axis", "error", "message"),
    [
        (np.ones(4), 0, -1, ValueError, "from 1 to 4"),
        (np.ones(4), 5, -1, ValueError, "got 5"),
        (np.ones(4), 2, 1, ValueError, "axis=1"),
        (np.arange(4), 2, -1, TypeError, "floating"),
        (np.ones(4), 2.0, -1, TypeError, "integer"),
    ],
)
def test_bad_arguments(x, k, axis, error, message):
    with pytest.raises(error, match=message):
        ops.maxk(x, k, axis=axis)
