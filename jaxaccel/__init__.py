"""Faster training and smaller networks for JAX and Flax, each gain measured."""

from jaxaccel._versions import warn_if_bad_jaxlib

__version__ = "0.1.0"

warn_if_bad_jaxlib()
del warn_if_bad_jaxlib
