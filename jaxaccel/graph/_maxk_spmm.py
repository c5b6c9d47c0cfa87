"""MaxK and aggregation as one operation."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxaccel import ops
from jaxaccel.graph._graph import Graph
from jaxaccel.graph._spmm import check_features, spmm


def maxk_spmm(graph: Graph, x: ArrayLike, k: int) -> tuple[jax.Array, jax.Array]:
    """Keeps the k largest features of each node, and aggregates what is left.

    Args:
      graph: The graph.
      x: `(num_src, features)`, floating.
      k: Features to keep, from 1 to all.

    Returns:
      `maxk(x, k)`, for the path of the node itself, and `spmm(graph, maxk(x, k))`.
      The gradient of both passes through the kept entries alone.

    Raises:
      TypeError: As `spmm` and `jaxaccel.ops.maxk`.
      ValueError: As `spmm` and `jaxaccel.ops.maxk`.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel import graph
      >>> g = graph.Graph.from_edges([0, 1], [1, 1], num_nodes=2)
      >>> own, sums = graph.maxk_spmm(g, np.array([[1.0, 2.0], [4.0, 3.0]]), 1)
      >>> print(own.tolist(), sums.tolist())
      [[0.0, 2.0], [4.0, 0.0]] [[0.0, 0.0], [4.0, 2.0]]

    References:
      Peng et al., MaxK-GNN: Extremely Fast GPU Kernel Design for Accelerating Graph
      Neural Networks Training, 2024, arXiv:2312.08656
    """
    own = ops.maxk(check_features("x", x, graph.num_src), k)
    return own, jnp.asarray(spmm(graph, own))
