"""Worker processes for transforms that are heavy on Python."""

import collections
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import threading
import time
import traceback
from typing import Any

import jax

from jaxaccel.data import _wire
from jaxaccel.data._ahead import Budget, ClosedError
from jaxaccel.data._batches import BatchMaker, Made

# One batch in the making and one asked for, so that no worker waits for an answer.
_IN_HAND = 2
_END_SECONDS = 5.0
_GUARD = (
    "Worker processes import the main script anew, so a script must start its work "
    "under `if __name__ == '__main__':`"
)


class Workers:
    """Makes batches in processes; a step's batch is the same in any of them.

    Args:
      maker: Makes the batch of a step; must be picklable.
      num_steps: Where to stop, or None.
      budget: How many batches may be ahead, those being made included.
      count: Number of processes.

    Attributes:
      sent_bytes: Size of what each process was sent.

    Raises:
      TypeError: If the maker cannot be pickled.
      RuntimeError: If this is a worker that imports an unguarded main script.
    """

    def __init__(
        self, maker: BatchMaker, num_steps: int | None, budget: Budget, count: int
    ):
        self._maker, self._count = maker, count
        self._num_steps, self._budget = num_steps, budget
        self._closed = False
        # Another thread may close what this one starts.
        self._lock = threading.RLock()
        self._pool = self._open()

    def start(self, step: int) -> None:
        """See `Source.start`."""
        with self._lock:
            if self._closed:
                raise ClosedError
            # A pool that lost a worker is not mended but replaced.
            if self._pool.lost is not None:
                self._pool.close()
                self._pool = self._open()
            self._pool.restart(step)

    def next(self) -> tuple[Made, int]:
        """See `Source.next`."""
        return self._pool.next()

    def close(self, seconds: float | None = None) -> None:
        """See `Source.close`."""
        with self._lock:
            self._closed = True
            self._pool.close()

    def _open(self) -> "_Pool":
        frame = _pack_maker(self._maker)
        self.sent_bytes = len(frame[0]) + sum(b.raw().nbytes for b in frame[1])
        return _Pool(frame, self._num_steps, self._budget, self._count)


