"""Graphs: what they are built of, normalized by, saved as."""

import hypothesis
import hypothesis.strategies as st
import jax
import networkx
import numpy as np
import pytest
import scipy.sparse

from jaxaccel import graph
from jaxaccel.graph import _ell


def dense(g):
    """The matrix of a graph, from its public arrays."""
    matrix = np.zeros((g.num_dst, g.num_src))
    weights = np.ones(g.num_edges) if g.weights is None else np.asarray(g.weights)
    np.add.at(matrix, (np.asarray(g.dst), np.asarray(g.src)), weights)
    return matrix


@hypothesis.given(st.integers(1, 12), st.integers(0, 60), st.integers(0, 2**16))
def test_edges_are_sorted_and_none_is_lost(nodes, edges, seed):
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(nodes, size=(2, edges))
    weights = rng.normal(size=edges)
    g = graph.Graph.from_edges(src, dst, num_nodes=nodes, weights=weights)
    g.validate()
    wanted = np.zeros((nodes, nodes))
    np.add.at(wanted, (dst, src), weights)
    np.testing.assert_allclose(dense(g), wanted, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(g.src), src[g.order])
    np.testing.assert_array_equal(g.edge_values(dst), g.dst)
    np.testing.assert_array_equal(g.in_degrees, np.bincount(dst, minlength=nodes))
    assert list(g.order[np.asarray(g.dst) == 0]) == list(np.flatnonzero(dst == 0))


def test_rows_are_padded_to_at_most_twice_their_length(rng):
    degrees = rng.integers(0, 700, 50)
    indptr = np.concatenate([[0], np.cumsum(degrees)])
    ell = _ell.build(indptr, np.arange(indptr[-1]) % 9, np.arange(indptr[-1]))
    slots = sum(columns.size for columns in ell.columns)
    assert indptr[-1] <= slots < 2 * indptr[-1]
    assert max(columns.shape[0] for columns in ell.columns) == _ell.WIDEST
    edges = np.concatenate([e.ravel() for e in ell.edges])
    np.testing.assert_array_equal(np.sort(edges[edges < indptr[-1]]), range(indptr[-1]))
    np.testing.assert_array_equal(edges[ell.edge_places], range(indptr[-1]))


@pytest.mark.parametrize("normalize", ["none", "mean", "symmetric"])
def test_normalization_is_that_of_dense_matrices(normalize, rng):
    src, dst = rng.integers(9, size=(2, 30))
    weights = rng.uniform(0.1, 1, 30)
    g = graph.Graph.from_edges(
        src, dst, num_nodes=9, weights=weights, normalize=normalize, self_loops=True
    )
    wanted = np.eye(9)
    np.add.at(wanted, (dst, src), weights)
    rows, columns = wanted.sum(1), wanted.sum(0)
    if normalize == "mean":
        wanted = wanted / rows[:, None]
    if normalize == "symmetric":
        wanted = wanted / np.sqrt(rows[:, None] * columns[None])
    np.testing.assert_allclose(dense(g), wanted, rtol=1e-5, atol=1e-7)


def test_undirected_edges_go_both_ways_but_for_loops():
    g = graph.Graph.from_edges([0, 1, 2], [1, 2, 2], num_nodes=3, undirected=True)
    np.testing.assert_array_equal(dense(g), [[0, 1, 0], [1, 0, 1], [0, 1, 1]])
    with pytest.raises(ValueError, match="edges that were added"):
        g.edge_values(np.ones(5))


def test_a_graph_is_a_pytree_that_goes_through_jit():
    g = graph.Graph.from_edges([0, 1], [1, 0], num_nodes=2)
    other = jax.jit(lambda g: jax.tree.map(lambda x: x, g))(g)
    assert repr(other) == repr(g) == "Graph(2 nodes, 2 edges)"
    np.testing.assert_array_equal(dense(other), dense(g))


