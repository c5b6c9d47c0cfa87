"""Several stores, mixed in given ratios."""

import dataclasses
import fractions
import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxaccel.data._checks import as_count, as_flag
from jaxaccel.data._permute import keys_for, permute
from jaxaccel.data._sampling import DrawingPlan
from jaxaccel.data._store import ConcatStore, Store

# The longest turn after which the stores' order repeats.
_MAX_TURN = 1 << 16


class Mixture(ConcatStore):
    """Stores with the same columns, whose batches hold rows of each by ratios.

    As a store it is the parts, one after the other; `plan` makes the plan that
    draws from them.

    Args:
      stores: The parts by name.
      ratios: Share of the rows that each part gets, by name, positive; they are
        divided by their sum. None takes the parts' sizes.

    Attributes:
      stores: The parts by name.
      ratios: The shares, as they are kept: `MixturePlan` says how exactly.

    Raises:
      TypeError: If a part is no store, or a ratio no number.
      ValueError: If there is no part, their columns differ, the names of ratios and
        parts differ, or a ratio is not positive.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ArrayStore, Mixture
      >>> real = ArrayStore({"label": np.array([0, 1, 2], np.uint8)})
      >>> made = ArrayStore({"label": np.array([100, 101], np.uint8)})
      >>> mixture = Mixture({"real": real, "made": made}, {"real": 3, "made": 1})
      >>> mixture.ratios
      {'real': 0.75, 'made': 0.25}
      >>> plan = mixture.plan(4, shuffle=False)
      >>> [mixture.take(plan.indices(t))["label"].tolist() for t in range(2)]
      [[0, 1, 2, 100], [0, 1, 2, 101]]
    """

    def __init__(
        self,
        stores: Mapping[str, Store],
        ratios: Mapping[str, float | int] | None = None,
    ):
        _check_parts(stores)
        if ratios is None:
            ratios = {name: len(store) for name, store in stores.items()}
        if set(ratios) != set(stores):
            raise ValueError(
                f"ratios must name the same parts as stores, got {sorted(ratios)} and "
                f"{sorted(stores)}; leave out of both what shall not be drawn"
            )
        super().__init__(list(stores.values()))
        self.stores = dict(stores)
        self._given = tuple(ratios[name] for name in stores)
        turn = _turn(self._given)
        self.ratios = dict(zip(stores, (n / sum(turn) for n in turn), strict=True))

    def plan(
        self,
        batch_size: int,
        *,
        seed: int = 0,
        epochs: int | None = None,
        epoch_size: int | None = None,
        shuffle: bool = True,
        process_index: int = 0,
        process_count: int = 1,
    ) -> "MixturePlan":
        """Makes the plan that draws from the parts by the ratios.

        Args:
          batch_size: Examples in a global batch, over all processes.
          seed: From 0 to 2^32 - 1.
          epochs: How many; None never ends.
          epoch_size: Rows in an epoch, rounded up to whole batches; None takes the
            number of examples.
          shuffle: False visits each part in its stored order.
          process_index: This process, from 0.
          process_count: Number of processes.

        Returns:
          The plan.
        """
        return MixturePlan(
            tuple(len(store) for store in self.stores.values()),
            self._given,
            batch_size,
            seed=seed,
            epochs=epochs,
            epoch_size=epoch_size,
            shuffle=shuffle,
            process_index=process_index,
            process_count=process_count,
        )


