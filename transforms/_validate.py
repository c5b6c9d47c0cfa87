"""Checks of hyper-parameters at the moment a transformation is built."""

import math
import operator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

_NUMBERS = (int, float, np.number, np.ndarray, jax.Array)


def check_nonnegative(name: str, value: Any, *, finite: bool = True) -> None:
    """Raises unless a number, or an array of one, is real and not negative.

    Tracers have no value yet: of them only shape and type are checked.
    """
    check_real_scalar(name, value)
    if isinstance(value, jax.core.Tracer):
        return
    number = float(value)
    if math.isnan(number) or number < 0 or (finite and math.isinf(number)):
        kind = "finite and >= 0" if finite else ">= 0"
        raise ValueError(f"`{name}` must be {kind}, got {number}")


def check_at_least(name: str, value: Any, least: float) -> None:
    """Raises unless a number, or an array of one, is finite and large enough."""
    check_real_scalar(name, value)
    if not isinstance(value, jax.core.Tracer) and not least <= float(value) < math.inf:
        raise ValueError(f"`{name}` must be finite and >= {least}, got {float(value)}")


def check_decay(name: str, value: Any) -> None:
    """Raises unless a number, or an array of one, is in [0, 1)."""
    check_real_scalar(name, value)
    if not isinstance(value, jax.core.Tracer) and not 0 <= float(value) < 1:
        raise ValueError(f"`{name}` must be >= 0 and < 1, got {float(value)}")


def check_percentile(name: str, value: Any) -> None:
    """Raises unless a number, or an array of one, is in [0, 100]."""
    check_real_scalar(name, value)
    if not isinstance(value, jax.core.Tracer) and not 0 <= float(value) <= 100:
        raise ValueError(f"`{name}` must be from 0 to 100, got {float(value)}")


def check_real_scalar(name: str, value: Any) -> None:
    """Raises unless the value is a real number, or an array of one."""
    if not isinstance(value, _NUMBERS) or not _is_real(jnp.result_type(value)):
        raise TypeError(f"`{name}` must be a real number, got {value!r}")
    if np.shape(value) != ():
        raise ValueError(
            f"`{name}` must be one number, got an array of shape {np.shape(value)}"
        )


def check_int(name: str, value: Any, *, at_least: int) -> None:
    """Raises unless the value is a Python integer of a certain size."""
    # A jax array of an integer has an index as well, but not inside jit.
    if isinstance(value, (bool, jax.Array)) or not hasattr(value, "__index__"):
        raise TypeError(
            f"`{name}` must be a Python integer, got {value!r}; with "
            f"optax.inject_hyperparams list {name!r} in static_args"
        )
    if operator.index(value) < at_least:
        raise ValueError(f"`{name}` must be at least {at_least}, got {value}")


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
