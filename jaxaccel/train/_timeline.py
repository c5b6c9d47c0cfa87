"""A picture of a trace."""

import collections
import os
from typing import Any

from jaxaccel.train._op_table import OpTable
from jaxaccel.train._trace_events import union

_COLOURS = {
    "op": "tab:blue",
    "copy": "tab:purple",
    "put": "tab:orange",
    "load": "tab:green",
    "dispatch": "tab:gray",
}
# Of threads that run operations, the busiest; a picture has room for no more.
_LANES = 12


def draw_timeline(table: OpTable, path: str | os.PathLike[str]) -> None:
    """Draws what ran when: a lane a kind of work of the host and a thread or stream.

    Args:
      table: From `op_table` or `profile`.
      path: The picture, in a format that its suffix names, such as `.png`.

    Raises:
      ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the timeline needs matplotlib: pip install 'jaxaccel[monitor]'"
        ) from error
    lanes = _lanes(table)
    start = min(event.start for event in table.events)
    figure = Figure(figsize=(12, 1 + 0.4 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for y, (kind, label, spans) in enumerate(lanes):
        bars = [((a - start) / 1e6, (b - a) / 1e6) for a, b in spans]
        # The edge keeps what is shorter than a pixel visible.
        axes.broken_barh(bars, (y - 0.4, 0.8), color=_COLOURS[kind], antialiased=False)
        if kind == "op":
            _label_longest(axes, table, label, y, start)
    axes.set_yticks(range(len(lanes)), [_short(*lane[:2]) for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    axes.set_title(
        f"{table.steps} steps, {1e3 * table.seconds / table.steps:.3g} ms each"
    )
    figure.savefig(path, dpi=120)


def _lanes(table: OpTable) -> list[tuple[str, str, list[tuple[float, float]]]]:
    spans: dict[tuple[str, str], list[tuple[float, float]]] = collections.defaultdict(
        list
    )
    for event in table.events:
        lane = event.lane if event.kind in ("op", "copy") else ""
        spans[event.kind, lane].append((event.start, event.end))
    host = [key for key in spans if key[0] not in ("op", "copy")]
    device = sorted(set(spans) - set(host), key=lambda key: -union(spans[key]))
    return [(*key, spans[key]) for key in [*sorted(host), *device[:_LANES]]]


def _label_longest(axes: Any, table: OpTable, lane: str, y: int, start: float) -> None:
    """Writes names into the bars that have room for them."""
    for event in table.events:
        share = (event.end - event.start) / (1e9 * table.seconds)
        if event.kind == "op" and event.lane == lane and share > 0.04:
            axes.text(
                (event.start - start) / 1e6,
                y,
                f" {event.name}",
                va="center",
                fontsize=7,
                color="white",
                clip_on=True,
            )


def _short(kind: str, lane: str) -> str:
    words = lane.rsplit("/", 1)[0] if lane.count("/") > 1 else lane
    return kind if not lane else f"{kind}: {words[-28:]}"
