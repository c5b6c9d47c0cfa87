"""The checks that many arguments share."""

import operator
from typing import Any

import numpy as np


def as_count(name: str, value: Any, least: int) -> int:
    """Checks that an argument is a whole number, and not too small.

    Args:
      name: Its name, for the messages.
      value: What was passed.
      least: The smallest allowed value.

    Returns:
      The value as a Python integer.

    Raises:
      TypeError: If it is not an integer.
      ValueError: If it is smaller than `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def as_flag(name: str, value: Any) -> bool:
    """Checks that an argument is a boolean, Python's or NumPy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def check_transform(transform: object) -> None:
    """Checks that a transform is a function, or None."""
    if transform is not None and not callable(transform):
        raise TypeError(
            "transform must be a function (batch, rng) -> batch, got "
            f"{type(transform).__name__}"
        )
