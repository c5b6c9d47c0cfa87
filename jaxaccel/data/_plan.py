"""Which examples make up which batch: a pure function of the seed and the step."""

import abc
import dataclasses
import json
import operator
from typing import Any

import numpy as np

from jaxaccel.data import _permute
from jaxaccel.data._checks import as_count, as_flag

REMAINDERS = ("drop", "pad")

# From here on a table of the permutation would take 400 MB and more.
_TABLE_LIMIT = 100_000_000


class Plan(abc.ABC):
    r"""The order of a training run, as a pure function of seed and step.

    `BatchPlan` is the usual one. Every plan decides on global batches; process $k$
    of $P$ gets rows $[kL, (k+1)L)$ of each, $L = \mathrm{batch\_size} / P$, so
    that the global order does not depend on the number of processes. Nothing is
    drawn from a state: any step can be asked for at any time, by any thread.

    A plan of your own is a frozen dataclass with the attributes below as fields,
    that defines `steps_per_epoch`, `_rows` and `_order`.

    Attributes:
      num_examples: Examples in the store.
      batch_size: Examples in a global batch, over all processes.
      seed: From 0 to 2^32 - 1.
      epochs: How many; None never ends.
      process_index: This process, from 0.
      process_count: Number of processes.
      remainder: `"pad"` where some rows are padding, which `mask` marks; else
        `"drop"`.

    Examples:
      >>> import dataclasses
      >>> import numpy as np
      >>> from jaxaccel.data import Plan
      >>> @dataclasses.dataclass(frozen=True, eq=False)
      ... class Backwards(Plan):
      ...     num_examples: int
      ...     batch_size: int
      ...     seed: int = 0
      ...     epochs: int | None = None
      ...     process_index: int = 0
      ...     process_count: int = 1
      ...     @property
      ...     def steps_per_epoch(self):
      ...         return self.num_examples // self.batch_size
      ...     def _rows(self, step, rows):
      ...         batch = step % self.steps_per_epoch
      ...         return self.num_examples - 1 - (batch * self.batch_size + rows)
      ...     def _order(self):
      ...         return {}
      >>> plan = Backwards(6, 2)
      >>> plan.indices(1).tolist(), plan.epoch(3)
      ([3, 2], 1)
    """

    num_examples: int
    batch_size: int
    seed: int
    epochs: int | None
    process_index: int
    process_count: int
    remainder: str = "drop"

    def __post_init__(self) -> None:
        least = {"num_examples": 1, "batch_size": 1, "process_count": 1}
        least |= {"process_index": 0, "seed": 0}
        if self.epochs is not None:
            least["epochs"] = 1
        for name, number in least.items():
            self._set(name, as_count(name, getattr(self, name), number))
        # Wider seeds would be split into words that collide with epoch numbers.
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, got {self.seed}")
        if self.batch_size % self.process_count:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by process_count "
                f"{self.process_count}; it counts the examples of all processes "
                "together, so choose a multiple"
            )
        if self.process_index >= self.process_count:
            raise ValueError(
                f"process_index {self.process_index} must be below process_count "
                f"{self.process_count}"
            )

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""

    @abc.abstractmethod
    def _rows(self, step: int, rows: np.ndarray) -> np.ndarray:
        # The store's rows at the given places of the global batch of a step, as a
        # fresh int64 array. The step is in range.
        ...

    @abc.abstractmethod
    def _order(self) -> dict[str, Any]:
        # What determines the order, besides the attributes that every plan has:
        # JSON-able, arrays by their digest.
        ...

    def _mask(self, step: int, rows: np.ndarray) -> np.ndarray:
        del step
        return np.ones(len(rows), bool)

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError("a plan with epochs=None never ends and has no length")
        return self.num_steps

    def __bool__(self) -> bool:
        # Without this, truth would ask for the length, which may not exist.
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    @property
    def num_steps(self) -> int | None:
        """Batches in all epochs; None if the plan never ends."""
        return None if self.epochs is None else self.epochs * self.steps_per_epoch

    @property
    def local_batch_size(self) -> int:
        """Rows of a batch that belong to this process."""
        return self.batch_size // self.process_count

    @property
    def extra_columns(self) -> tuple[str, ...]:
        """Names of the columns that the plan adds to every batch."""
        return ("mask",) if self.remainder == "pad" else ()

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that a step belongs to."""
        return self._checked(step) // self.steps_per_epoch

    def indices(self, step: int) -> np.ndarray:
        """Rows of the store that make up this process's part of a batch.

        Args:
          step: From 0 to `num_steps` - 1.

        Returns:
          A fresh array of `local_batch_size` int64 indices.

        Raises:
          IndexError: If the step is out of range.
        """
        return self._rows(self._checked(step), self._local())

    def mask(self, step: int) -> np.ndarray:
        """True for each row of this process that is not padding."""
        return self._mask(self._checked(step), self._local())

    def extras(self, step: int) -> dict[str, np.ndarray]:
        """The columns that the plan adds to a batch, by the names in `extra_columns`.

        Args:
          step: From 0 to `num_steps` - 1.

        Returns:
          Fresh arrays with `local_batch_size` rows; `mask`, if there is padding.
        """
        return {"mask": self.mask(step)} if self.remainder == "pad" else {}

    def fingerprint(self) -> dict[str, Any]:
        """What determines the order: all but the numbers of epochs and processes.

        Returns:
          A JSON-able dict. Two plans with the same one agree on every step that
          both have.
        """
        return {
            "plan": type(self).__name__,
            "num_examples": self.num_examples,
            "batch_size": self.batch_size,
            "seed": self.seed,
            "remainder": self.remainder,
            **self._order(),
        }

    def _identity(self) -> tuple[object, ...]:
        order = json.dumps(self.fingerprint(), sort_keys=True)
        length = self.epochs, self.steps_per_epoch
        return type(self), order, length, self.process_index, self.process_count

    def _local(self) -> np.ndarray:
        start = self.process_index * self.local_batch_size
        return np.arange(start, start + self.local_batch_size)

    def _checked(self, step: int) -> int:
        step = operator.index(step)
        if step < 0 or (self.num_steps is not None and step >= self.num_steps):
            last = "" if self.num_steps is None else f" and below {self.num_steps}"
            raise IndexError(f"step must be at least 0{last}, got {step}")
        return step

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPlan(Plan):
    r"""Every example once an epoch, in an order that every epoch has anew.

    Epoch $e$ visits the examples in the order of a permutation drawn from
    `SeedSequence([seed, e])` (Philox), so that neighbouring seeds share no
    epoch. Step $t$ takes the next `batch_size` of them; process $k$ of $P$ gets
    rows $[kL, (k+1)L)$ of that batch, $L = \mathrm{batch\_size} / P$. The global
    order therefore does not depend on the number of processes.

    The permutations of the last two epochs are kept, four bytes an example each.
    From 10^8 examples on they are computed row by row instead, in no memory.

    Args:
      num_examples: Examples in the store.
      batch_size: Examples in a global batch, over all processes.
      seed: From 0 to 2^32 - 1.
      epochs: Passes over the data; None never ends.
      shuffle: False visits the examples in their stored order.
      remainder: What happens to the examples left when `batch_size` does not
        divide `num_examples`: `"drop"` leaves them out (with `shuffle`, others
        in every epoch), `"pad"` fills the last batch of the epoch up with the
        epoch's first examples and marks them in `mask`.
      process_index: This process, from 0.
      process_count: Number of processes.

    Raises:
      TypeError: If a number is not an integer, or `shuffle` no boolean.
      ValueError: If a value is out of range, the batch is larger than the data,
        or the processes cannot share it evenly.

    Examples:
      >>> from jaxaccel.data import BatchPlan
      >>> plan = BatchPlan(5, 2, epochs=2, shuffle=False, remainder="pad")
      >>> plan.steps_per_epoch, len(plan)
      (3, 6)
      >>> plan.indices(2).tolist(), plan.mask(2).tolist(), plan.epoch(3)
      ([4, 0], [True, False], 1)
    """

    num_examples: int
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: int = 0
    epochs: int | None = None
    shuffle: bool = True
    remainder: str = "drop"
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.remainder not in REMAINDERS:
            raise ValueError(
                f"remainder must be one of {REMAINDERS}, got {self.remainder!r}"
            )
        if self.batch_size > self.num_examples:
            raise ValueError(
                f"batch_size {self.batch_size} is larger than the {self.num_examples} "
                f"examples; use a batch_size of {self.num_examples} or less"
            )
        self._set("shuffle", as_flag("shuffle", self.shuffle))
        # Pairs (epoch, permutation), replaced as a whole: two threads can at
        # worst compute the same permutation twice.
        self._set("_recent", ())

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_recent": ()}

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(self.num_examples, self.batch_size)
        return full + (1 if rest and self.remainder == "pad" else 0)

    def _rows(self, step: int, rows: np.ndarray) -> np.ndarray:
        epoch, batch = divmod(step, self.steps_per_epoch)
        # Padding repeats the epoch's first examples: real images, so that
        # whatever a model averages over the batch stays in its usual range.
        places = (batch * self.batch_size + rows) % self.num_examples
        if not self.shuffle:
            return places
        if self.num_examples >= _TABLE_LIMIT:
            return _permute.permute(places, self.num_examples, self._key(epoch))
        return self._permutation(epoch)[places].astype(np.int64)

    def _mask(self, step: int, rows: np.ndarray) -> np.ndarray:
        batch = step % self.steps_per_epoch
        return batch * self.batch_size + rows < self.num_examples

    def _order(self) -> dict[str, Any]:
        return {"shuffle": self.shuffle}

    def _permutation(self, epoch: int) -> np.ndarray:
        recent: tuple[tuple[int, np.ndarray], ...] = self.__dict__["_recent"]
        for known, order in recent:
            if known == epoch:
                return order
        rng = np.random.Generator(np.random.Philox(self._words(epoch)))
        order = np.arange(self.num_examples, dtype=np.int32)
        rng.shuffle(order)
        self._set("_recent", (*recent[-1:], (epoch, order)))
        return order

    def _key(self, epoch: int) -> np.ndarray:
        return self._words(epoch).generate_state(1, np.uint64)

    def _words(self, epoch: int) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, epoch])
