"""Which examples make up which batch: a pure function of the seed and the step."""

import dataclasses
import operator

import numpy as np

from jaxaccel.data._checks import as_count

_REMAINDERS = ("drop", "pad")


@dataclasses.dataclass(frozen=True)
class BatchPlan:
    r"""The order of a training run, as a pure function of seed and step.

    Epoch $e$ visits the examples in the order of a permutation drawn from
    `SeedSequence([seed, e])` (Philox), so that neighbouring seeds share no
    epoch. Step $t$ takes the next `batch_size` of them; process $k$ of $P$ gets
    rows $[kL, (k+1)L)$ of that batch, $L = \mathrm{batch\_size} / P$. The global
    order therefore does not depend on the number of processes.

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
      TypeError: If a number is not an integer.
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

    def __post_init__(self):
        least = {"num_examples": 1, "batch_size": 1, "process_count": 1}
        least |= {"process_index": 0, "seed": 0}
        if self.epochs is not None:
            least["epochs"] = 1
        for name, number in least.items():
            number = as_count(name, getattr(self, name), number)
            object.__setattr__(self, name, number)
        self._check_values()
        # Pairs (epoch, permutation), replaced as a whole: two threads can at
        # worst compute the same permutation twice.
        object.__setattr__(self, "_recent", ())

    def _check_values(self) -> None:
        # Wider seeds would be split into words that collide with epoch numbers.
        if self.seed >= 2**32:
            raise ValueError(f"seed must be below 2**32, got {self.seed}")
        if self.remainder not in _REMAINDERS:
            raise ValueError(
                f"remainder must be one of {_REMAINDERS}, got {self.remainder!r}"
            )
        if self.batch_size > self.num_examples:
            raise ValueError(
                f"batch_size {self.batch_size} is larger than the {self.num_examples} "
                f"examples; use a batch_size of {self.num_examples} or less"
            )
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

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_recent": ()}

    def __len__(self) -> int:
        if self.num_steps is None:
            raise TypeError("a plan with epochs=None never ends and has no length")
        return self.num_steps

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(self.num_examples, self.batch_size)
        return full + (1 if rest and self.remainder == "pad" else 0)

    @property
    def num_steps(self) -> int | None:
        """Batches in all epochs; None if the plan never ends."""
        return None if self.epochs is None else self.epochs * self.steps_per_epoch

    @property
    def local_batch_size(self) -> int:
        """Rows of a batch that belong to this process."""
        return self.batch_size // self.process_count

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that a step belongs to."""
        return self._position(step)[0]

    def indices(self, step: int) -> np.ndarray:
        """Rows of the store that make up this process's part of a batch.

        Args:
          step: From 0 to `num_steps` - 1.

        Returns:
          A fresh array of `local_batch_size` int64 indices.

        Raises:
          IndexError: If the step is out of range.
        """
        epoch, positions = self._local_positions(step)
        # Padding repeats the epoch's first examples: real images, so that
        # whatever a model averages over the batch stays in its usual range.
        return self._permutation(epoch)[positions % self.num_examples]

    def mask(self, step: int) -> np.ndarray:
        """True for each row of this process that is not padding."""
        return self._local_positions(step)[1] < self.num_examples

    def _local_positions(self, step: int) -> tuple[int, np.ndarray]:
        epoch, batch = self._position(step)
        rows = self.local_batch_size
        start = batch * self.batch_size + self.process_index * rows
        return epoch, np.arange(start, start + rows)

    def _position(self, step: int) -> tuple[int, int]:
        step = operator.index(step)
        if step < 0 or (self.num_steps is not None and step >= self.num_steps):
            last = "" if self.num_steps is None else f" and below {self.num_steps}"
            raise IndexError(f"step must be at least 0{last}, got {step}")
        return divmod(step, self.steps_per_epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        recent: tuple[tuple[int, np.ndarray], ...] = self.__dict__["_recent"]
        for known, order in recent:
            if known == epoch:
                return order
        if self.shuffle:
            words = np.random.SeedSequence([self.seed, epoch])
            rng = np.random.Generator(np.random.Philox(words))
            order = rng.permutation(self.num_examples)
        else:
            order = np.arange(self.num_examples)
        object.__setattr__(self, "_recent", (*recent[-1:], (epoch, order)))
        return order
