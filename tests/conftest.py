"""Strict settings for every test, and the fixtures that several folders share."""

import os

# Before jax starts: eight CPU devices, so that sharded cases run anywhere.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 " + os.environ.get(
    "XLA_FLAGS", ""
)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "jaxaccel", deadline=None, max_examples=25, derandomize=True
)
hypothesis.settings.load_profile("jaxaccel")


@pytest.fixture
def key():
    """A fixed PRNG key."""
    return jax.random.key(0)


@pytest.fixture
def rng():
    """A fixed NumPy generator, for oracles that must not use jax."""
    return np.random.default_rng(0)


@pytest.fixture
def unchecked():
    """Switches the annotations' own checks off, as they are for users.

    For tests of an error that a wrong type gets from the library itself.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
