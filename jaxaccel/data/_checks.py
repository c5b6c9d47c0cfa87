"""The one check that many arguments share."""

import operator
from typing import Any


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
