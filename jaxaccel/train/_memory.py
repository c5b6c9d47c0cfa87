"""Which buffers a compiled step needs on the device."""

import dataclasses
from typing import Any

from jaxaccel.train import _hlo_flops
from jaxaccel.train._hlo import (
    Instruction,
    Message,
    Program,
    number,
    parse,
    read_module,
)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer of a compiled program.

    Attributes:
      kind: `"argument"`, `"donated"` (an argument whose memory a result takes),
        `"output"`, `"constant"` or `"temporary"`.
      name: Path of the argument, or name of XLA's operation.
      bytes: Its size. Temporaries that do not live at the same time share memory.
      scope: Named scopes of a temporary, such as flax modules; "" if none.
      source: `file:line` that it comes from; "" if unknown.
    """

    kind: str
    name: str
    bytes: int
    scope: str = ""
    source: str = ""


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """What a compiled program needs on one device; `str` of it is a table.

    Attributes:
      argument_bytes: Its arguments.
      output_bytes: Its results, those in donated memory included.
      alias_bytes: Results that are in the memory of donated arguments.
      temp_bytes: Its working memory.
      peak_bytes: `argument + output - alias + temp`: what is needed at once.
      buffers: The buffers, the largest first.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    buffers: tuple[Buffer, ...]

    @property
    def peak_bytes(self) -> int:
        """What is needed at once."""
        kept = self.argument_bytes + self.output_bytes - self.alias_bytes
        return kept + self.temp_bytes

    def __str__(self) -> str:
        return self.table()

    def table(self, limit: int = 20) -> str:
        """Writes the totals and the largest buffers.

        Args:
          limit: Number of buffers.

        Returns:
          A line a buffer.
        """
        head = (
            f"{_mib(self.peak_bytes)} MiB: arguments {_mib(self.argument_bytes)}, "
            f"outputs {_mib(self.output_bytes)} ({_mib(self.alias_bytes)} of them in "
            f"donated arguments), temporary {_mib(self.temp_bytes)}"
        )
        lines = [
            " ".join(
                x
                for x in (
                    f"{_mib(buffer.bytes):>10}  {buffer.kind:<9}  {buffer.name}",
                    f"[{buffer.scope}]" if buffer.scope else "",
                    "/".join(buffer.source.rsplit("/", 2)[-2:]),
                )
                if x
            )
            for buffer in self.buffers[:limit]
        ]
        return "\n".join([head, *lines])


def memory_report(function: Any, *args: Any) -> MemoryReport:
    """Compiles a jitted function, without running it, and lists its buffers.

    Args:
      function: A jitted function, such as a train step, or one that is compiled
        already (`function.lower(...).compile()`).
      *args: Its arguments, arrays or `jax.ShapeDtypeStruct`s; none is donated. None
        for a compiled one.

    Returns:
      The report of one device.

    Raises:
      TypeError: If the function is not jitted.
      RuntimeError: If the backend does not say what it needs.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import train
      >>> @jax.jit
      ... def double(x):
      ...     return 2 * x
      >>> report = train.memory_report(double, jnp.ones(256))
      >>> report.argument_bytes, report.peak_bytes
      (1024, 2048)
      >>> [buffer.name for buffer in report.buffers if buffer.kind == "argument"]
      ['x']
    """
    compiled = function
    if not hasattr(function, "memory_analysis"):
        if not hasattr(function, "lower"):
            raise TypeError(
                f"function must be jitted, jax.jit(f); got {type(function).__name__}"
            )
        compiled = function.lower(*args).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RuntimeError("this backend does not say how much memory a program needs")
    return MemoryReport(
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        buffers=_buffers(compiled, analysis),
    )


def _buffers(compiled: Any, analysis: Any) -> tuple[Buffer, ...]:
    module = compiled.runtime_executable().hlo_modules()[0]
    program = read_module(module.as_serialized_hlo_module_proto())
    assignment = parse(memoryview(analysis.serialized_buffer_assignment_proto))
    by_id = {
        number(x.message, 35): (x, computation)
        for computation, inside in program.computations.items()
        for x in inside.values()
    }
    arguments = {
        number(x.message, 9): x.op_name or x.name
        for x in program.computations[program.entry].values()
        if x.opcode == "parameter"
    }
    logical = {}
    for data in assignment.get(1, []):
        buffer = parse(data)
        place = parse(buffer[3][0]) if 3 in buffer else {}
        logical[number(buffer, 1)] = by_id.get(number(place, 4))
    found = []
    for data in assignment.get(3, []):
        found += _of_allocation(parse(data), logical, arguments, program)
    return tuple(sorted(found, key=lambda buffer: -buffer.bytes))


def _of_allocation(
    allocation: Message,
    logical: dict[int, tuple[Instruction, str] | None],
    arguments: dict[int, str],
    program: Program,
) -> list[Buffer]:
    size = number(allocation, 2)
    if number(allocation, 3):
        return []  # registers of a thread
    if number(allocation, 5):
        kind = "donated" if number(allocation, 13) else "argument"
        return [Buffer(kind, arguments.get(number(allocation, 6), "?"), size)]
    assigned = [parse(x) for x in allocation.get(9, [])]
    if number(allocation, 12) or number(allocation, 7):
        kind = "constant" if number(allocation, 12) else "output"
        part = max(assigned, key=lambda x: number(x, 3), default={})
        return [_named(kind, size, logical.get(number(part, 1)), program)]
    return [
        _named("temporary", number(x, 3), logical.get(number(x, 1)), program)
        for x in assigned
    ]


def _named(
    kind: str, size: int, place: tuple[Instruction, str] | None, program: Program
) -> Buffer:
    if place is None:
        return Buffer(kind, "?", size)
    op_name, source = _hlo_flops.origin(program, *place)
    return Buffer(kind, place[0].name, size, _hlo_flops.scope_of(op_name), source)


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"
