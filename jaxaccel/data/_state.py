"""The state of a run over a store: small, JSON-able, and checked when restored."""

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxaccel.data._plan import Plan
from jaxaccel.data._store import ColumnSpec, Store

_SAMPLE = 16
_SAMPLE_BYTES = 16 << 20


class LoaderState(dict[str, Any]):
    """A state, which `grain.checkpoint` can write, too."""

    def decode(self) -> str:
        """The state as JSON."""
        # Grain's handler asks the state of a foreign iterator for its text.
        return json.dumps(self, indent=2)


def sample_content(store: Store) -> int | None:
    """Computes a checksum of a few examples, which other data does not have.

    Args:
      store: The store.

    Returns:
      The CRC-32 of the whole numbers and booleans in 16 examples, fewer where they
      are large. It is the same on every machine; None for stores that decode, or
      hold floats alone, whose last bits may differ.
    """
    spec = {name: c for name, c in store.spec.items() if c.dtype.kind in "biu"}
    if not store._sampled or not spec:
        return None
    size = sum(c.dtype.itemsize * math.prod(c.shape) for c in store.spec.values())
    count = max(1, min(_SAMPLE, _SAMPLE_BYTES // max(size, 1)))
    rows = np.unique(np.linspace(0, len(store) - 1, count).astype(np.int64))
    batch, checksum = store.take(rows), 0
    for name in sorted(spec):
        little = batch[name].astype(batch[name].dtype.newbyteorder("<"), copy=False)
        checksum = zlib.crc32(np.ascontiguousarray(little).data, checksum)
    return checksum


def make_state(
    step: int, plan: Plan, spec: Mapping[str, ColumnSpec], content: int | None = None
) -> LoaderState:
    """Describes a position so that it can be restored, and refused elsewhere.

    Args:
      step: Batches yielded so far.
      plan: The plan they followed.
      spec: The store's columns.
      content: What `sample_content` returned.

    Returns:
      A dict of integers, strings, booleans and dicts. What may change between
      two runs is left out: the number of epochs and of processes.
    """
    fingerprint = plan.fingerprint()
    # Text, because JSON turns tuples into lists.
    fingerprint["columns"] = {
        name: f"{column.dtype}{list(column.shape)}" for name, column in spec.items()
    }
    if content is not None:
        fingerprint["content"] = content
    return LoaderState(step=step, fingerprint=fingerprint)


def read_state(
    state: Mapping[str, Any] | str | bytes,
    plan: Plan,
    spec: Mapping[str, ColumnSpec],
    content: int | None = None,
) -> int:
    """Checks a state against a plan and a store.

    Args:
      state: What `make_state` returned, possibly through JSON, or that JSON itself.
      plan: The plan to continue with.
      spec: The columns of the store to continue with.
      content: What `sample_content` returned of it; compared where both have one.

    Returns:
      The step to continue at.

    Raises:
      ValueError: If it is no such state, belongs to another plan or store, or its
        step is behind the end of the plan.
    """
    if isinstance(state, (str, bytes)):
        state = _parse(state)
    if not isinstance(state, Mapping) or set(state) != {"step", "fingerprint"}:
        raise ValueError(
            "a loader's state has the keys 'step' and 'fingerprint'; pass what "
            f"get_state() returned, got {state!r}"
        )
    step, theirs = state["step"], state["fingerprint"]
    if not isinstance(theirs, Mapping):
        raise ValueError(f"the state's fingerprint must be a dict, got {theirs!r}")
    ours = make_state(0, plan, spec, content)["fingerprint"]
    if "content" not in ours.keys() & theirs.keys():
        theirs = {name: x for name, x in theirs.items() if name != "content"}
        ours.pop("content", None)
    differing = [
        f"{name}: saved {theirs.get(name)!r}, now {ours.get(name)!r}"
        for name in sorted(ours | dict(theirs))
        if theirs.get(name) != ours.get(name)
    ]
    if differing:
        raise ValueError(
            "the state was saved from another plan or store and would continue with "
            f"other batches ({'; '.join(differing)}); use the saved values, or start "
            "anew without the state"
        )
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"the state's step must be an integer >= 0, got {step!r}")
    if plan.num_steps is not None and step > plan.num_steps:
        raise ValueError(
            f"the state is at step {step}, but the plan ends after {plan.num_steps} "
            "steps; give the plan more epochs"
        )
    return step


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the loader's state is no JSON ({error}); the file may be damaged"
        ) from error
