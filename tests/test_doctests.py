"""Runs the examples of every docstring."""

import doctest
import importlib
import pkgutil

import pytest

import jaxaccel
import jaxaccel.transforms


def _modules():
    # walk_packages sees jaxaccel.transforms only where the link is; name both.
    for package in (jaxaccel, jaxaccel.transforms):
        yield package.__name__
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            yield module.name


@pytest.mark.parametrize("name", sorted(set(_modules())))
def test_examples(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0
