"""Claim: aggregation without scatters takes a fifth of segment_sum's CPU time or less.

    python benchmarks/aggregation.py                 50,000 nodes, 2.5 million edges
    python benchmarks/aggregation.py --degree 15     fewer edges
    python benchmarks/aggregation.py --record --plot

A random graph with a power law of degrees (Chung-Lu), weights as GCN has them, 256
float32 features. CPU time of all threads; contenders take turns:

  jaxaccel            spmm, rows in buckets of equal width
  jaxaccel, gradient  its gradient, the spmm of the transpose, forward included
  segment_sum         what jax users write: gather, multiply, segment_sum
  BCSR                jax.experimental.sparse
  SciPy               csr_matrix @ x
  torch               torch.sparse_csr_tensor @ x (MKL), where it is installed
"""

import argparse
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse
from jax.experimental import sparse

from jaxaccel import graph
from jaxaccel.records import Headline, Record, interleave, paired_ratio

RESULTS = Path(__file__).parent / "results"
OURS, GRADIENT = "jaxaccel", "jaxaccel, gradient"
BOUND = 5.0


def main(arguments: list[str] | None = None) -> Record:
    options = parse(arguments)
    record = measure(options)
    print(record.to_json() if options.json else record.table())
    if options.record:
        record.write(RESULTS)
    if options.plot:
        draw(record, RESULTS / f"{record.name}.png")
    return record


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="sums over neighbours")
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--degree", type=int, default=50, help="mean")
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print the record")
    parser.add_argument("--record", action="store_true", help="write to results/")
    parser.add_argument("--plot", action="store_true", help="PNG beside the record")
    options = parser.parse_args(arguments)
    if min(options.nodes, options.degree, options.features) < 1 or options.rounds < 2:
        parser.error("sizes must be at least 1, --rounds at least 2")
    return options


def power_law(nodes: int, degree: int) -> graph.Graph:
    """A Chung-Lu graph, nodes in random order."""
    rng = np.random.default_rng(0)
    weights = (np.arange(nodes) + 10.0) ** -0.6
    edges = rng.choice(nodes, (2, nodes * degree), p=weights / weights.sum())
    src, dst = rng.permutation(nodes)[edges]
    return graph.Graph.from_edges(src, dst, num_nodes=nodes, normalize="symmetric")


def measure(options: argparse.Namespace) -> Record:
    g = power_law(options.nodes, options.degree)
    rng = np.random.default_rng(1)
    x = rng.normal(size=(options.nodes, options.features)).astype(np.float32)
    start = time.process_time()
    compiled = jax.jit(graph.spmm).lower(g, jnp.asarray(x)).compile()
    seconds = time.process_time() - start
    contenders = make_contenders(g, x)
    times = interleave(contenders, rounds=options.rounds, clock=time.process_time)
    rounds = {k: [1e3 * t for t in v] for k, v in times.items()}
    ratios = [f"{name} / {OURS}" for name in contenders if name != OURS]
    main_ratio = paired_ratio(rounds["segment_sum"], rounds[OURS])
    standard = (options.nodes, options.degree, options.features) == (50_000, 50, 256)
    size = f"{g.num_edges / 1e6:g} million edges, {options.features} features"
    analysis: Any = compiled.memory_analysis()
    return Record.create(
        "aggregation" if standard else f"aggregation_degree_{options.degree}",
        f"Sums over {size} take at most 1/{BOUND:g} of segment_sum's CPU time",
        verdict="helps" if main_ratio.low >= BOUND else "no evidence",
        parameters={
            k: getattr(options, k) for k in ("nodes", "degree", "features", "rounds")
        },
        unit="ms of CPU time",
        rounds=rounds,
        ratios=ratios,
        figures={
            "CPU seconds to compile": round(seconds, 1),
            "temporary memory, MB": round(analysis.temp_size_in_bytes / 1e6, 1),
            "edges times features, MB": round(g.num_edges * options.features * 4e-6, 1),
            "slots an edge": round(
                sum(c.size for c in g.incoming.columns) / g.num_edges, 2
            ),
        },
        headline=[
            Headline(f"Less CPU time, sums over {size}", against, f"{name} / {OURS}")
            for name, against in (
                ("segment_sum", "gather and `segment_sum`"),
                ("SciPy", "SciPy's CSR matrix"),
                ("torch", "torch's CSR matrix (MKL)"),
            )
            if name in contenders
        ],
    )


def make_contenders(g: graph.Graph, x: np.ndarray) -> dict[str, Callable[[], Any]]:
    count = g.num_dst
    matrix = scipy.sparse.csr_matrix(
        (np.array(g.weights), np.array(g.src), np.array(g.indptr)),
        shape=(count, g.num_src),
    )
    # torch takes no edge twice.
    matrix.sum_duplicates()
    device = jnp.asarray(x)
    bcsr = sparse.BCSR.from_scipy_sparse(matrix)
    ours = jax.jit(graph.spmm)
    reference = jax.jit(lambda g, x: graph.spmm(g, x, implementation="segment"))
    product = jax.jit(lambda a, x: a @ x)

    @jax.jit
    def gradient(g, x, cotangent):
        y, back = jax.vjp(lambda x: graph.spmm(g, x), x)
        return y, back(cotangent)

    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: ours(g, device),
        GRADIENT: lambda: gradient(g, device, device),
        "segment_sum": lambda: reference(g, device),
        "BCSR": lambda: product(bcsr, device),
        "SciPy": lambda: matrix @ x,
    }
    if importlib.util.find_spec("torch"):
        contenders["torch"] = in_torch(matrix, x)
    return contenders


def in_torch(matrix: Any, x: np.ndarray) -> Callable[[], Any]:
    import torch  # type: ignore[import-not-found]

    rows, columns, values = (
        torch.from_numpy(np.array(part))
        for part in (matrix.indptr, matrix.indices, matrix.data)
    )
    a: Any = torch.sparse_csr_tensor(
        rows, columns, values, matrix.shape, check_invariants=True
    )
    b = torch.from_numpy(x)

    def run() -> int:
        return len(a @ b)

    return run


def draw(record: Record, path: Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "the plot needs matplotlib: pip install 'jaxaccel[examples]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    names = list(record.rounds)
    medians = [float(np.median(record.rounds[name])) for name in names]
    axes.barh(names, medians, color="#0072B2")
    for row, median in enumerate(medians):
        axes.text(median, row, f" {median:.0f}", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel(f"{record.unit}, median of {record.parameters['rounds']} rounds")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


if __name__ == "__main__":
    main()
