"""Mean and standard deviation of a store's pixels."""

import numpy as np

from jaxaccel.data._store import Store, check_store


def mean_and_std(
    store: Store, column: str = "image"
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    r"""Computes the statistics that `make_normalizer` takes.

    Exact, from the counts of the 256 values in each channel:
    $\mu = \sum_v \frac{v}{255} p_v$ and
    $\sigma^2 = \sum_v (\frac{v}{255} - \mu)^2 p_v$.

    Args:
      store: The training examples.
      column: Its column of uint8 images, the last axis being the channels.

    Returns:
      Mean and standard deviation of each channel, on the scale 0 to 1.

    Raises:
      TypeError: If it is no store, or the column is not uint8.
      ValueError: If there is no such column, or its examples have no channels.

    Examples:
      >>> import numpy as np
      >>> from jaxaccel.data import ArrayStore, mean_and_std
      >>> pixels = np.array([0, 255, 0, 255], np.uint8).reshape(4, 1, 1, 1)
      >>> mean_and_std(ArrayStore({"image": pixels}))
      ((0.5,), (0.5,))
    """
    check_store("mean_and_std", store)
    if column not in store.spec:
        raise ValueError(f"the store has no column {column!r}; it has {[*store.spec]}")
    shape, dtype = store.spec[column]
    if dtype != np.uint8:
        raise TypeError(f"column {column!r} is {dtype}; only uint8 images are counted")
    if not shape:
        raise ValueError(f"column {column!r} holds scalars, not images with channels")
    counts = np.zeros((shape[-1], 256), np.int64)
    for batch in store.scan(1024):
        pixels = batch[column].reshape(-1, shape[-1])
        for channel, values in enumerate(pixels.T):
            counts[channel] += np.bincount(values, minlength=256)
    shares = counts / counts.sum(axis=1, keepdims=True)
    values = np.arange(256) / 255
    mean = shares @ values
    variance = (shares * (values - mean[:, None]) ** 2).sum(axis=1)
    return tuple(mean.tolist()), tuple(np.sqrt(variance).tolist())
