"""Known-bad versions of jaxlib, checked without starting a backend."""

import importlib.metadata
import warnings

# version -> what goes wrong there. pyproject.toml excludes the same versions;
# this is for environments where another package forced one of them in.
BAD_JAXLIB = {
    "0.10.2": (
        "computes silently wrong numbers on the CPU backend (jax issues #39103, #37465)"
    ),
    "0.11.0": "crashes on rank-7 arrays on the CPU backend (jax issue #39257)",
    "0.11.1": "is reported to compute wrong numbers on CUDA 13 (jax issue #40633)",
}


def warn_if_bad_jaxlib(version: str | None = None) -> None:
    """Warns when jaxlib is a version known to be wrong.

    Args:
      version: The jaxlib version; None reads it from the installed package's
        metadata, which neither imports jax nor starts a backend.
    """
    if version is None:
        version = importlib.metadata.version("jaxlib")
    reason = BAD_JAXLIB.get(version)
    if reason is None:
        return
    flag = (
        " or, on CPU, put `--xla_cpu_experimental_ynn_fusion_type=` first in XLA_FLAGS"
        if version == "0.10.2"
        else ""
    )
    warnings.warn(
        f"jaxlib {version} {reason}. Install another version: "
        f"pip install 'jax>=0.10.1,!=0.10.2,!=0.11.0,!=0.11.1'{flag}.",
        RuntimeWarning,
        stacklevel=3,
    )
