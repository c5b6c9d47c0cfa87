"""The events of a trace, sorted into kinds of work."""

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

STEP = "jaxaccel.step"
_HOST_ROWS = {
    "jaxaccel.put": "put",
    "jaxaccel.load": "load",
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One stretch of time in a trace; times are nanoseconds."""

    name: str
    kind: str
    program: str
    lane: str
    start: float
    end: float
    run: Any = None
    """Of an operation: which run of its program it belongs to, if the trace tells."""


def read_events(data: Any) -> tuple[list[tuple[float, float]], list[Event]]:
    """Sorts the events of a `ProfileData` into steps and stretches of known kinds."""
    steps: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    events: list[tuple[Event, Any, str]] = []
    ends: dict[Any, float] = {}
    for plane in data.planes:
        device = plane.name.startswith("/device:")
        lines = list(plane.lines)
        if device and any(line.name == "XLA Ops" for line in lines):
            lines = [line for line in lines if line.name == "XLA Ops"]
        for line in lines:
            lane = f"{plane.name} {line.name}"
            for event in line.events:
                if event.name.startswith("$"):
                    continue  # Python's own calls
                stats = dict(event.stats)
                if event.name.startswith("end: "):
                    ends[stats.get("_c")] = float(event.start_ns + event.duration_ns)
                elif event.name == STEP or "step_num" in stats:
                    start = float(event.start_ns)
                    span = start, start + event.duration_ns
                    steps[event.name].append(span)
                else:
                    found = _event(event, stats, device, lane)
                    if found is not None:
                        events.append((found, stats.get("_p"), event.name))
    # The CPU backend starts a large operation, lets other threads finish it and
    # notes its end in an event of its own, which points back to the start.
    finished = [
        dataclasses.replace(event, end=max(event.end, ends.get(key, event.end)))
        if event.kind == "op" and key is not None
        else event
        for event, key, _ in events
    ]
    return steps.get(STEP) or [x for found in steps.values() for x in found], finished


def _event(event: Any, stats: dict[str, Any], device: bool, lane: str) -> Event | None:
    start = float(event.start_ns)
    end = start + event.duration_ns
    if "hlo_op" in stats or (device and lane.endswith("XLA Ops")):
        program = f"{stats.get('hlo_module', '')}({stats.get('program_id', '')})"
        # Newer jax adds the shape: `fusion.3 = f32[8]{0} fusion(...)`.
        name = str(stats.get("hlo_op", event.name)).split(" = ")[0].lstrip("%")
        return Event(name, "op", program, lane, start, end, stats.get("run_id"))
    if device and event.name.lower().startswith("memcpy"):
        return Event(event.name, "copy", "", lane, start, end)
    if event.name in _HOST_ROWS:
        return Event(event.name, _HOST_ROWS[event.name], "", lane, start, end)
    if event.name.startswith("PjitFunction("):
        return Event(event.name, "dispatch", "", lane, start, end)
    return None


def union(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of what at least one of several stretches covers."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
