"""Graphs: aggregation without scatters, for graph neural networks."""

from jaxaccel.graph._convert import (
    from_networkx,
    from_scipy,
    load_graph,
    save_graph,
)
from jaxaccel.graph._edges import edge_softmax, sddmm
from jaxaccel.graph._graph import Graph
from jaxaccel.graph._maxk_spmm import maxk_spmm
from jaxaccel.graph._spmm import spmm
from jaxaccel.ops import maxk

__all__ = (
    "Graph",
    "edge_softmax",
    "from_networkx",
    "from_scipy",
    "load_graph",
    "maxk",
    "maxk_spmm",
    "save_graph",
    "sddmm",
    "spmm",
)
