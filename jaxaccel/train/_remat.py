"""Trading arithmetic for memory: recompute activations in the backward pass."""

from collections.abc import Callable
from typing import Any

import jax

POLICIES = (
    "everything_saveable",
    "nothing_saveable",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
)


def rematerialized(function: Callable[..., Any], policy: Any) -> Callable[..., Any]:
    """Wraps a function in `jax.checkpoint`; None leaves it alone.

    Args:
      function: What is differentiated.
      policy: A name in `POLICIES` or a policy of `jax.checkpoint_policies`.

    Returns:
      The function.
    """
    if policy is None:
        return function
    if isinstance(policy, str):
        policy = getattr(jax.checkpoint_policies, policy)
    return jax.checkpoint(function, policy=policy)


def check_policy(policy: Any) -> None:
    """Raises unless `policy` is None, a name or a function."""
    if isinstance(policy, str) and policy not in POLICIES:
        raise ValueError(
            f"rematerialize must be one of {', '.join(POLICIES)} or a policy of "
            f"jax.checkpoint_policies; got {policy!r}"
        )
    if policy is not None and not isinstance(policy, str) and not callable(policy):
        raise TypeError(
            "rematerialize must be the name of a policy or a policy; got "
            f"{type(policy).__name__}"
        )
