"""Plans that draw examples by weight or by class, instead of all once an epoch."""

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from jaxaccel.data._checks import as_count
from jaxaccel.data._permute import keys_for, permute
from jaxaccel.data._plan import Plan


class DrawingPlan(Plan):
    """A plan whose epochs are only a number of draws, `epoch_size`."""

    epoch_size: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.num_examples if self.epoch_size is None else self.epoch_size
        self._set("epoch_size", as_count("epoch_size", size, 1))

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return -(-(self.epoch_size or self.num_examples) // self.batch_size)


@dataclasses.dataclass(frozen=True, eq=False)
class WeightedPlan(DrawingPlan):
    r"""Draws examples with probabilities proportional to weights, with replacement.

    Every row of every batch is an independent draw,
    $P(i) = w_i / \sum_j w_j$, from `SeedSequence([seed, step])`. `balanced_weights`
    makes weights under which all classes are equally frequent.

    Args:
      weights: Weight of each example, `(examples,)`, integers or floats, not
        negative. Examples of weight 0 are never drawn.
      batch_size: Examples in a global batch, over all processes.
      seed: From 0 to 2^32 - 1.
      epochs: How many; None never ends.
      epoch_size: Draws in an epoch, rounded up to whole batches; None takes as many
        as there are examples. The order does not depend on it.
      process_index: This process, from 0.
      process_count: Number of processes.

    Raises:
      TypeError: If a number is not an integer, or the weights are no numbers.
      ValueError: If a value is out of range, the weights are negative, infinite or
        all zero, or the processes cannot share a batch evenly.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import WeightedPlan
      >>> plan = WeightedPlan(np.array([0, 1, 3]), 4000, seed=1)
      >>> np.bincount(plan.indices(0), minlength=3).tolist()
      [0, 987, 3013]
    """

    weights: np.ndarray = dataclasses.field(repr=False)
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: int = 0
    epochs: int | None = None
    epoch_size: int | None = None
    process_index: int = 0
    process_count: int = 1
    num_examples: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        weights = _checked_weights(self.weights)
        self._set("weights", weights)
        self._set("num_examples", len(weights))
        self._set("_ends", np.cumsum(weights))
        self._set("_digest", array_digest(weights))
        super().__post_init__()

    def _rows(self, step: int, rows: np.ndarray) -> np.ndarray:
        # A spawn key, so that the streams differ from those of a loader's transform.
        words = np.random.SeedSequence([self.seed, step], spawn_key=(0,))
        rng = np.random.Generator(np.random.Philox(words))
        ends: np.ndarray = self.__dict__["_ends"]
        # Beyond the last end only by rounding; the first row that reaches it has
        # weight, which a last row need not have.
        points = np.minimum(
            rng.random(self.batch_size)[rows] * ends[-1], np.nextafter(ends[-1], 0)
        )
        return np.searchsorted(ends, points, side="right")

    def _order(self) -> dict[str, Any]:
        return {"weights": self.__dict__["_digest"]}


def balanced_weights(labels: np.ndarray) -> np.ndarray:
    r"""Returns weights under which all classes are equally frequent.

    $w_i = n / (C\, n_{y_i})$ with $n$ examples, $C$ classes and $n_c$ examples of
    class $c$; their mean is 1. The square root of it lies between the natural and
    the balanced frequencies: `balanced_weights(labels) ** 0.5`.

    Args:
      labels: Class of each example, `(examples,)`, integers or booleans. Classes
        are the values that occur.

    Returns:
      float64 weights, `(examples,)`.

    Raises:
      TypeError: If the labels are no integers.
      ValueError: If they are not one-dimensional, or there are none.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import balanced_weights
      >>> balanced_weights(np.array([7, 7, 7, 9])).round(3).tolist()
      [0.667, 0.667, 0.667, 2.0]
    """
    _, which, counts = _classes(labels)
    return (len(which) / (len(counts) * counts))[which]


@dataclasses.dataclass(frozen=True, eq=False)
class ClassBalancedPlan(DrawingPlan):
    r"""Gives every class the same share of every batch.

    With batches of $B$ rows and $C$ classes, a batch holds $\lfloor B/C \rfloor$ or
    $\lceil B/C \rceil$ rows of each class, and after any number of batches the
    classes have been drawn equally often, give or take one. A class is visited in
    permutations of its own: each of its examples once before any of them again.

    Args:
      labels: Class of each example, `(examples,)`, integers or booleans. Classes
        are the values that occur.
      batch_size: Examples in a global batch, over all processes.
      seed: From 0 to 2^32 - 1.
      epochs: How many; None never ends.
      epoch_size: Draws in an epoch, rounded up to whole batches; None takes as many
        as there are examples. The order does not depend on it.
      process_index: This process, from 0.
      process_count: Number of processes.

    Raises:
      TypeError: If a number is not an integer, or the labels are no integers.
      ValueError: If a value is out of range, or the processes cannot share a batch
        evenly.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ClassBalancedPlan
      >>> labels = np.array([0, 0, 0, 0, 0, 0, 1, 1], np.uint8)
      >>> plan = ClassBalancedPlan(labels, 4)
      >>> [sorted(labels[plan.indices(step)].tolist()) for step in range(2)]
      [[0, 0, 1, 1], [0, 0, 1, 1]]
    """

    labels: np.ndarray = dataclasses.field(repr=False)
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: int = 0
    epochs: int | None = None
    epoch_size: int | None = None
    process_index: int = 0
    process_count: int = 1
    num_examples: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        labels, which, counts = _classes(self.labels)
        self._set("labels", labels)
        self._set("num_examples", len(which))
        self._set("_members", np.argsort(which, kind="stable"))
        self._set("_counts", counts)
        self._set("_starts", np.cumsum(counts) - counts)
        self._set("_digest", array_digest(which))
        super().__post_init__()

    def _rows(self, step: int, rows: np.ndarray) -> np.ndarray:
        places = permute(rows, self.batch_size, keys_for(self.seed, 0, step))
        classes, draws = self._draws(step, places)
        counts = self.__dict__["_counts"][classes]
        rounds, places = np.divmod(draws, counts)
        keys = keys_for(self.seed, 1, classes, rounds)
        members = self.__dict__["_starts"][classes] + permute(places, counts, keys)
        return self.__dict__["_members"][members]

    def _draws(self, step: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Class at each place of the batch, and how often it was drawn before.
        number = len(self.__dict__["_counts"])
        each, extra = divmod(self.batch_size, number)
        # The classes take turns at the extra places, in an order that is drawn anew
        # whenever the last turn ends together with a batch.
        period = number // math.gcd(number, extra)
        cycle, within = divmod(step, period)
        words = np.random.SeedSequence([self.seed, cycle], spawn_key=(1,))
        order = np.random.Generator(np.random.Philox(words)).permutation(number)
        turn = np.empty_like(order)
        turn[order] = np.arange(number)

        given = within * extra
        taker = order[(given + places - each * number) % number]
        classes = np.where(places < each * number, places % number, taker)
        extras = (given - turn[classes] + number - 1) // number
        extras += cycle * (period * extra // number)
        return classes, step * each + extras + places // number

    def _order(self) -> dict[str, Any]:
        return {"labels": self.__dict__["_digest"]}


def array_digest(array: np.ndarray) -> str:
    """Short text that stands for an array's shape, dtype and values."""
    head = f"{array.dtype.str}{array.shape}".encode()
    hashed = hashlib.sha256(head)
    hashed.update(np.ascontiguousarray(array).data)
    return hashed.hexdigest()[:32]


def _checked_weights(weights: np.ndarray) -> np.ndarray:
    array = np.asarray(weights)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"weights must be numbers, got dtype {array.dtype}")
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"weights must hold one number for each example, got shape {array.shape}"
        )
    # A copy, because the plan must not change when the caller's array does.
    array = np.array(array, np.float64)
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(bad):
        raise ValueError(
            f"weights must be finite and not negative, but weights[{bad[0]}] is "
            f"{array[bad[0]]}; use 0 for examples that shall not be drawn"
        )
    with np.errstate(over="ignore"):
        total = array.sum()
    if not 0 < total < np.inf:
        raise ValueError(
            f"weights must have a positive finite sum, got {total}; scale them "
            "so that their mean is about 1"
        )
    array.flags.writeable = False
    return array


def _classes(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    array = np.asarray(labels)
    if array.dtype.kind not in "biu":
        raise TypeError(f"labels must be integers, got dtype {array.dtype}")
    if array.ndim != 1 or not len(array):
        raise ValueError(
            f"labels must hold one class for each example, got shape {array.shape}"
        )
    _, which, counts = np.unique(array, return_inverse=True, return_counts=True)
    return array.copy(), which, counts
