"""Graphs from other libraries' objects, and from and to files."""

import json
import os
import pathlib
import secrets
import shutil
from typing import Any

import numpy as np

from jaxaccel.graph._graph import Graph

_FORMAT = 1


def from_scipy(matrix: Any, **options: Any) -> Graph:
    """Builds a graph of a SciPy sparse matrix, `y = matrix @ x`.

    Args:
      matrix: Any sparse matrix or array, `(num_dst, num_src)`; entries are weights.
      **options: As for `Graph.from_edges`, but for `num_nodes` and `weights`.

    Returns:
      The graph: an edge from column to row for each stored entry.

    Raises:
      TypeError: If it is no sparse matrix.
      ValueError: As `Graph.from_edges`.

    Examples:
      >>> import numpy as np, scipy.sparse
      >>> from jaxaccel import graph
      >>> a = scipy.sparse.csr_array(np.array([[0.0, 2.0], [0.0, 0.0]]))
      >>> print(graph.spmm(graph.from_scipy(a), np.array([[1.0], [10.0]])).ravel())
      [20.  0.]
    """
    if not hasattr(matrix, "tocoo"):
        raise TypeError(
            f"from_scipy takes a scipy.sparse matrix; got {type(matrix).__name__}"
        )
    entries = matrix.tocoo()
    rows, columns = entries.shape
    return Graph.from_edges(
        entries.col,
        entries.row,
        num_nodes=(columns, rows),
        weights=entries.data,
        **options,
    )


def from_networkx(network: Any, *, weight: str | None = None, **options: Any) -> Graph:
    """Builds a graph of a NetworkX graph; node i is the i-th of `network.nodes`.

    Args:
      network: Any of its classes; edges of an undirected one go both ways.
      weight: Attribute of the edges that holds their weights; None for 1.
      **options: As for `Graph.from_edges`, but for `num_nodes` and `weights`.

    Returns:
      The graph.

    Raises:
      TypeError: If it is no NetworkX graph.
      ValueError: As `Graph.from_edges`; if an edge lacks the attribute.

    Examples:
      >>> import networkx
      >>> from jaxaccel import graph
      >>> graph.from_networkx(networkx.path_graph(3))
      Graph(3 nodes, 4 edges)
    """
    if not hasattr(network, "edges") or not hasattr(network, "is_directed"):
        raise TypeError(
            f"from_networkx takes a networkx graph; got {type(network).__name__}"
        )
    number = {node: i for i, node in enumerate(network.nodes)}
    rows = list(network.edges(data=True))
    weights = None
    if weight is not None:
        missing = [row[:2] for row in rows if weight not in row[2]]
        if missing:
            raise ValueError(f"edge {missing[0]} has no attribute {weight!r}")
        weights = np.array([row[2][weight] for row in rows], np.float64)
    ends = np.array([[number[a], number[b]] for a, b, _ in rows], np.int64)
    src, dst = ends.reshape(-1, 2).T
    return Graph.from_edges(
        src,
        dst,
        num_nodes=len(number),
        weights=weights,
        undirected=not network.is_directed(),
        **options,
    )


def save_graph(graph: Graph, folder: str | os.PathLike[str]) -> None:
    """Writes a graph's edges as `.npy` files into a new folder.

    Args:
      graph: The graph.
      folder: Its path; it appears when all is written.

    Raises:
      ValueError: If it is there already.

    Examples:
      >>> import tempfile
      >>> from jaxaccel import graph
      >>> g = graph.Graph.from_edges([0, 1], [1, 0], num_nodes=2)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     graph.save_graph(g, folder + "/g")
      ...     print(graph.load_graph(folder + "/g"))
      Graph(2 nodes, 2 edges)
    """
    path = pathlib.Path(folder)
    if path.exists():
        raise ValueError(f"{path} is there already, and is not overwritten")
    work = path.with_name(f"{path.name}.partial.{secrets.token_hex(4)}")
    work.mkdir(parents=True)
    try:
        for name in ("src", "dst", "order"):
            np.save(work / f"{name}.npy", np.asarray(getattr(graph, name)))
        if graph.weights is not None:
            np.save(work / "weights.npy", np.asarray(graph.weights))
        about = {
            "format": _FORMAT,
            "num_src": graph.num_src,
            "num_dst": graph.num_dst,
            "num_edges": graph.num_edges,
            "weighted": graph.weights is not None,
        }
        (work / "graph.json").write_text(json.dumps(about))
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def load_graph(folder: str | os.PathLike[str]) -> Graph:
    """Reads a graph that `save_graph` wrote, and checks it as a new one.

    Args:
      folder: Its path.

    Returns:
      The graph, with edges in the same order.

    Raises:
      ValueError: If there is none, a file is damaged, or its edges are out of range.

    Examples:
      See `save_graph`.
    """
    path = pathlib.Path(folder)
    try:
        about = json.loads((path / "graph.json").read_text())
        names = ["src", "dst", "order"] + ["weights"] * bool(about["weighted"])
        arrays = {n: np.load(path / f"{n}.npy", mmap_mode="r") for n in names}
        counts = int(about["num_src"]), int(about["num_dst"])
        edges, version = int(about["num_edges"]), about["format"]
    except FileNotFoundError as error:
        raise ValueError(f"there is no saved graph at {path}: {error}") from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{path} is damaged: {error}; save the graph again") from error
    if version != _FORMAT:
        raise ValueError(
            f"{path} has the format {version}; this version reads {_FORMAT}"
        )
    for name, array in arrays.items():
        if array.shape != (edges,):
            raise ValueError(
                f"{path}/{name}.npy is damaged: shape {array.shape} of {edges} edges"
            )
    graph = Graph.from_edges(
        arrays["src"],
        arrays["dst"],
        num_nodes=counts,
        weights=arrays.get("weights"),
    )
    return graph.renumbered(np.asarray(arrays["order"]))