def test_graphs_of_other_libraries(rng):
    matrix = scipy.sparse.csc_matrix(
        rng.normal(size=(6, 4)) * (rng.random((6, 4)) < 0.5)
    )
    np.testing.assert_allclose(
        dense(graph.from_scipy(matrix)), matrix.toarray(), rtol=1e-6
    )
    karate = networkx.karate_club_graph()
    g = graph.from_networkx(karate, weight="weight")
    np.testing.assert_allclose(dense(g), networkx.to_numpy_array(karate), rtol=1e-6)
    one_way = networkx.DiGraph([("a", "b"), ("c", "b")])
    wanted = networkx.to_numpy_array(one_way).T
    np.testing.assert_array_equal(dense(graph.from_networkx(one_way)), wanted)
    with pytest.raises(ValueError, match="has no attribute 'w'"):
        graph.from_networkx(one_way, weight="w")
    with pytest.raises(TypeError, match="scipy.sparse"):
        graph.from_scipy(np.eye(3))
    with pytest.raises(TypeError, match="networkx graph"):
        graph.from_networkx([(0, 1)])


@pytest.mark.parametrize("weighted", [True, False])
def test_saved_graphs_come_back(weighted, rng, tmp_path):
    src, dst = rng.integers(20, size=(2, 90))
    weights = rng.normal(size=90) if weighted else None
    g = graph.Graph.from_edges(src, dst, num_nodes=20, weights=weights)
    graph.save_graph(g, tmp_path / "g")
    back = graph.load_graph(tmp_path / "g")
    for a, b in zip(jax.tree.leaves(g), jax.tree.leaves(back), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="is there already"):
        graph.save_graph(g, tmp_path / "g")


@pytest.mark.parametrize("damage", ["cut", "shape", "range", "json", "missing"])
def test_damaged_files_are_told(damage, tmp_path):
    path = tmp_path / "g"
    graph.save_graph(graph.Graph.from_edges([0, 1], [1, 0], num_nodes=2), path)
    target = path / "src.npy"
    if damage == "cut":
        target.write_bytes(target.read_bytes()[:-4])
    elif damage == "shape":
        np.save(target, np.zeros(3, np.int32))
    elif damage == "range":
        np.save(target, np.array([0, 7], np.int32))
    elif damage == "json":
        (path / "graph.json").write_text("{")
    else:
        target.unlink()
    with pytest.raises(ValueError, match=r"damaged|no saved graph|src\[1\] is 7"):
        graph.load_graph(path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"src": [0, 5]}, ValueError, r"src\[1\] is 5"),
        ({"dst": [-1, 0]}, ValueError, r"dst\[0\] is -1"),
        ({"src": [0]}, ValueError, "equally long"),
        ({"src": np.array([0.0, 1.0])}, TypeError, "integers"),
        ({"weights": [1.0, float("nan")]}, ValueError, r"weights\[1\] is nan"),
        ({"weights": [1.0]}, ValueError, "one for each edge"),
        ({"weights": [1.0, -1.0], "normalize": "mean"}, ValueError, "not be negative"),
        ({"normalize": "sym"}, ValueError, "'symmetric'"),
        ({"num_nodes": (2, 3), "self_loops": True}, ValueError, "bipartite"),
        ({"num_nodes": -1}, ValueError, "num_nodes"),
        ({"num_nodes": 2**31}, ValueError, "num_nodes"),
    ],
)
def test_bad_edges(options, error, message):
    arguments = {"src": [0, 1], "dst": [1, 0], "num_nodes": 2} | options
    with pytest.raises(error, match=message):
        graph.Graph.from_edges(arguments.pop("src"), arguments.pop("dst"), **arguments)


def test_broken_arrays_are_found():
    import dataclasses

    g = graph.Graph.from_edges([0, 1], [1, 0], num_nodes=2)
    with pytest.raises(ValueError, match="indptr"):
        dataclasses.replace(g, indptr=g.indptr[::-1]).validate()
