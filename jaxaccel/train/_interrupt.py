"""Ctrl-C and SIGTERM that arrive at a safe point of the loop."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class SafeInterrupt:
    """Holds Ctrl-C back until the loop asks for it; a context manager.

    Python raises KeyboardInterrupt wherever the main thread happens to be. Inside
    of jax's own garbage collection callback, which runs every few steps, it is
    printed as "Exception ignored" and lost: the training goes on. Here the first
    Ctrl-C only makes the next `check` raise it, between two steps, with every
    metric intact; a second one stops at once. SIGTERM, which job schedulers send
    some time before they kill, is held back alike; `check` then raises SystemExit
    with the usual code, 143.

    Outside the main thread, where Python takes no signals, it does nothing.

    Examples:
      >>> import signal
      >>> from jaxaccel import train
      >>> steps = 0
      >>> try:
      ...     with train.SafeInterrupt() as interrupt:
      ...         while True:
      ...             steps += 1
      ...             if steps == 3:
      ...                 signal.raise_signal(signal.SIGINT)
      ...             interrupt.check()
      ... except KeyboardInterrupt:
      ...     print("stopped after", steps)
      stopped after 3
    """

    def __init__(self):
        self._pending: int | None = None
        self._previous: dict[int, Any] = {}

    @property
    def pending(self) -> bool:
        """Whether a signal has come that `check` has not raised yet."""
        return self._pending is not None

    def check(self) -> None:
        """Raises what a signal asked for; call it once a step.

        Raises:
          KeyboardInterrupt: If Ctrl-C was pressed.
          SystemExit: If SIGTERM came.
        """
        number, self._pending = self._pending, None
        if number is not None:
            _raise(number)

    def __enter__(self) -> "SafeInterrupt":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            # None: a handler that was not installed by Python.
            if handler is not None:
                signal.signal(number, handler)
        # Came after the last check: still the user's wish.
        if kind is None:
            self.check()
        elif kind is GeneratorExit and self._pending is not None:
            # A generator that is closed, where Python would drop what is raised.
            _send_soon(self._pending)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._pending is not None:
            _raise(number)
        self._pending = number
        again = "Ctrl-C" if number == signal.SIGINT else "a signal"
        print(
            f"\nstopping after this step; {again} again stops at once", file=sys.stderr
        )


def _send_soon(number: int) -> None:
    timer = threading.Timer(0.05, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def _raise(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
