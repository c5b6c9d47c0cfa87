"""Where activations lie in the static buffer of the C export."""

from collections.abc import Mapping

from jaxaccel.quant._graph import IntGraph
from jaxaccel.quant._graph_nodes import Dequantize, Reshape

ALIGNMENT = 4


def arena_offsets(graph: IntGraph) -> tuple[dict[str, int], int]:
    """Returns each buffer's offset in bytes, and the size of all.

    A tensor lives from the node that writes it to the last that reads it, and two
    that live at once do not overlap. Largest first, each goes where the lowest gap
    is. Input and output are the caller's; a reshaped tensor is its input.

    Args:
      graph: The network.

    Returns:
      Offsets by name of the buffer, see `buffers`, and the bytes of the arena.
    """
    owner = buffers(graph)
    lives: dict[str, list[int]] = {}
    for step, node in enumerate(graph.nodes):
        for name in (*node.inputs, node.output):
            lives.setdefault(owner[name], [step, step])[1] = step
    for name in (graph.input, owner[graph.output]):
        lives.pop(name, None)
    sizes = {name: _nbytes(graph, name) for name in lives}
    offsets: dict[str, int] = {}
    for name in sorted(lives, key=lambda name: (-sizes[name], lives[name])):
        first, last = lives[name]
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other])
            for other in offsets
            if lives[other][0] <= last and first <= lives[other][1]
        )
        offset = 0
        for start, end in taken:
            if offset + sizes[name] <= start:
                break
            offset = max(offset, end)
        offsets[name] = offset
    total = max((offsets[name] + sizes[name] for name in offsets), default=0)
    return offsets, total


def buffers(graph: IntGraph) -> Mapping[str, str]:
    """Returns the tensor whose memory each tensor has."""
    owner = {graph.input: graph.input}
    for node in graph.nodes:
        same = isinstance(node, (Reshape, Dequantize))
        owner[node.output] = owner[node.inputs[0]] if same else node.output
    return owner


def _nbytes(graph: IntGraph, name: str) -> int:
    tensor = graph.tensors[name]
    nbytes = tensor.size * tensor.dtype.itemsize
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
