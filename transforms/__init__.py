"""Gradient transformations for Optax chains."""

if __name__ != "jaxaccel.transforms":  # pragma: no cover
    raise ImportError(
        f"this folder was imported as {__name__!r}; "
        "write `import jaxaccel.transforms` instead"
    )

from jaxaccel.transforms._adagc import adagc
from jaxaccel.transforms._autoclip import autoclip
from jaxaccel.transforms._centralize import centralize_gradients
from jaxaccel.transforms._clipping import clip_by_global_norm, clip_by_value
from jaxaccel.transforms._describe import describe_dims
from jaxaccel.transforms._dims import KernelDims, torch_dims
from jaxaccel.transforms._flax_dims import flax_dims
from jaxaccel.transforms._grokfast import grokfast_ema
from jaxaccel.transforms._haiku_dims import haiku_dims
from jaxaccel.transforms._layer_clipping import adaptive_grad_clip, clip_by_layer_norm
from jaxaccel.transforms._module_dims import module_dims
from jaxaccel.transforms._noise_scale import (
    estimate_gradient_noise,
    gradient_noise_scale,
)
from jaxaccel.transforms._override import override_dims
from jaxaccel.transforms._statistics import (
    gradient_statistics,
    write_gradient_statistics,
)
from jaxaccel.transforms._zclip import zclip
from jaxaccel.transforms._znorm import znorm

__all__ = (
    "KernelDims",
    "adagc",
    "adaptive_grad_clip",
    "autoclip",
    "centralize_gradients",
    "clip_by_global_norm",
    "clip_by_layer_norm",
    "clip_by_value",
    "describe_dims",
    "estimate_gradient_noise",
    "flax_dims",
    "gradient_noise_scale",
    "gradient_statistics",
    "grokfast_ema",
    "haiku_dims",
    "module_dims",
    "override_dims",
    "torch_dims",
    "write_gradient_statistics",
    "zclip",
    "znorm",
)
