"""Gradient transformations for Optax chains."""

if __name__ != "jaxaccel.transforms":  # pragma: no cover
    raise ImportError(
        f"this folder was imported as {__name__!r}; "
        "write `import jaxaccel.transforms` instead"
    )

from jaxaccel.transforms._centralize import centralize_gradients
from jaxaccel.transforms._clipping import clip_by_global_norm
from jaxaccel.transforms._dims import KernelDims, torch_dims
from jaxaccel.transforms._flax_dims import flax_dims
from jaxaccel.transforms._module_dims import module_dims
from jaxaccel.transforms._override import override_dims
from jaxaccel.transforms._znorm import znorm

__all__ = (
    "KernelDims",
    "centralize_gradients",
    "clip_by_global_norm",
    "flax_dims",
    "module_dims",
    "override_dims",
    "torch_dims",
    "znorm",
)
