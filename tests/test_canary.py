"""Two computations that some jaxlib versions get wrong on the CPU backend."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np


def test_softmax_backward_shape_is_right(rng):
    """jaxlib 0.10.2 is off by a relative 2.8 here (jax issues #39103, #37465)."""
    p = rng.random((1437, 10), np.float32)
    y = rng.random((8, 1437, 10), np.float32)

    def backward(p, y):
        return p * (y - (p * y).sum(-1, keepdims=True))

    with jax.numpy_rank_promotion("allow"):
        got = np.asarray(jax.jit(backward)(jnp.asarray(p), jnp.asarray(y)))
    want = backward(p.astype(np.float64), y.astype(np.float64))
    error = np.abs(got - want).max() / np.abs(want).max()
    assert error < 1e-5, (
        f"jaxlib computes wrong numbers (relative error {error:.2g}); "
        "install a version that pyproject.toml allows"
    )


def test_rank_7_arrays_do_not_crash():
    """jaxlib 0.11.0 aborts the process here (jax issue #39257)."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "x = jnp.arange(128.0).reshape((2,) * 7)\n"
        "f = jax.jit(lambda x: (x - x.mean(-1, keepdims=True)).transpose(\n"
        "    6, 5, 4, 3, 2, 1, 0).sum((0, 2)))\n"
        "print(float(f(x).sum()))\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == 0.0
