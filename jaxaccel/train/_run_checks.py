"""What a loop checks before, in and between its steps."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxaccel.train._checkpoint import Checkpoints
from jaxaccel.train._checkpoint_parts import check_position, part_state
from jaxaccel.train._trees import describe_tree, differences


def total_steps(until: int | None, batches: Any) -> int:
    """Returns the number of steps that a progress line counts to."""
    try:
        return len(batches) if until is None else until
    except (TypeError, ValueError) as error:
        raise ValueError(
            "a progress line needs the number of steps, which these batches do not "
            "tell; give `until`"
        ) from error


def check_start(state: Any, batches: Any, checkpoints: Checkpoints | None) -> None:
    """Finds at the start what the first checkpoint would find later."""
    if not hasattr(state, "step"):
        raise TypeError(
            f"the state needs an attribute `step`, as a TrainState has; got "
            f"{type(state).__name__}"
        )
    if checkpoints is None:
        return
    if not hasattr(batches, "get_state"):
        raise TypeError(
            f"batches of type {type(batches).__name__} cannot continue where they "
            "were: use jaxaccel.data.to_device(Loader(...)), or call checkpoints.save("
            "state) in the body of the loop"
        )
    step, current = int(jax.device_get(state.step)), checkpoints.current_step
    if current is None and checkpoints.steps:
        raise ValueError(
            f"{checkpoints.folder} holds the checkpoints {checkpoints.steps} of an "
            "earlier run; continue it by state = checkpoints.resume(state, "
            "loader=batches), or choose another folder"
        )
    if current is not None and current != step:
        raise ValueError(
            f"the checkpoints stand at step {current}, but the state at {step}: go on "
            "with the state that checkpoints.resume returned"
        )
    check_position(step, part_state("loader", batches))


def check_loss(i: int, metrics: Any) -> None:
    """Raises if the first loss is not finite; waits for it."""
    loss = metrics.get("loss") if isinstance(metrics, Mapping) else None
    if loss is None:
        return
    loss = np.ravel(jax.device_get(loss))[0]
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss} in the first step (up to step {i}), before any update "
            "of this run: look at the batch and the initial parameters, with "
            "jax.config.update('jax_debug_nans', True) for the place. "
            "check_first_loss=False goes on"
        )


def read_evaluation(results: Any) -> dict[str, float]:
    """Returns what an evaluation returned as floats."""
    if not isinstance(results, Mapping):
        raise TypeError(
            f"evaluate must return a dict of floats; got {type(results).__name__}"
        )
    try:
        return {name: float(x) for name, x in results.items()}
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"evaluate must return a dict of floats; got {dict(results)}"
        ) from error


def check_edit(state: Any, edited: Any) -> None:
    """Raises unless an edited state fits the compiled step and the batches."""
    wrong = differences(describe_tree(state), describe_tree(edited), "before")
    if jax.tree.structure(state) != jax.tree.structure(edited):
        wrong = wrong or "  other containers around the same leaves"
    if wrong:
        raise ValueError(
            f"the state that was sent does not fit the step:\n{wrong}\nIt would "
            "compile again; change values only"
        )
    if int(jax.device_get(state.step)) != int(jax.device_get(edited.step)):
        raise ValueError(
            "an edit must keep state.step, which says where the batches are; it was "
            f"{state.step} and is {edited.step}"
        )
