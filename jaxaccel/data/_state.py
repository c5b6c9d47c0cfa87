"""The state of a run over a store: small, JSON-able, and checked when restored."""

import json
import math
import zlib
from collections.abc import Iterable, Mapping
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


def sample_content(store: Store) -> dict[str, dict[str, int]]:
    """Computes checksums of a few examples, which other data does not have.

    Args:
      store: The store.

    Returns:
      By column, the CRC-32 of the `first` 16 examples and of 16 that are `spread`
      over all, fewer where they are large; the same on every machine. Columns of
      floats are left out, whose last bits may differ, and so are decoded images, in
      whose place the encoded bytes stand. Stores that are decoded in chunks have no
      `spread`; stores of other packages have neither.
    """
    spec = store.spec.values()
    size = sum(c.dtype.itemsize * math.prod(c.shape) for c in spec)
    count = max(1, min(_SAMPLE, _SAMPLE_BYTES // max(size, 1), len(store)))
    spread = np.linspace(0, len(store) - 1, count).astype(np.int64)
    places = {"first": np.arange(count), "spread": np.unique(spread)}
    content = {}
    for place in {"none": [], "first": ["first"], "spread": [*places]}[store._sampled]:
        try:
            sample = store._sample(places[place])
        except ValueError as error:
            raise store._located(error) from error.__cause__
        found = {name: _checksum(values) for name, values in sample.items()}
        content[place] = {name: crc for name, crc in found.items() if crc is not None}
    return {place: crcs for place, crcs in content.items() if crcs}


def _checksum(values: Iterable[Any]) -> int | None:
    checksum = 0
    for value in values:
        array = np.asarray(value)
        if array.dtype.kind not in "biu":
            return None
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        checksum = zlib.crc32(np.ascontiguousarray(little).data, checksum)
    return checksum


def make_state(
    step: int,
    plan: Plan,
    spec: Mapping[str, ColumnSpec],
    content: Mapping[str, Mapping[str, int]] | None = None,
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
    if content:
        fingerprint["content"] = {place: dict(crcs) for place, crcs in content.items()}
    return LoaderState(step=step, fingerprint=fingerprint)


def read_state(
    state: Mapping[str, Any] | str | bytes,
    plan: Plan,
    spec: Mapping[str, ColumnSpec],
    content: Mapping[str, Mapping[str, int]] | None = None,
) -> int:
    """Checks a state against a plan and a store.

    Args:
      state: What `make_state` returned, possibly through JSON, or that JSON itself.
      plan: The plan to continue with.
      spec: The columns of the store to continue with.
      content: What `sample_content` returned of it; compared where both have it.

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
    ours = make_state(0, plan, spec)["fingerprint"]
    theirs = dict(theirs)
    saved = theirs.pop("content", None)
    differing = [
        f"{name}: saved {theirs.get(name)!r}, now {ours.get(name)!r}"
        for name in sorted(ours | theirs)
        if theirs.get(name) != ours.get(name)
    ]
    differing += _other_content(saved, content)
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


def _other_content(
    saved: Any, now: Mapping[str, Mapping[str, int]] | None
) -> list[str]:
    # Formats differ in what they tell cheaply.
    found = []
    for place, crcs in (now or {}).items():
        theirs = saved.get(place) if isinstance(saved, Mapping) else None
        theirs = theirs if isinstance(theirs, Mapping) else {}
        for name in sorted(crcs.keys() & theirs.keys()):
            old, new = theirs[name], crcs[name]
            if old != new:
                what = f"content of the {place} examples of column {name!r}"
                found.append(f"{what}: saved {old}, now {new}")
    return found


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"the loader's state is no JSON ({error}); the file may be damaged"
        ) from error
