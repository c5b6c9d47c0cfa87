"""Aggregation and its gradients against float64 SciPy and the segment reference."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

from jaxaccel import graph

SHAPES = {
    "square": (50, 50, 600, 7),
    "rectangular": (40, 30, 500, 16),
    "one node": (1, 1, 4, 3),
    "no edges": (5, 4, 0, 3),
    "hub that is cut": (700, 3, 1500, 5),
    "wide features": (20, 20, 60, 300),
    "isolated nodes": (400, 400, 30, 4),
}


def random_graph(name, rng, weighted=True):
    src_count, dst_count, edges, features = SHAPES[name]
    src = rng.integers(src_count, size=edges)
    dst = rng.integers(dst_count, size=edges)
    if name == "hub that is cut":
        dst[:1200] = 0
    weights = rng.normal(size=edges) if weighted else None
    g = graph.Graph.from_edges(
        src, dst, num_nodes=(src_count, dst_count), weights=weights
    )
    values = np.ones(edges) if weights is None else weights
    shape = (dst_count, src_count)
    matrix = scipy.sparse.coo_matrix((values, (dst, src)), shape=shape).tocsr()
    x = rng.normal(size=(src_count, features)).astype(np.float32)
    return g, matrix, x


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_sums_and_gradients_are_those_of_the_matrix(name, weighted, rng):
    g, matrix, x = random_graph(name, rng, weighted)
    y, back = jax.vjp(lambda x: graph.spmm(g, x), jnp.asarray(x))
    wanted = matrix @ x.astype(np.float64)
    scale = max(1.0, np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(y, wanted, atol=1e-5 * scale)
    cotangent = rng.normal(size=y.shape).astype(np.float32)
    (gradient,) = back(jnp.asarray(cotangent))
    wanted = matrix.T @ cotangent.astype(np.float64)
    scale = max(1.0, np.abs(wanted).max(initial=0))
    np.testing.assert_allclose(gradient, wanted, atol=1e-5 * scale)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
@pytest.mark.parametrize("name", ["square", "hub that is cut", "isolated nodes"])
def test_both_implementations_agree_with_their_gradients(name, reduce, rng):
    g, _, x = random_graph(name, rng)
    c = jnp.asarray(rng.normal(size=(g.num_dst, x.shape[1])), jnp.float32)

    def loss(x, weights, implementation):
        y = graph.spmm(
            g, x, weights=weights, reduce=reduce, implementation=implementation
        )
        return jnp.sum(y * c)

    found, wanted = (
        jax.value_and_grad(loss, (0, 1))(jnp.asarray(x), g.weights, name)
        for name in ("ell", "segment")
    )
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_weighted_gradients_are_those_of_float64(rng):
    g, _, x = random_graph("square", rng)
    c = rng.normal(size=(50, 7))
    gradient = jax.grad(
        lambda w: jnp.sum(graph.spmm(g, x, weights=w) * jnp.asarray(c, jnp.float32))
    )(g.weights)
    wanted = np.einsum("ef,ef->e", c[g.dst], x[g.src].astype(np.float64))
    np.testing.assert_allclose(gradient, wanted, atol=1e-5)
    np.testing.assert_allclose(
        graph.sddmm(g, c.astype(np.float32), x), wanted, atol=1e-5
    )


def test_equal_maxima_share_the_gradient():
    g = graph.Graph.from_edges([0, 1, 2], [0, 0, 0], num_nodes=3)
    x = jnp.array([[2.0], [2.0], [1.0]])
    gradient = jax.grad(lambda x: graph.spmm(g, x, reduce="max")[0, 0])(x)
    np.testing.assert_array_equal(gradient, [[0.5], [0.5], [0.0]])


def test_no_scatter_and_no_buffer_of_edges_times_features(rng):
    edges, features = 40_000, 64
    g = graph.Graph.from_edges(
        rng.integers(800, size=edges), rng.integers(800, size=edges), num_nodes=800
    )
    x = jnp.zeros((800, features))

    def both(g, x, cotangent):
        y, back = jax.vjp(lambda x: graph.spmm(g, x), x)
        return y, back(cotangent)

    compiled = jax.jit(both).lower(g, x, x).compile()
    text, analysis = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and analysis is not None
    assert not re.search(r"= \S+ scatter\(", text)
    assert analysis.temp_size_in_bytes < edges * features * 4 / 4


def test_results_repeat_bit_by_bit(rng):
    g, _, x = random_graph("hub that is cut", rng)
    run = jax.jit(lambda g, x: graph.spmm(g, x))
    first = run(g, x)
    for _ in range(3):
        np.testing.assert_array_equal(run(g, x), first)


def test_bfloat16_features_are_added_in_float32(rng):
    g, matrix, x = random_graph("hub that is cut", rng)
    narrow = jnp.asarray(x, jnp.bfloat16)
    y = graph.spmm(g, narrow)
    assert y.dtype == jnp.bfloat16
    wanted = matrix @ np.asarray(narrow, np.float64)
    np.testing.assert_allclose(y.astype(jnp.float32), wanted, rtol=2**-8, atol=0.02)


@pytest.mark.parametrize("heads", [None, 3])
def test_softmax_over_the_edges_of_each_node(heads, rng):
    g, _, _ = random_graph("hub that is cut", rng)
    shape = (g.num_edges,) if heads is None else (g.num_edges, heads)
    logits = rng.normal(size=shape) * 5
    c = rng.normal(size=shape)
    found, back = jax.vjp(
        lambda x: graph.edge_softmax(g, x), jnp.asarray(logits, jnp.float32)
    )
    wanted, slope = np.zeros(shape), np.zeros(shape)
    for node in range(g.num_dst):
        rows = slice(int(g.indptr[node]), int(g.indptr[node + 1]))
        powers = np.exp(logits[rows] - logits[rows].max(0, initial=-np.inf))
        wanted[rows] = powers / powers.sum(0)
        slope[rows] = wanted[rows] * (c[rows] - (wanted[rows] * c[rows]).sum(0))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(back(jnp.asarray(c, jnp.float32))[0], slope, atol=1e-5)


def test_sddmm_has_gradients_that_are_sums(rng):
    g, _, _ = random_graph("rectangular", rng)
    a, b = rng.normal(size=(30, 5)), rng.normal(size=(40, 5))
    c = rng.normal(size=g.num_edges)
    of_a, of_b = jax.grad(
        lambda a, b: jnp.sum(graph.sddmm(g, a, b) * jnp.asarray(c, jnp.float32)), (0, 1)
    )(jnp.asarray(a, jnp.float32), jnp.asarray(b, jnp.float32))
    shape = (30, 40)
    dst, src = np.asarray(g.dst), np.asarray(g.src)
    matrix = scipy.sparse.coo_matrix((c, (dst, src)), shape=shape).tocsr()
    np.testing.assert_allclose(of_a, matrix @ b, atol=1e-4)
    np.testing.assert_allclose(of_b, matrix.T @ a, atol=1e-4)


@pytest.mark.parametrize("k", [1, 3, 7])
def test_maxk_and_aggregation_are_masked_dense(k, rng):
    g, matrix, x = random_graph("square", rng)
    kept = np.zeros(x.shape, bool)
    np.put_along_axis(kept, np.argsort(-x, axis=1)[:, :k], True, axis=1)
    c, d = rng.normal(size=(2, 50, 7))

    def loss(x):
        own, sums = graph.maxk_spmm(g, x, k)
        return jnp.sum(own * jnp.asarray(c, jnp.float32)) + jnp.sum(
            sums * jnp.asarray(d, jnp.float32)
        )

    value, gradient = jax.value_and_grad(loss)(jnp.asarray(x))
    masked = np.where(kept, x, 0).astype(np.float64)
    np.testing.assert_allclose(
        value, (masked * c).sum() + ((matrix @ masked) * d).sum(), rtol=1e-4
    )
    np.testing.assert_allclose(gradient, kept * (c + matrix.T @ d), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda g, x: graph.spmm(g, x[:-1]), ValueError, "a row for each node"),
        (lambda g, x: graph.spmm(g, x[:, 0]), ValueError, "a row for each node"),
        (lambda g, x: graph.spmm(g, np.ones((50, 2), int)), TypeError, "floating"),
        (lambda g, x: graph.spmm(g, x, weights=x[0]), ValueError, "one for each edge"),
        (lambda g, x: graph.spmm(g, x, reduce="min"), ValueError, "'sum', 'mean'"),
        (lambda g, x: graph.spmm(g, x, implementation="csr"), ValueError, "'ell'"),
        (lambda g, x: graph.sddmm(g, x, x[:, :2]), ValueError, "equally many"),
        (lambda g, x: graph.edge_softmax(g, x), ValueError, "logits must be"),
        (lambda g, x: graph.maxk_spmm(g, x, 8), ValueError, "from 1 to 7"),
    ],
)
def test_bad_arguments(change, error, message, rng):
    g, _, x = random_graph("square", rng)
    with pytest.raises(error, match=message):
        change(g, x)
