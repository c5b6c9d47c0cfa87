"""Importing jaxaccel starts no backend, and warns on versions known to be wrong."""

import importlib.metadata
import socket
import subprocess
import sys
import warnings

import pytest

from jaxaccel import _versions

ALL = """
import importlib, pkgutil
import jaxaccel
import jaxaccel.transforms
names = ["jaxaccel.transforms"]
for package in (jaxaccel, jaxaccel.transforms):
    walk = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    names += [module.name for module in walk]
for name in names:
    importlib.import_module(name)
"""


def run(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_everything_starts_no_backend():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = run(
        ALL + "import jax\n"
        "from jax._src import xla_bridge\n"
        "print(len(names) > 20, len(xla_bridge._backends))\n"
        # This raises once a backend has started.
        f"jax.distributed.initialize('127.0.0.1:{port}', 1, 0)\n"
        "print(jax.process_count(), len(xla_bridge._backends) > 0)\n"
        "jax.distributed.shutdown()\n"
    )
    assert out.split() == ["True", "0", "1", "True"]


def test_distributed_initialization_would_notice_a_backend():
    # Guards the test above: what it relies on must still hold in this jax.
    out = run(
        "import jax\n"
        "jax.devices()\n"
        "try:\n"
        "    jax.distributed.initialize('127.0.0.1:1', 1, 0)\n"
        "except RuntimeError as error:\n"
        "    print(error)\n"
    )
    assert "before" in out


def test_importing_jaxaccel_alone_does_not_import_jax():
    out = run(
        "import sys, jaxaccel\n"
        "print(jaxaccel.__version__, *{'jax', 'jaxlib', 'numpy'} & set(sys.modules))"
    )
    assert out.split() == [importlib.metadata.version("jaxaccel")]


def test_importing_the_parts_pulls_in_no_optional_dependency():
    out = run(
        "import sys, jaxaccel.data, jaxaccel.train, jaxaccel.transforms\n"
        "optional = {'sklearn', 'matplotlib', 'rich', 'tensorboard', 'torch'}\n"
        "print(sorted(optional & set(sys.modules)))"
    )
    assert out.strip() == "[]"


def test_import_is_silent_with_the_installed_version():
    run("import jaxaccel", "-W", "error")


@pytest.mark.parametrize("version", sorted(_versions.BAD_JAXLIB))
def test_bad_version_warns_with_the_remedy(version):
    with pytest.warns(RuntimeWarning) as caught:
        _versions.warn_if_bad_jaxlib(version)
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith(f"jaxlib {version} ")
    assert _versions.BAD_JAXLIB[version] in message
    for excluded in _versions.BAD_JAXLIB:
        assert f"!={excluded}" in message
    flag = "--xla_cpu_experimental_ynn_fusion_type="
    assert (flag in message) == (version == "0.10.2")


@pytest.mark.parametrize("version", ["0.10.1", "0.12.0.1", "0.13.0", "0.10.20"])
def test_good_version_is_silent(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _versions.warn_if_bad_jaxlib(version)
    assert version not in _versions.BAD_JAXLIB


def test_import_on_a_bad_version_warns_by_its_number_alone():
    out = run(
        "import importlib.metadata, sys, warnings\n"
        "importlib.metadata.version = lambda name: {'jaxlib': '0.10.2'}[name]\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import jaxaccel\n"
        "for warning in caught:\n"
        "    print(warning.category.__name__, str(warning.message).split()[1])\n"
        "print('jax' in sys.modules)\n"
    )
    assert out.split() == ["RuntimeWarning", "0.10.2", "False"]
