"""Which argument made a step compile again."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_OTHER_CAUSE = (
    "no argument changed its shape, dtype or placement: a setting of jax, the mesh or "
    "another context, or a cleared cache did it"
)


@dataclasses.dataclass(frozen=True)
class Recompilation:
    """One compilation too many.

    Attributes:
      function: Name of the function.
      call: Number of the call, from 1.
      seconds: What the compilation took.
      changes: What differs from the most similar call that had compiled before, a
        line an argument.
    """

    function: str
    call: int
    seconds: float
    changes: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.function} compiled again at call {self.call} "
            f"({self.seconds:.2g} s): " + "; ".join(self.changes or (_OTHER_CAUSE,))
        )


class RecompileGuard:
    """Calls a jitted function and says why it compiled again.

    Costs nothing while nothing compiles: arguments are only looked at when XLA has
    just compiled the function. `lower`, `trace` and all else is the function's own.

    Args:
      function: A jitted function, such as a train step.
      allowed: Number of compilations that are no news; 2 for a step that also meets
        a smaller last batch.
      action: `"warn"`; `"raise"` stops before the function runs, so that donated
        arguments are still there; `"record"` only keeps it.

    Attributes:
      calls: Number of calls.
      compilations: Number of compilations in them.
      recompilations: A report of each one beyond `allowed`.

    Raises:
      TypeError: If the function is not jitted.
      ValueError: If `allowed < 1` or `action` is another text.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> from jaxaccel import train
      >>> @jax.jit
      ... def step(state, batch):
      ...     return state + batch["x"].sum()
      >>> guard = train.RecompileGuard(step, action="record")
      >>> for n in (4, 4, 3):
      ...     _ = guard(jnp.zeros(()), {"x": jnp.zeros(n)})
      >>> print(guard.recompilations[0].changes[0])
      batch['x'] changed its shape from float32[4] to float32[3]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        allowed: int = 1,
        action: Literal["warn", "raise", "record"] = "warn",
    ):
        if not hasattr(function, "lower"):
            raise TypeError(
                f"function must be jitted, jax.jit(f); got {type(function).__name__}"
            )
        if allowed < 1:
            raise ValueError(f"allowed must be at least 1 compilation; got {allowed}")
        if action not in ("warn", "raise", "record"):
            raise ValueError(
                f"action must be 'warn', 'raise' or 'record'; got {action!r}"
            )
        self.calls = self.compilations = 0
        self.recompilations: list[Recompilation] = []
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self._allowed, self._action = allowed, action
        self._known: list[dict[str, dict[str, str]]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        listener = _Listener(
            self._name, lambda seconds: self._note(seconds, args, kwargs)
        )
        jax.monitoring.register_event_duration_secs_listener(listener)
        known = len(self.recompilations)
        try:
            return self._function(*args, **kwargs)
        finally:
            jax.monitoring.unregister_event_duration_listener(listener)
            if self._action == "warn":
                for report in self.recompilations[known:]:
                    warnings.warn(str(report), stacklevel=2)

    def __getattr__(self, name: str) -> Any:
        # Before __init__ has run, as in copying, there is no function to ask.
        if name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    def _note(self, seconds: float, args: Any, kwargs: Any) -> None:
        new = _describe(self._function, args, kwargs)
        self.compilations += 1
        if self.compilations > self._allowed:
            # The most similar call; of several the latest.
            known = reversed(self._known)
            changes = min((_changes(old, new) for old in known), key=len)
            report = Recompilation(self._name, self.calls, seconds, changes)
            self.recompilations.append(report)
            if self._action == "raise":
                raise RuntimeError(str(report))
        self._known.append(new)


class _Listener:
    """Hears of compilations of one function, in the thread that calls it."""

    def __init__(self, name: str, note: Callable[[float], None]):
        self._name, self._note = name, note

    def __call__(self, event: str, duration_secs: float, **details: Any) -> None:
        name = str(details.get("fun_name", "")).removeprefix("jit(").removesuffix(")")
        if event == _COMPILED and name == self._name:
            self._note(duration_secs)


def _describe(function: Any, args: Any, kwargs: Any) -> dict[str, dict[str, str]]:
    """Says of every leaf of the arguments, by its path, what jit looks at."""
    try:
        names = inspect.signature(function).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        names = {**{f"args[{i}]": x for i, x in enumerate(args)}, **kwargs}
    return {
        f"{name}{jax.tree_util.keystr(path)}": _describe_leaf(leaf)
        for name, tree in names.items()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _describe_leaf(x: Any) -> dict[str, str]:
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        return {"type": type(x).__name__, "value": repr(x)[:80]}
    found = {"shape": str(list(x.shape)), "dtype": str(x.dtype)}
    if isinstance(x, jax.Array):
        # Of an array that was donated these can still be read.
        found["weak type"] = str(x.aval.weak_type)  # type: ignore[attr-defined]
        placement = str(x.sharding) if x.committed else "uncommitted"
        found["sharding"] = placement
    return found


def _changes(
    old: dict[str, dict[str, str]], new: dict[str, dict[str, str]]
) -> tuple[str, ...]:
    lines = [f"{path} is new" for path in new if path not in old]
    lines += [f"{path} is gone" for path in old if path not in new]
    for path in new:
        before, after = old.get(path, new[path]), new[path]
        if before != after:
            lines.append(_change(path, before, after))
    return tuple(lines)


def _change(path: str, before: dict[str, str], after: dict[str, str]) -> str:
    keys = [
        key for key in {**before, **after} if before.get(key, "") != after.get(key, "")
    ]
    if "shape" in before and "shape" in after and {"shape", "dtype"} & set(keys):
        what = " and ".join(key for key in ("shape", "dtype") if key in keys)
        short = [x["dtype"] + x["shape"].replace(" ", "") for x in (before, after)]
        return f"{path} changed its {what} from {short[0]} to {short[1]}"
    moves = [
        f"{key} from {before.get(key, 'none')} to {after.get(key, 'none')}"
        for key in keys
    ]
    return f"{path} changed its {', its '.join(moves)}"
