"""The computational graph of a function, in the form that TensorBoard draws."""

import collections
from typing import Any

import jax
import jax.extend


def graph_of(function: Any, *args: Any) -> Any:
    """Traces a function and returns its graph.

    Nodes are jax's primitives. Their names begin with the named scopes that they are
    in, so that TensorBoard folds them. Functions that are called, and bodies of
    scans, are drawn in place, once; a conditional or a `while_loop` is one node.

    Args:
      function: A function of jax, jitted or not.
      *args: Its arguments, arrays or `jax.ShapeDtypeStruct`s.

    Returns:
      A `GraphDef` of tensorboardX.
    """
    from tensorboardX.proto.graph_pb2 import GraphDef  # type: ignore[attr-defined]

    traced = (function if hasattr(function, "trace") else jax.jit(function)).trace(
        *args
    )
    jaxpr = traced.jaxpr
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(args)
    ]
    if len(paths) != len(jaxpr.in_avals):
        paths = [str(i) for i in range(len(jaxpr.in_avals))]
    builder = _Builder(GraphDef())
    names = {}
    for var, aval, path in zip(_open(jaxpr).invars, jaxpr.in_avals, paths, strict=True):
        names[var] = builder.add(f"arguments/{path}", "argument", [], [aval])
    builder.inline(jaxpr, names, "")
    for i, var in enumerate(_open(jaxpr).outvars):
        builder.add(f"results/{i}", "result", builder.inputs([var], names), [])
    return builder.graph


class _Builder:
    def __init__(self, graph: Any):
        self.graph = graph
        self._used: collections.Counter[str] = collections.Counter()

    def add(self, name: str, op: str, inputs: list[str], outputs: list[Any]) -> str:
        """Adds a node and returns its unique name."""
        name = "/".join(_legal(part) for part in name.split("/") if part)
        self._used[name] += 1
        if self._used[name] > 1:
            name = f"{name}_{self._used[name] - 1}"
        node = self.graph.node.add(name=name, op=op, input=inputs)
        shapes = ", ".join(x.str_short() for x in outputs)
        if shapes:
            node.attr["shape"].s = shapes.encode()
        return name

    def inputs(self, variables: Any, names: dict[Any, str]) -> list[str]:
        """Returns the nodes behind variables; literals have none."""
        found = [
            names[x]
            for x in variables
            if not isinstance(x, jax.extend.core.Literal) and x in names
        ]
        return list(dict.fromkeys(found))

    def inline(self, jaxpr: Any, names: dict[Any, str], scope: str) -> None:
        """Adds the nodes of a jaxpr and notes which node each variable comes from."""
        for equation in _open(jaxpr).eqns:
            inner = f"{scope}/{equation.source_info.name_stack}"
            body = _body(equation)
            if body is None:
                name = self.add(
                    f"{inner}/{equation.primitive.name}",
                    equation.primitive.name,
                    self.inputs(equation.invars, names),
                    [x.aval for x in equation.outvars],
                )
                names.update(dict.fromkeys(equation.outvars, name))
                continue
            known = {}
            for var, outer in zip(_open(body).invars, equation.invars, strict=True):
                if self.inputs([outer], names):
                    known[var] = names[outer]
            label = equation.params.get("name", equation.primitive.name)
            self.inline(body, known, f"{inner}/{label}")
            for var, outer in zip(_open(body).outvars, equation.outvars, strict=True):
                if self.inputs([var], known):
                    names[outer] = known[var]


def _open(jaxpr: Any) -> Any:
    """Returns the jaxpr without its constants; newer jax has but one type."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _body(equation: Any) -> Any:
    """Returns the one jaxpr that an equation calls with its own inputs, or None."""
    bodies = list(jax.extend.core.jaxprs_in_params(equation.params))
    if len(bodies) != 1 or equation.primitive.name == "while":
        return None
    same = len(bodies[0].invars) == len(equation.invars)
    return (
        bodies[0] if same and len(bodies[0].outvars) == len(equation.outvars) else None
    )


def _legal(part: str) -> str:
    return "".join(c if c.isalnum() or c in "_.-()" else "_" for c in part)
