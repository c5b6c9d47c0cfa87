"""A run that is killed again and again ends as if nothing had happened."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("killed_runs.py")


@pytest.mark.parametrize(
    ("kills", "seed"), [(3, 0), pytest.param(20, 1, marks=pytest.mark.slow)]
)
def test_a_killed_run_resumes_bit_for_bit(tmp_path, kills, seed):
    # The suite's eight virtual devices would only cost time here.
    env = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path), str(kills), str(seed)],
        env={**env, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["same"], report
    # step, w, b, mean, Adam's count and moments, key, average, skipped steps.
    assert report["bytes"] >= 4 * (1 + 27 + 8 + 1 + 2 * 27 + 2 + 27)
    assert report["finished"] == 1, "only the last process may reach the end"
    assert report["began"] == sorted(report["began"]) and report["began"][-1] > 0
