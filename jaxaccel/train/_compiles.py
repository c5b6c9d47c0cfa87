"""Counting compilations, by the name of the compiled function."""

import collections
from typing import Any

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts what XLA compiles while the context is open.

    A step that compiles more than once wastes seconds each time: its batch or its
    state changed a shape, a dtype or a placement. Reads from a persistent
    compilation cache count as well, since jax reports them alike.

    Attributes:
      counts: Number of compilations of each function, by its name.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import train
      >>> @jax.jit
      ... def double(x):
      ...     return 2 * x
      >>> with train.CompileCounter() as compiles:
      ...     for n in (3, 3, 4):
      ...         _ = double(jnp.zeros(n))
      >>> print(compiles.counts["double"])
      2
    """

    def __init__(self):
        self.counts: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *exception: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: Any) -> None:
        del duration_secs
        if event == _EVENT:
            # jax reports `jit(name)`.
            name = str(details.get("fun_name", "")).removeprefix("jit(")
            self.counts[name.removesuffix(")")] += 1
