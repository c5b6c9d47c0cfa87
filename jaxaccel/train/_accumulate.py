"""The gradient of a batch, in one piece or as the mean over micro-batches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.train._call_loss import count_examples
from jaxaccel.train._fit import fit_model_state
from jaxaccel.train._precision import at_least_float32

PyTree = Any
Loss = Callable[..., tuple[jax.Array, tuple[PyTree, dict]]]


def mean_loss(loss: Loss, pieces: int) -> Loss:
    r"""Computes a loss as the weighted mean over micro-batches, one after another.

    .. math:: L = \sum_i w_i L_i / \sum_i w_i

    with :math:`w_i` the examples of micro-batch :math:`i` that count. One in which
    none counts adds nothing, whatever its loss, and leaves the model state alone.

    Args:
      loss: `loss(params, model_state, batch, key) -> (loss, (model_state, aux))`.
      pieces: Number of micro-batches.

    Returns:
      A function like `loss`; the model state is threaded through.
    """
    if pieces == 1:
        return loss

    def threaded(params: PyTree, model_state: PyTree, batch: Any, key: jax.Array):
        def body(model_state: PyTree, micro: tuple):
            share, batch, key = micro
            value, (new_state, aux) = loss(params, model_state, batch, key)
            new_state = fit_model_state(model_state, new_state)
            return _weighed(share, new_state, model_state), (value, aux)

        micro = _split(batch, key, pieces)
        model_state, values = jax.lax.scan(body, model_state, micro)
        value, aux = _average(micro[0], values)
        return value, (model_state, aux)

    return threaded


def mean_gradient(
    loss: Loss, pieces: int, zeros: Callable[[PyTree], PyTree]
) -> Callable[..., tuple[tuple[jax.Array, tuple[PyTree, dict]], PyTree]]:
    """Computes a loss and its gradient, with the memory of one micro-batch.

    Args:
      loss: As for `mean_loss`.
      pieces: Number of micro-batches.
      zeros: Makes the first sum of gradients, given the parameters.

    Returns:
      `gradient(params, model_state, batch, key, scale) -> ((loss, (model_state,
      aux)), grads)`, with the gradient in at least float32. The loss is multiplied
      by `scale` before it is differentiated and every micro-batch's gradient is
      divided by it; None does neither.
    """

    def piece(params: PyTree, model_state: PyTree, batch: Any, key: Any, scale: Any):
        def scaled(params: PyTree):
            value, aux = loss(params, model_state, batch, key)
            return value if scale is None else value * scale, (value, aux)

        (_, result), grads = jax.value_and_grad(scaled, has_aux=True)(params)
        grads = at_least_float32(grads)
        if scale is not None:
            grads = jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)
        return result, grads

    if pieces == 1:
        return piece

    def accumulated(
        params: PyTree, model_state: PyTree, batch: Any, key: Any, scale: Any
    ):
        def body(carry: tuple, micro: tuple):
            total, model_state = carry
            share, batch, key = micro
            (value, (new_state, aux)), grads = piece(
                params, model_state, batch, key, scale
            )
            new_state = fit_model_state(model_state, new_state)
            model_state = _weighed(share, new_state, model_state)
            total = jax.tree.map(lambda t, g: t + _times(share, g), total, grads)
            return (total, model_state), (value, aux)

        micro = _split(batch, key, pieces)
        start = zeros(at_least_float32(params)), model_state
        (total, model_state), values = jax.lax.scan(body, start, micro)
        value, aux = _average(micro[0], values)
        return (value, (model_state, aux)), total

    return accumulated


def check_pieces(accumulate: Any) -> None:
    """Raises unless `accumulate` is a number of micro-batches."""
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(
            f"accumulate must be a number of micro-batches, at least 1; got "
            f"{accumulate!r}"
        )


def _split(batch: Any, key: jax.Array, pieces: int) -> tuple:
    """Returns each micro-batch's share of the examples, its arrays and its key."""
    length = next(iter(batch.values())).shape[0]
    if length % pieces:
        raise ValueError(
            f"accumulate={pieces} does not divide the batch of {length} examples; "
            "choose a batch_size that is a multiple of it"
        )

    def deal(x: jax.Array) -> jax.Array:
        # Row i goes to micro-batch i % pieces: then a sharded batch stays where it
        # is, and padding at the end is spread over all of them.
        return jnp.moveaxis(x.reshape(length // pieces, pieces, *x.shape[1:]), 1, 0)

    micro = jax.tree.map(deal, batch)
    if "mask" in batch:
        weights = jax.vmap(lambda mask: count_examples({"mask": mask}))(micro["mask"])
        shares = weights / jnp.maximum(weights.sum(), 1.0)
    else:
        shares = jnp.full(pieces, 1 / pieces, jnp.float32)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(pieces))
    return shares, micro, keys


def _times(share: jax.Array, x: jax.Array) -> jax.Array:
    # Not a mere product: the loss of no examples may be NaN.
    return jnp.where(share > 0, share.astype(x.dtype) * x, jnp.zeros((), x.dtype))


def _weighed(share: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: jnp.where(share > 0, n, o), new, old)


def _average(shares: jax.Array, values: PyTree) -> PyTree:
    def mean(x: jax.Array) -> jax.Array:
        x = x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)
        return jax.vmap(_times)(shares, x).sum(axis=0)

    return jax.tree.map(mean, values)
