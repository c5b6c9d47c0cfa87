"""Permutations that are computed place by place, without a table."""

import numpy as np

_ROUNDS = 16
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1


def permute(places: np.ndarray, size: object, key: object) -> np.ndarray:
    r"""Sends places to rows by a pseudorandom permutation of `range(size)`.

    A Feistel network over $a \times b \geq \mathrm{size}$ cells, $a \approx
    \sqrt{\mathrm{size}}$: in turn each of the two coordinates is rotated by a
    hash of the other one. Rows outside the range are permuted again until they are
    in it ("cycle walking"), which about one in $\sqrt{\mathrm{size}}$ needs.

    Args:
      places: Integers with $0 \leq \mathrm{place} < \mathrm{size}$, shape `(n,)`.
      size: How many rows there are, at most $2^{62}$; one number or one for each
        place.
      key: uint64 that chooses the permutation; an array, of one or for each place.

    Returns:
      Fresh int64 rows, `(n,)`. Equal sizes and keys belong to one permutation.

    References:
      Black, Rogaway, [Ciphers with arbitrary finite
      domains](https://doi.org/10.1007/3-540-45760-7_9), 2002.
    """
    sizes = np.broadcast_to(np.asarray(size, np.uint64), places.shape)
    keys = np.broadcast_to(np.asarray(key, np.uint64), places.shape)
    rows = _walk(places.astype(np.uint64), sizes, keys)
    outside = np.flatnonzero(rows >= sizes)
    while outside.size:
        rows[outside] = _walk(rows[outside], sizes[outside], keys[outside])
        outside = outside[rows[outside] >= sizes[outside]]
    return rows.astype(np.int64)


def keys_for(seed: int, *parts: object) -> np.ndarray:
    """Hashes a seed and integers, or integer arrays, into uint64 keys.

    Args:
      seed: A plan's seed.
      *parts: Nonnegative integers or arrays of them; they broadcast.

    Returns:
      An array of keys, that of a scalar has one element. Different arguments give
      different keys but for chance.
    """
    keys = np.random.SeedSequence([seed]).generate_state(1, np.uint64)
    for part in parts:
        keys = _mix(keys * np.uint64(_GOLDEN) + np.asarray(part, np.uint64))
    return keys


def _walk(cells: np.ndarray, sizes: np.ndarray, keys: np.ndarray) -> np.ndarray:
    height, width = _sides(sizes)
    left, right = np.divmod(cells, width)
    for number in range(0, _ROUNDS, 2):
        left = _rotate(left, height, right, keys, number)
        right = _rotate(right, width, left, keys, number + 1)
    return left * width + right


def _sides(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    one = np.uint64(1)
    height = np.sqrt(sizes).astype(np.uint64)
    # The root of a float64 may be one off where the size has more than 53 bits.
    height = height - (height * height > sizes)
    height = height + (height * height < sizes)
    # An even side, for rotating an odd one is an even permutation, always.
    height = height + (height & one)
    return height, (sizes + height - one) // height


def _rotate(
    place: np.ndarray, side: np.ndarray, by: np.ndarray, keys: np.ndarray, number: int
) -> np.ndarray:
    salt = np.uint64((number + 1) * _GOLDEN & _WORD)
    high = _mix(_mix(keys + salt) ^ by) >> np.uint64(32)
    moved = place + (high * side >> np.uint64(32))
    return np.where(moved >= side, moved - side, moved)


def _mix(words: np.ndarray) -> np.ndarray:
    # The finalizer of SplitMix64.
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
