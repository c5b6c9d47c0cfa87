"""Where the time of a step goes: a table of operations, from a trace."""

import collections
import csv
import dataclasses
import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from jaxaccel.train import _hlo_flops
from jaxaccel.train._hlo import Program, read_programs
from jaxaccel.train._trace_events import Event, read_events, union


@dataclasses.dataclass(frozen=True)
class OpRow:
    """One operation of a compiled program, or one kind of work of the host.

    Attributes:
      name: Of XLA's operation; or what the host did.
      kind: `"op"`; `"copy"` between host and device, as GPUs report it; `"put"`, the
        host hands a batch to the device; `"load"`, it waits for a batch;
        `"dispatch"`, it starts programs; `"idle"`, no program ran.
      program: The program that it belongs to; "" of the host.
      calls: How often it ran.
      seconds: Time in which it ran, on any thread or stream, counted once.
      share: `seconds` of the traced time. Shares of rows that ran at the same time
        overlap.
      flops: Operations of all calls, counted in the compiled program; None for
        calls of libraries, which do not tell.
      bytes: Size of inputs and results of all calls.
      scope: Named scopes that it comes from, such as flax modules; "" if none.
      backward: Whether it is part of the gradient.
      source: `file:line` that it comes from; "" if unknown.
    """

    name: str
    kind: str
    program: str
    calls: int
    seconds: float
    share: float
    flops: float | None
    bytes: int
    scope: str
    backward: bool
    source: str


