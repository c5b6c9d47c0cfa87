"""Ctrl-C that arrives at a safe point of the loop."""

import signal
import sys
import threading
from types import FrameType
from typing import Any


class SafeInterrupt:
    """Holds Ctrl-C back until the loop asks for it; a context manager.

    Python raises KeyboardInterrupt wherever the main thread happens to be. Inside
    of jax's own garbage collection callback, which runs every few steps, it is
    printed as "Exception ignored" and lost: the training goes on. Here the first
    Ctrl-C only makes the next `check` raise it, between two steps, with every
    metric intact; a second one stops at once.

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
        self._pending = False
        self._previous: Any = None

    def check(self) -> None:
        """Raises KeyboardInterrupt if Ctrl-C was pressed; call it once a step."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def __enter__(self) -> "SafeInterrupt":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        # Pressed after the last check: still the user's wish.
        if kind is None:
            self.check()

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._pending:
            raise KeyboardInterrupt
        self._pending = True
        print("\nstopping after this step; Ctrl-C again stops at once", file=sys.stderr)