@dataclasses.dataclass(frozen=True, eq=False)
class MixturePlan(DrawingPlan):
    r"""Draws from parts of a store by ratios; `Mixture.plan` makes one.

    After $t$ rows, part $i$ of ratio $r_i$ has given more than $r_i t - 1$ and fewer
    than $r_i t + 1$ of them, at every $t$. Each part is visited in permutations of
    its own: each of its examples once before any of them again.

    The ratios are kept as whole shares of a turn of at most 65536 rows: $0.7$ is
    $7/10$, exactly; where no turn of that length fits, each ratio is rounded to a
    multiple of $1/65536$.

    Args:
      sizes: Examples in each part.
      ratios: Share of each part, positive; they are divided by their sum.
      batch_size: Examples in a global batch, over all processes.
      seed: From 0 to 2^32 - 1.
      epochs: How many; None never ends.
      epoch_size: Rows in an epoch, rounded up to whole batches; None takes the
        number of examples. The order does not depend on it.
      shuffle: False visits each part in its stored order.
      process_index: This process, from 0.
      process_count: Number of processes.

    Raises:
      TypeError: If a number is not an integer, or a ratio no number.
      ValueError: If a value is out of range, there are not as many ratios as parts,
        or the processes cannot share a batch evenly.

    Examples:
      >>> from jaxaccel.data import MixturePlan
      >>> plan = MixturePlan((3, 2), (0.75, 0.25), 4, shuffle=False)
      >>> plan.indices(0).tolist(), plan.indices(1).tolist()
      ([0, 1, 2, 3], [0, 1, 2, 4])
    """

    sizes: tuple[int, ...]
    ratios: tuple[float | int, ...]
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: int = 0
    epochs: int | None = None
    epoch_size: int | None = None
    shuffle: bool = True
    process_index: int = 0
    process_count: int = 1
    num_examples: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        sizes = tuple(as_count("a part's size", size, 1) for size in self.sizes)
        if not sizes or len(sizes) != len(self.ratios):
            raise ValueError(
                f"a mixture needs one ratio for each part, got {len(self.ratios)} "
                f"ratios for {len(sizes)} parts"
            )
        self._set("shuffle", as_flag("shuffle", self.shuffle))
        turn = _turn(self.ratios)
        parts = _schedule(turn)
        given = np.empty(len(parts), np.int32)
        for part, share in enumerate(turn):
            given[parts == part] = np.arange(share)
        self._set("sizes", sizes)
        self._set("ratios", tuple(self.ratios))
        self._set("num_examples", sum(sizes))
        self._set("_parts", parts)
        self._set("_given", given)
        self._set("_turn", np.asarray(turn))
        super().__post_init__()

    def _rows(self, step: int, rows: np.ndarray) -> np.ndarray:
        turn, sizes = self.__dict__["_turn"], np.asarray(self.sizes)
        turns, slots = np.divmod(step * self.batch_size + rows, turn.sum())
        parts = self.__dict__["_parts"][slots].astype(np.int64)
        draws = turns * turn[parts] + self.__dict__["_given"][slots]
        rounds, places = np.divmod(draws, sizes[parts])
        if self.shuffle:
            keys = keys_for(self.seed, 2, parts, rounds)
            places = permute(places, sizes[parts], keys)
        return (np.cumsum(sizes) - sizes)[parts] + places

    def _order(self) -> dict[str, Any]:
        return {
            "sizes": list(self.sizes),
            "shares": self.__dict__["_turn"].tolist(),
            "shuffle": self.shuffle,
        }


def _check_parts(stores: Mapping[str, Store]) -> None:
    if not stores:
        raise ValueError("a mixture needs at least one store, got none")
    for name, store in stores.items():
        if not isinstance(store, Store):
            raise TypeError(
                f"part {name!r} must be a Store, got {type(store).__name__}; "
                "open_store makes one of arrays and files"
            )
    first = next(iter(stores))
    for name, store in stores.items():
        if dict(store.spec) != dict(stores[first].spec):
            raise ValueError(
                "all parts must have the same columns, but "
                f"{first!r} is {stores[first]!r} and {name!r} is {store!r}"
            )


def _turn(ratios: Sequence[float | int]) -> list[int]:
    # Whole shares, in lowest terms where that is short enough.
    parts = [_fraction(ratio) for ratio in ratios]
    total = sum(parts)
    shares = [part / total for part in parts]
    length = min(math.lcm(*(share.denominator for share in shares)), _MAX_TURN)
    exact = [share * length for share in shares]
    turn = [math.floor(share) for share in exact]
    # The largest remainders first, so that the shares add up.
    order = sorted(range(len(turn)), key=lambda i: turn[i] - exact[i])
    for i in order[: length - sum(turn)]:
        turn[i] += 1
    if min(turn) < 1:
        raise ValueError(
            f"ratio {ratios[turn.index(0)]!r} is less than 1/{_MAX_TURN} of their sum; "
            "raise it, or leave that part out"
        )
    return turn


def _fraction(ratio: float | int) -> fractions.Fraction:
    number = isinstance(ratio, (int, float, np.integer, np.floating))
    if not number or isinstance(ratio, bool):
        raise TypeError(f"ratios must be numbers, got {ratio!r}")
    if not 0 < ratio < math.inf:
        raise ValueError(
            f"ratios must be positive and finite, got {ratio!r}; leave out the parts "
            "that shall not be drawn"
        )
    if isinstance(ratio, (int, np.integer)):
        return fractions.Fraction(int(ratio))
    # Decimal fractions such as 0.7 have no short exact value as floats.
    near = fractions.Fraction(float(ratio)).limit_denominator(_MAX_TURN)
    return near if float(near) == float(ratio) else fractions.Fraction(float(ratio))


def _schedule(turn: Sequence[int]) -> np.ndarray:
    # Row j of a part with n of the N rows may stand at the places from floor(jN/n)
    # to ceil((j+1)N/n) - 1; those windows keep the part within one of its ratio. Each
    # place takes the row whose window ends first, which meets all windows wherever
    # that is possible, and here it is: the shares fill the turn exactly.
    length = sum(turn)
    released: list[list[int]] = [[] for _ in range(length + 1)]
    released[0] = list(range(len(turn)))
    given = [0] * len(turn)
    waiting: list[tuple[int, int]] = []
    parts = np.empty(length, np.min_scalar_type(len(turn) - 1))
    for place in range(length):
        for part in released[place]:
            end = -(-(given[part] + 1) * length // turn[part])
            heapq.heappush(waiting, (end, part))
        _, part = heapq.heappop(waiting)
        parts[place] = part
        given[part] += 1
        start = given[part] * length // turn[part]
        if given[part] < turn[part]:
            released[max(start, place + 1)].append(part)
    return parts
