"""What a measurement was made with: versions, hardware and commit."""

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "grain", "numpy")


def versions() -> dict[str, str]:
    """Versions of Python and the packages that a measurement depends on."""
    packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **packages}


def hardware() -> dict[str, str | int]:
    """Describes the machine without naming it."""
    devices = jax.local_devices()
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # Only Linux can tell what this process may use.
        cores = os.cpu_count() or 1
    return {
        "cpu": _cpu_model(),
        "cores": cores,
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }


def commit() -> str | None:
    """The commit this file belongs to, or None where it is no part of one."""
    # An installed package inside some other repository is not tracked by it.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    head = _git("rev-parse", "HEAD")
    # Results do not count: the first record would mark the second as changed.
    elsewhere = (":(top)", ":(top,exclude)benchmarks/results")
    changes = _git("status", "--porcelain", "--", *elsewhere)
    return f"{head}+changes" if head and changes else head


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