@dataclasses.dataclass(frozen=True)
class OpTable:
    """Where the time went; `str` of it shows the largest rows.

    Attributes:
      rows: The rows, the longest first.
      steps: Number of traced steps.
      seconds: The traced time.
      step_seconds: Time between the first and the last operation of each run of a
        program, together: what the device needed for the steps.
      coverage: Share of `step_seconds` in which a row of kind `"op"` or `"copy"`
        ran.
      named_share: Share of the operations' time that is under a named scope.
      events: The stretches that the rows are made of.
    """

    rows: tuple[OpRow, ...]
    steps: int
    seconds: float
    step_seconds: float
    coverage: float
    named_share: float
    events: tuple[Event, ...] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.table()

    def table(self, limit: int = 25) -> str:
        """Writes the rows as text.

        Args:
          limit: Number of rows of operations; rows of the host are always shown.

        Returns:
          A line a row: share of the time, milliseconds a step, calls a step, GFLOP
          and MB a call, scope and source line.
        """
        ops = [row for row in self.rows if row.kind == "op"]
        shown = set(map(id, ops[:limit]))
        lines = [
            f"{self.steps} steps, {1e3 * self.seconds / self.steps:.3f} ms each, of "
            f"which {1e3 * self.step_seconds / self.steps:.3f} ms in programs "
            f"({self.coverage:.1%} accounted for, {self.named_share:.1%} of that under "
            "named scopes)",
            f"{'share':>6} {'ms/step':>9} {'calls':>6} {'GFLOP':>8} {'MB':>8}  name",
        ]
        lines += [
            self._line(row) for row in self.rows if row.kind != "op" or id(row) in shown
        ]
        rest = ops[limit:]
        if rest:
            names = {(row.program, row.name) for row in rest}
            seconds = union(
                (x.start / 1e9, x.end / 1e9)
                for x in self.events
                if x.kind == "op" and (x.program, x.name) in names
            )
            lines.append(
                f"{seconds / self.seconds:6.1%} in {len(rest)} more operations"
            )
        return "\n".join(lines)

    def by_scope(self, depth: int | None = None) -> dict[str, float]:
        """Sums the operations by named scope.

        Args:
          depth: Number of leading scopes that count; None means all.

        Returns:
          Seconds by scope, the longest first; `""` is what no scope holds.
        """
        spans: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
        scopes = {(x.program, x.name): x.scope for x in self.rows if x.kind == "op"}
        for event in self.events:
            if event.kind == "op" and (event.program, event.name) in scopes:
                parts = scopes[event.program, event.name].split("/")
                spans["/".join(parts[:depth])].append((event.start, event.end))
        sums = {name: union(x) / 1e9 for name, x in spans.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all rows as a CSV file."""
        names = [field.name for field in dataclasses.fields(OpRow)]
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(names)
            writer.writerows(
                [getattr(row, name) for name in names] for row in self.rows
            )

    def _line(self, row: OpRow) -> str:
        calls = row.calls / self.steps
        flops = "-" if row.flops is None else f"{row.flops / row.calls / 1e9:.3f}"
        if row.kind == "idle":
            calls, flops = 0, "-"
        where = " ".join(
            x
            for x in (
                f"{row.kind}: {row.name}" if row.kind != "op" else row.name,
                f"[{row.scope}]" if row.scope else "",
                "(gradient)" if row.backward else "",
                "/".join(row.source.rsplit("/", 2)[-2:]),
            )
            if x
        )
        return (
            f"{row.share:6.1%} {1e3 * row.seconds / self.steps:9.3f} {calls:6.4g} "
            f"{flops:>8} {row.bytes / max(1, row.calls) / 1e6:8.2f}  {where}"
        )


def op_table(trace: str | os.PathLike[str]) -> OpTable:
    """Reads a trace of `profile` or of `jax.profiler`.

    Neither TensorFlow nor a profiler's user interface is needed: `ProfileData` reads
    the times, and the programs that the trace carries name scopes, source lines,
    shapes and so the operations.

    Args:
      trace: An `.xplane.pb` file, or a folder, of which the latest one is taken.

    Returns:
      The table. Without steps of `profile`, those of `StepTraceAnnotation` count, and
      without them the whole trace is one step.

    Raises:
      ValueError: If there is no trace, or no program ran in it.
    """
    from jax.profiler import ProfileData

    path = _latest(pathlib.Path(trace))
    data = path.read_bytes()
    with warnings.catch_warnings():
        # Python 3.12 deprecates how jaxlib makes the types of ProfileData when they
        # are first used; as an error, that warning would abort the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        steps, events = read_events(ProfileData.from_serialized_xspace(data))
    ops = [event for event in events if event.kind in ("op", "copy")]
    if not ops:
        raise ValueError(f"no program ran in the trace {os.fspath(path)!r}")
    start, end = min(x.start for x in ops), max(x.end for x in ops)
    if steps:
        start = min(x[0] for x in steps)
        end = max(end, *(x[1] for x in steps))
    inside = [event for event in events if event.end > start and event.start < end]
    programs = read_programs(data, {event.program for event in inside})
    return _build(inside, programs, len(steps) or 1, start, end)


def _build(
    events: list[Event],
    programs: dict[str, Program],
    steps: int,
    start: float,
    end: float,
) -> OpTable:
    grouped: dict[tuple[str, str, str], list[Event]] = collections.defaultdict(list)
    for event in events:
        grouped[event.kind, event.program, event.name].append(event)
    described = {
        key: _describe(key, found, programs, end - start)
        for key, found in grouped.items()
    }
    rows = [row for row in described.values() if row is not None]
    kept = [x for x in events if described[x.kind, x.program, x.name] is not None]
    work = [(x.start, x.end) for x in kept if x.kind in ("op", "copy")]
    busy = union(work)
    running = _running([x for x in kept if x.kind in ("op", "copy")])
    idle = (end - start) - union(running)
    rows.append(
        OpRow(
            "no program runs", "idle", "", 1, idle / 1e9, idle / (end - start),
            None, 0, "", False, "",
        )
    )  # fmt: skip
    named = {(r.program, r.name) for r in rows if r.kind == "op" and r.scope}
    named_time = union((x.start, x.end) for x in kept if (x.program, x.name) in named)
    rows.sort(key=lambda row: -row.seconds)
    return OpTable(
        rows=tuple(rows),
        steps=steps,
        seconds=(end - start) / 1e9,
        step_seconds=union(running) / 1e9,
        coverage=busy / union(running),
        named_share=named_time / busy,
        events=tuple(kept),
    )


def _running(ops: Sequence[Event]) -> list[tuple[float, float]]:
    """Returns when a program ran, from its first operation to its last one.

    Where the trace does not number the runs, as on GPUs, what a step leaves idle
    between its operations cannot be told from what lies between two steps.
    """
    spans = [(x.start, x.end) for x in ops if x.run is None]
    runs: dict[tuple[str, Any], list[Event]] = collections.defaultdict(list)
    for event in ops:
        if event.run is not None:
            runs[event.program, event.run].append(event)
    for found in runs.values():
        spans.append((min(x.start for x in found), max(x.end for x in found)))
    return spans


def _outermost(events: Iterable[Event]) -> int:
    """Counts events that lie in no other one of the same thread."""
    reached: dict[str, float] = {}
    total = 0
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        if event.end > reached.get(event.lane, float("-inf")):
            total += 1
            reached[event.lane] = event.end
    return total


def _describe(
    key: tuple[str, str, str],
    events: list[Event],
    programs: dict[str, Program],
    total: float,
) -> OpRow | None:
    kind, program_name, name = key
    seconds = union((x.start, x.end) for x in events)
    flops, size, scope, backward, source = None, 0, "", False, ""
    program = programs.get(program_name)
    found = _hlo_flops.find(program, name) if program else None
    if program is not None and found is not None:
        instruction, computation = found
        if instruction.opcode in _hlo_flops.CONTROL:
            return None  # what it runs has rows of its own
        each = _hlo_flops.count(program, instruction, computation)
        flops = None if each is None else each * len(events)
        size = _hlo_flops.traffic(program, instruction, computation) * len(events)
        op_name, source = _hlo_flops.origin(program, instruction, computation)
        scope, backward = _hlo_flops.scope_of(op_name), _hlo_flops.is_backward(op_name)
    return OpRow(
        name=_readable(name) if kind != "op" else name,
        kind=kind,
        program=re.sub(r"\(\d*\)$", "", program_name) if kind != "op" else program_name,
        calls=_outermost(events) if kind == "dispatch" else len(events),
        seconds=seconds / 1e9,
        share=seconds / total,
        flops=flops,
        bytes=size,
        scope=scope,
        backward=backward,
        source=source,
    )


def _readable(name: str) -> str:
    return {"jaxaccel.put": "batches to the device", "jaxaccel.load": "next batch"}.get(
        name, name
    )


def _latest(trace: pathlib.Path) -> pathlib.Path:
    if trace.is_file():
        return trace
    found = sorted(trace.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ValueError(
            f"{os.fspath(trace)!r} holds no trace (*.xplane.pb); was the loop shorter "
            "than the steps that profile skips?"
        )
    return found[-1]
