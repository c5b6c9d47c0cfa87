"""What goes into a checkpoint beside the arrays, and what is checked."""

import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import jax

from jaxaccel.train._checkpoint_files import read_host, read_state
from jaxaccel.train._trees import PyTree


def restore_from(
    checkpointer: Any, path: str, like: PyTree, parts: Mapping[str, Any]
) -> PyTree:
    host = read_host(checkpointer, path)
    missing = sorted(set(parts) - set(host["parts"]))
    if missing:
        raise ValueError(
            f"the checkpoint {path} has no state of {missing}; it was saved with "
            f"{sorted(host['parts']) or 'no parts'}. Restore without, to start them "
            "anew"
        )
    state = read_state(checkpointer, path, host["tree"], like)
    # Last, since a loader that has moved cannot be moved back by an error.
    for name, part in parts.items():
        part.set_state(host["parts"][name])
    return state


def part_state(name: str, part: Any) -> Any:
    if not (hasattr(part, "get_state") and hasattr(part, "set_state")):
        raise TypeError(
            f"{name} is a {type(part).__name__}, which has no get_state and set_state: "
            "there is nothing to save of it"
        )
    return as_json(f"the state of {name}", part.get_state())


def as_json(name: str, value: Any) -> Any:
    """Returns what a JSON file gives back, where tuples are lists."""
    try:
        return json.loads(json.dumps(value, allow_nan=True))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON-able ({error})") from error


def check_position(step: int, loader: Any) -> None:
    position = loader.get("step") if isinstance(loader, Mapping) else None
    if position is not None and position != step:
        raise ValueError(
            f"the loader has handed out {position} batches, but the state has done "
            f"{step} steps: a resumed run would skip or repeat batches. Save after "
            "the step that a batch went into; give the batches themselves (of "
            "`to_device`, not the loader below), to `resume` and `restore` as well, as "
            "loader=; and start a new loader with a state of step 0"
        )


def check_writable(folder: str) -> None:
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise ValueError(
            f"the checkpoint folder {folder!r} cannot be written ({error.strerror}); "
            "choose another one"
        ) from error


def metrics_as_floats(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns metrics as floats, which may be on the device."""
    try:
        values = jax.device_get(dict(metrics or {}))
        return {name: float(x) for name, x in values.items()}
    except (TypeError, ValueError) as error:
        raise TypeError(f"metrics must be a flat dict of scalars ({error})") from error
