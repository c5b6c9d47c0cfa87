"""Calling a user's loss, and explaining what does not fit its contract."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxaccel.train._task import LossFn

PyTree = Any

# Metrics that the step adds itself.
RESERVED = ("loss", "weight", "skipped", "loss_scale")


def call_loss(
    loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: Any, key: jax.Array
) -> tuple[jax.Array, tuple[PyTree, dict]]:
    """Calls a loss, checks what it returns and that it looks at a mask."""
    with missing_entries_explained(batch, "the loss"):
        if batch.get("mask") is not None:
            _check_mask_is_used(loss_fn, params, model_state, batch, key)
        result = loss_fn(params, model_state, batch, key)
    return _check_result(result)


def count_examples(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Returns how many examples of a batch count, as float32."""
    mask = batch.get("mask")
    if mask is not None:
        return mask.astype(jnp.float32).sum()
    return jnp.asarray(jax.tree.leaves(batch)[0].shape[0], jnp.float32)


def check_batch(batch: Any) -> None:
    """Raises unless a batch is a dict of arrays of one length, not empty."""
    if not isinstance(batch, Mapping) or not batch:
        raise TypeError(
            f"a batch is a dict of arrays, {{'image': ..., 'label': ...}}; got "
            f"{type(batch).__name__}"
        )
    for name, x in batch.items():
        if not hasattr(x, "shape"):
            raise TypeError(
                f"batch[{name!r}] is a {type(x).__name__}, not an array; write "
                "np.asarray(x), and a flat dict for several arrays"
            )
    shapes = {name: jnp.shape(x) for name, x in batch.items()}
    lengths = {shape[:1] for shape in shapes.values()}
    if len(lengths) > 1 or () in lengths:
        raise ValueError(
            f"every array of a batch needs the same leading batch axis; got {shapes}"
        )
    if lengths == {(0,)}:
        raise ValueError(f"the batch holds no examples; its shapes are {shapes}")


@contextlib.contextmanager
def missing_entries_explained(batch: Mapping[str, Any], who: str) -> Iterator[None]:
    """Says what the batch holds where a key was looked up in vain."""
    try:
        yield
    except KeyError as error:
        missing = error.args[0] if error.args else None
        if not isinstance(missing, str) or missing in batch:
            raise
        raise ValueError(
            f"{who} looked up {missing!r}, which is not there: the batch holds "
            f"{sorted(batch)}"
        ) from error


def _check_mask_is_used(
    loss_fn: LossFn, params: PyTree, model_state: PyTree, batch: Any, key: jax.Array
) -> None:
    jaxpr = jax.make_jaxpr(
        lambda mask: loss_fn(params, model_state, {**batch, "mask": mask}, key)[0]
    )(batch["mask"]).jaxpr
    if not any(jaxpr.invars[0] is v for eqn in jaxpr.eqns for v in eqn.invars):
        raise ValueError(
            "the batch has a mask, but the loss does not look at it: padding "
            "would count as examples. Average with jaxaccel.train.masked_mean("
            "losses, batch)"
        )


def _check_result(result: Any) -> tuple[jax.Array, tuple[PyTree, dict]]:
    try:
        loss, (model_state, metrics) = result
        metrics = dict(metrics)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "loss_fn must return (loss, (model_state, metrics)), with {} for no "
            f"state and no metrics; got {type(result).__name__}"
        ) from error
    probes = metrics.pop("probes", {})
    for name, value in {"loss": loss, **metrics}.items():
        if (
            value is None
            or isinstance(value, (Mapping, str))
            or jnp.iscomplexobj(value)
        ):
            raise TypeError(
                f"{name!r} must be a real scalar; got {type(value).__name__}. Metrics "
                "are a flat dict"
            )
        if jnp.shape(value) != ():
            raise TypeError(
                f"{name!r} must be a scalar, the mean over the batch; got shape "
                f"{jnp.shape(value)}. jaxaccel.train.masked_mean averages it"
            )
    if not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        raise TypeError(
            f"'loss' must be a floating number; got {jnp.result_type(loss)}, which "
            "has no gradient"
        )
    taken = [name for name in RESERVED if name in metrics]
    if taken:
        raise TypeError(f"{taken} are names of the step's own metrics; rename yours")
    scalars = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
    if probes:
        scalars["probes"] = probes
    return jnp.asarray(loss, jnp.float32), (model_state, scalars)
