"""Counting compilations, by the function's name, and keeping them on disk."""

import collections
import os
import pathlib
import threading
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxaccel.train._tensorboard import check_writable

_COMPILED = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


class CompileCounter:
    """Counts what XLA compiles while the context is open.

    A step that compiles more than once wastes seconds each time: its batch or its
    state changed a shape, a dtype or a placement. `counts` and `seconds` include
    reads from a persistent compilation cache, since jax reports them alike;
    `cache_hits` says how many they were.

    Attributes:
      counts: Number of compilations of each function, by its name.
      seconds: Time that XLA took for them, by the same names.
      cache_hits: How many were reads from the persistent cache.

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
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forgets what was counted."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(
            float
        )
        self.cache_hits = 0

    def totals(self) -> tuple[int, float]:
        """Returns the compilations, without reads from the cache, and all seconds."""
        with self._lock:
            compiles = self.counts.total() - self.cache_hits
            return compiles, sum(self.seconds.values(), 0.0)

    def __enter__(self) -> "CompileCounter":
        jax.monitoring.register_event_duration_secs_listener(self._add_compilation)
        jax.monitoring.register_event_listener(self._add_hit)
        return self

    def __exit__(self, *exception: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._add_compilation)
        jax.monitoring.unregister_event_listener(self._add_hit)

    def _add_compilation(
        self, event: str, duration_secs: float, **details: Any
    ) -> None:
        if event == _COMPILED:
            # jax reports `jit(name)`.
            name = str(details.get("fun_name", "")).removeprefix("jit(")
            with self._lock:
                self.counts[name.removesuffix(")")] += 1
                self.seconds[name.removesuffix(")")] += duration_secs

    def _add_hit(self, event: str, **details: Any) -> None:
        del details
        self.cache_hits += event == _CACHE_HIT


def enable_compilation_cache(
    folder: str | os.PathLike[str] | None = None, *, min_seconds: float = 0.0
) -> pathlib.Path:
    """Keeps compiled programs on disk, for this process and later ones.

    A program that was compiled before, by the same version of jax for the same
    device, is read instead: tracing and lowering remain. May be called at any time;
    what this process compiled earlier is not written.

    Args:
      folder: Where they are kept; None means the folder that jax is already set to
        (`JAX_COMPILATION_CACHE_DIR`), or `jaxaccel/compiled` in the user's cache.
      min_seconds: Programs that compile faster are not worth a file.

    Returns:
      The folder.

    Raises:
      ValueError: If the folder cannot be made or written.
    """
    path = _default_folder() if folder is None else pathlib.Path(folder)
    check_writable(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_seconds)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # jax decides at its first compilation whether there is a cache.
    compilation_cache.reset_cache()
    return path


def _default_folder() -> pathlib.Path:
    chosen = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if chosen:
        return pathlib.Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "jaxaccel" / "compiled"
