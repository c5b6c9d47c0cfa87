"""What a model brings to a train step: four functions, and masked means."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

PyTree = Any
Batch = Mapping[str, Any]
Metrics = dict[str, jax.Array]
LossFn = Callable[..., tuple[jax.Array, tuple[PyTree, Metrics]]]


class Task(NamedTuple):
    """A model and its loss as pure functions.

    Write the four by hand, or take them from `from_linen` or `from_nnx`.

    Attributes:
      init: `init(key, batch) -> (params, model_state)`; the batch as the loss
        sees it, after preprocessing. Adapters of models that are initialized
        already ignore both arguments.
      train_loss: `train_loss(params, model_state, batch, key) -> (loss,
        (model_state, metrics))`, with dropout on and statistics updated. Loss
        and metrics are float32 means over the examples with `mask == 1`.
      eval_loss: The same signature in evaluation mode; `model_state` comes back
        unchanged.
      merge: `merge(params, model_state)` gives back what the model's own
        library works with: linen's variables, or an nnx module.
    """

    init: Callable[..., tuple[PyTree, PyTree]]
    train_loss: LossFn
    eval_loss: LossFn
    merge: Callable[[PyTree, PyTree], Any]


def masked_mean(values: ArrayLike, batch: Batch) -> jax.Array:
    r"""Averages one value an example over the examples that count.

    .. math:: \sum_i m_i v_i / \max(\sum_i m_i, 1)

    with :math:`m` = `batch["mask"]`, or all ones where the batch has no mask.
    Values of masked examples never reach the result, not even NaN.

    Args:
      values: One value an example, shape `[batch]` or `[batch, ...]`; further
        axes are averaged as well.
      batch: The batch; its `mask`, bool or 0/1, has shape `[batch]`.

    Returns:
      A float32 scalar; 0 if every example is masked.

    Raises:
      ValueError: If `values` has no leading axis of the mask's length.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxaccel import train
      >>> losses = jnp.array([1.0, 3.0, 100.0])
      >>> print(train.masked_mean(losses, {"mask": jnp.array([1, 1, 0])}))
      2.0
    """
    values = jnp.asarray(values, jnp.float32)
    mask = batch.get("mask")
    if mask is None:
        return values.mean()
    mask = jnp.asarray(mask)
    if values.ndim == 0 or values.shape[0] != mask.shape[0]:
        raise ValueError(
            "masked_mean needs one value an example; got values of shape "
            f"{values.shape} for a mask of shape {mask.shape}. Return losses and "
            "metrics per example, before their mean, when batches carry a mask"
        )
    if values.ndim > 1:
        values = values.reshape(values.shape[0], -1).mean(axis=1)
    keep = mask.astype(bool)
    total = jnp.where(keep, values, 0.0).sum()
    return total / jnp.maximum(keep.astype(jnp.float32).sum(), 1.0)


def classification_loss(
    logits: jax.Array, batch: Batch, *, label_smoothing: float = 0.0
) -> tuple[jax.Array, Metrics]:
    r"""Computes softmax cross-entropy and accuracy of each example.

    .. math:: \ell_i = -\sum_c y_{ic} \log \mathrm{softmax}(z_i)_c

    A label that is no class gives a loss of NaN, so that it cannot go unnoticed.
    Where labels are soft, as `jaxaccel.data.mixup` makes them, the class of the
    largest share counts as the right one for the accuracy.

    Args:
      logits: Shape `[batch, classes]`, any floating dtype; computed in float32.
      batch: Holds `label`: integers of shape `[batch]`, or soft labels, floating of
        shape `[batch, classes]`.
      label_smoothing: Share of the target spread evenly over all classes, 0 to 1.

    Returns:
      The losses of shape `[batch]` and `{"accuracy": [batch]}`, as the adapters
      `from_linen` and `from_nnx` expect them.

    Raises:
      ValueError: If the shapes do not fit each other, or `label_smoothing` is not
        in 0 to 1.
      TypeError: If the labels are neither integers nor soft labels.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxaccel import train
      >>> logits = jnp.array([[2.0, 0.0], [0.0, 0.0]])
      >>> losses, metrics = train.classification_loss(
      ...     logits, {"label": jnp.array([0, 1], jnp.uint8)})
      >>> print(losses.round(3), metrics["accuracy"])
      [0.127 0.693] [1. 0.]
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in 0 to 1; got {label_smoothing}")
    labels = jnp.asarray(batch["label"])
    soft = labels.ndim == 2 and jnp.issubdtype(labels.dtype, jnp.floating)
    if logits.ndim != 2 or labels.shape != (logits.shape if soft else logits.shape[:1]):
        raise ValueError(
            "classification_loss needs logits [batch, classes] and labels [batch], or "
            f"soft labels [batch, classes]; got {logits.shape} and {labels.shape}"
        )
    logits = logits.astype(jnp.float32)
    classes = logits.shape[-1]
    if soft:
        targets, right = labels.astype(jnp.float32), labels.argmax(axis=-1)
        is_class = jnp.isfinite(targets).all(axis=-1)
    else:
        _check_class_numbers(labels)
        right = labels.astype(jnp.int32)
        targets = jax.nn.one_hot(right, classes, dtype=jnp.float32)
        is_class = (right >= 0) & (right < classes)
    # Not through the targets: a masked example's NaN would reach the gradient.
    targets = jnp.where(is_class[:, None], targets, 0.0)
    targets = targets * (1.0 - label_smoothing) + label_smoothing / classes
    losses = jnp.where(is_class, optax.softmax_cross_entropy(logits, targets), jnp.nan)
    correct = (logits.argmax(axis=-1) == right).astype(jnp.float32)
    return losses, {"accuracy": correct}


def _check_class_numbers(labels: jax.Array) -> None:
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            f"labels must be class numbers of an integer dtype, not {labels.dtype}; "
            "soft labels are [batch, classes]"
        )


def reduce_loss(result: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Turns what a user's loss returned into a mean loss and mean metrics."""
    losses, metrics = result if isinstance(result, tuple) else (result, {})
    if not isinstance(metrics, dict):
        raise TypeError(
            "the loss must return losses or (losses, metrics) with a flat dict of "
            f"metrics; got {type(metrics).__name__} for the metrics"
        )
    loss = masked_mean(losses, batch)
    return loss, {name: masked_mean(value, batch) for name, value in metrics.items()}


def select_inputs(inputs: str | Callable[[Batch], Any], batch: Batch) -> tuple:
    """Returns the positional arguments of the model for this batch."""
    if callable(inputs):
        selected = inputs(batch)
        return selected if isinstance(selected, tuple) else (selected,)
    if inputs not in batch:
        raise ValueError(
            f"the batch has no {inputs!r}; it holds {sorted(batch)}. "
            "Name the model's input with inputs="
        )
    return (batch[inputs],)