class _Worker:
    """One process, its socket, and the (run, step) pairs it was asked for."""

    def __init__(self, number: int):
        context = multiprocessing.get_context("spawn")
        self.asked: collections.deque[tuple[int, int]] = collections.deque()
        self.ready = False
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = context.Process(
                target=_work,
                args=(theirs,),
                name=f"jaxaccel-worker-{number}",
                # Ended at exit, whatever else fails.
                daemon=True,
            )
            try:
                self.process.start()
            except BaseException as error:
                self.socket.close()
                # What multiprocessing raises in a process that is being started.
                if isinstance(error, RuntimeError):
                    raise RuntimeError(_GUARD) from error
                raise

    def lost(self) -> RuntimeError:
        """Says how the process ended, and what it was doing."""
        self.process.join(_END_SECONDS)
        code = self.process.exitcode
        how = "closed its connection"
        if code is not None:
            how = f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by signal {-code} ({signal.strsignal(-code)})"
        if code == -signal.SIGKILL:
            how += ", as the system does when memory runs out,"
        name = f"{self.process.name} (pid {self.process.pid}) {how}"
        if not self.ready:
            return RuntimeError(f"{name} before it could begin. {_GUARD}")
        if not self.asked:
            return RuntimeError(f"{name} while it had nothing to do")
        step = self.asked[0][1]
        return RuntimeError(f"{name} while preparing the batch of step {step}")

    def end(self) -> None:
        self.process.terminate()
        self.process.join(_END_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self.process.close()
        self.socket.close()


class _Pool:
    """Workers, and the thread that takes in what they make."""

    def __init__(
        self, frame: _wire.Frame, num_steps: int | None, budget: Budget, count: int
    ):
        self._num_steps, self._budget = num_steps, budget
        self._frame = frame
        self.lost: BaseException | None = None
        # Results of an earlier run than the present one are dropped.
        self._run = 0
        self._asked = self._given = 0
        self._results: dict[int, Made | BaseException] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._wake, self._woken = socket.socketpair()
        self._workers: list[_Worker] = []
        self._thread = threading.Thread(
            target=self._take_in, name="jaxaccel-workers", daemon=True
        )
        try:
            for number in range(count):
                self._workers.append(_Worker(number))
            self._thread.start()
        except BaseException:
            self._end()
            raise

    def restart(self, step: int) -> None:
        with self._changed:
            self._run += 1
            self._asked = self._given = step
            self._results.clear()
            self._ask()

    def next(self) -> tuple[Made, int]:
        step = self._given
        with self._changed:
            depth = sum(isinstance(made, Made) for made in self._results.values())
            # What was asked for is answered, even where a worker is lost.
            self._changed.wait_for(
                lambda: (
                    step in self._results
                    or self._closed
                    or (self.lost is not None and step >= self._asked)
                )
            )
            if step not in self._results:
                raise self.lost or ClosedError()
            result = self._results.pop(step)
            if isinstance(result, BaseException):
                raise result
            self._given += 1
            self._ask()
            return result, depth

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            workers = list(self._workers)
        # Wakes the thread; terminating ends what else it may be waiting for.
        with contextlib.suppress(OSError):
            self._wake.send(b"x")
        for worker in workers:
            # The thread may have ended it already.
            with contextlib.suppress(ValueError):
                worker.process.terminate()
        # The garbage collector may run this in that very thread.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _end(self) -> None:
        for worker in self._workers:
            worker.end()
        self._wake.close()
        self._woken.close()

    def _ask(self) -> None:
        # The lock is held; a question is a few bytes, which never block.
        limit = self._given + self._budget.batches
        if self._num_steps is not None:
            limit = min(limit, self._num_steps)
        while self._asked < limit and self.lost is None and not self._closed:
            free = [w for w in self._workers if w.ready and len(w.asked) < _IN_HAND]
            if not free:
                return
            worker = min(free, key=lambda w: len(w.asked))
            worker.asked.append((self._run, self._asked))
            # Where it is gone, the thread will notice.
            with contextlib.suppress(OSError):
                _wire.send(worker.socket, _wire.pack(self._asked))
            self._asked += 1

    def _take_in(self) -> None:
        try:
            self._begin()
            while not self._closed and (
                self.lost is None or any(worker.asked for worker in self._workers)
            ):
                self._receive_some()
        except BaseException as error:
            with self._changed:
                self.lost = RuntimeError(f"the loader's thread failed: {error!r}")
                self._asked = self._given
                self._changed.notify_all()
        finally:
            self._end()

    def _begin(self) -> None:
        # Blocks until the processes have started, so not in the constructor.
        for worker in self._workers:
            with contextlib.suppress(OSError):
                _wire.send(worker.socket, self._frame)
        del self._frame

    def _receive_some(self) -> None:
        workers = {worker.socket: worker for worker in self._workers}
        for connection in multiprocessing.connection.wait([*workers, self._woken]):
            worker = workers.get(connection)  # type: ignore[arg-type]
            if worker is None or self._closed:
                return
            start = time.perf_counter()
            try:
                result = _wire.receive(worker.socket)
            except (EOFError, OSError):
                self._lose(worker)
                continue
            except Exception as error:
                result = RuntimeError(f"the answer cannot be unpickled: {error!r}")
            with self._changed:
                self._accept(worker, result, time.perf_counter() - start)
                self._ask()
                self._changed.notify_all()

    def _accept(self, worker: _Worker, result: Any, seconds: float) -> None:
        if not worker.ready:
            # The first answer says that the process could begin.
            worker.ready = result is None
            self.lost = self.lost or result
            return
        if isinstance(result, Made):
            result.seconds["receive"] = seconds
            self._budget.observe(result)
        self._answer(*worker.asked.popleft(), result)

    def _answer(self, run: int, step: int, result: Made | BaseException) -> None:
        if run == self._run:
            self._results[step] = result

    def _lose(self, worker: _Worker) -> None:
        lost = worker.lost()
        worker.end()
        with self._changed:
            self._workers.remove(worker)
            self.lost = self.lost or lost
            for run, step in worker.asked:
                self._answer(run, step, lost)
            self._changed.notify_all()


def _pack_maker(maker: BatchMaker) -> _wire.Frame:
    parts = {"transform": maker.transform, "store": maker.store, "plan": maker.plan}
    for name, part in parts.items():
        try:
            _wire.pack(part)
        except Exception as error:
            raise TypeError(
                f"the {name} cannot be sent to worker processes: {error}. Define what "
                "it is made of at the top level of a module (no lambda, no function "
                "in a function), or use workers=0"
            ) from error
    return _wire.pack(maker)


def _work(connection: socket.socket) -> None:
    # Runs in the worker. The parent ends it, also after Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A transform that uses jax must not seize the accelerator.
    jax.config.update("jax_platforms", "cpu")
    # The parent is gone, or has closed the loader.
    with connection, contextlib.suppress(EOFError, ConnectionError):
        maker = _load(connection)
        while maker is not None:
            _wire.send(connection, _made(maker, _wire.receive(connection)))


def _load(connection: socket.socket) -> BatchMaker | None:
    try:
        maker = _wire.receive(connection)
    except (EOFError, ConnectionError):
        raise
    except BaseException as error:
        reason = RuntimeError(
            f"store, plan and transform cannot be loaded in a worker process: "
            f"{error!r}. Define what they are made of in a module or script that the "
            "process can import"
        )
        _wire.send(connection, _wire.pack(reason))
        return None
    _wire.send(connection, _wire.pack(None))
    return maker


def _made(maker: BatchMaker, step: int) -> _wire.Frame:
    try:
        return _wire.pack(maker.make(step))
    except Exception as error:
        where = "".join(traceback.format_exception(error)).rstrip()
        error.add_note(f"in worker process {os.getpid()}:\n{where}")
        try:
            frame = _wire.pack(error)
            pickle.loads(frame[0], buffers=frame[1])
            return frame
        except Exception:
            # An exception of a class that cannot be rebuilt from its arguments.
            stand_in = RuntimeError(f"{type(error).__name__}: {error}")
            for note in error.__notes__:
                stand_in.add_note(note)
            return _wire.pack(stand_in)
