"""Rules by path in front of another resolver."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxaccel.transforms._dims import KernelDims, KeyPath, Resolver, path_names
from jaxaccel.transforms._flax_dims import flax_dims


def override_dims(
    rules: Mapping[str, KernelDims | None], default: Resolver = flax_dims
) -> Resolver:
    """Puts rules by path in front of another resolver.

    Args:
        rules: regular expressions, searched for in the leaf's path written
            with slashes (`params/decoder/ConvTranspose_0/kernel`), each with
            the axes of the leaves it finds, or None to leave those untouched.
            The first that is found decides.
        default: resolver of all other leaves.

    Returns:
        A resolver, for any argument called `dims`. A transformation refuses
        at initialization a rule that finds no leaf.

    Raises:
        TypeError: a rule is neither a `KernelDims` nor None.
        ValueError: a regular expression does not compile.

    Examples:
        A transposed convolution whose kernel is (height, width, out, in):

        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxaccel.transforms import (
        ...     KernelDims, centralize_gradients, override_dims)
        >>> dims = override_dims({"up/kernel": KernelDims((0, 1, 3), (2,))})
        >>> tx = centralize_gradients(dims=dims)
        >>> grads = {"up": {"kernel": jnp.arange(8.0).reshape(1, 1, 2, 4)}}
        >>> updates, _ = tx.update(grads, tx.init(grads))
        >>> np.asarray(updates["up"]["kernel"][0, 0]).tolist()
        [[-1.5, -0.5, 0.5, 1.5], [-1.5, -0.5, 0.5, 1.5]]
    """
    for pattern, dims in rules.items():
        if not (dims is None or isinstance(dims, KernelDims)):
            raise TypeError(f"the rule {pattern!r} must be KernelDims or None: {dims}")
    return OverrideDims(
        tuple((_compile(pattern), dims) for pattern, dims in rules.items()), default
    )


@dataclasses.dataclass(frozen=True)
class OverrideDims:
    """The resolver that `override_dims` returns."""

    rules: tuple[tuple[re.Pattern, KernelDims | None], ...]
    default: Resolver

    def __call__(self, path: KeyPath, leaf: Any) -> KernelDims | None:
        """Resolves by the first rule found in the path, or by the default."""
        written = "/".join(path_names(path))
        for pattern, dims in self.rules:
            if pattern.search(written):
                rule = f"override {pattern.pattern!r}"
                return None if dims is None else dims.with_rule(rule)
        return self.default(path, leaf)

    def unmatched(self, paths: Iterable[KeyPath]) -> list[str]:
        """Lists the patterns found in none of the paths."""
        paths = list(paths)
        written = ["/".join(path_names(path)) for path in paths]
        mine = [
            pattern.pattern
            for pattern, _ in self.rules
            if not any(pattern.search(path) for path in written)
        ]
        inner = isinstance(self.default, OverrideDims)
        return mine + (self.default.unmatched(paths) if inner else [])


def _compile(pattern: str) -> re.Pattern:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"the rule {pattern!r} is not a regular expression: {error}"
        ) from None
