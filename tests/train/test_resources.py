"""Resource use, against the process's own clocks and hand-made counters."""

import sys
import time
import types
from typing import Any

import numpy as np
import pytest

from jaxaccel import train


def test_busy_process_and_its_memory():
    with train.ResourceMonitor() as resources:
        first = resources.read()
        assert not any("cpu" in name for name in first)
        ballast = np.ones(50_000_000, np.uint8)
        start, cpu = time.monotonic(), time.process_time()
        while time.process_time() - cpu < 0.3:
            pass
        seconds = time.monotonic() - start
        second = resources.read()
    # The clock of the system ticks 100 times a second.
    assert second["resources/cpu_cores"] * seconds == pytest.approx(0.3, abs=0.15)
    grown = second["resources/memory_bytes"] - first["resources/memory_bytes"]
    assert grown > 0.8 * ballast.nbytes
    assert 0 <= second["resources/machine_cpu_share"] <= 1
    assert 0 < second["resources/machine_memory_share"] < 1
    assert all(isinstance(x, float) for x in second.values())


def test_rates_of_known_counters(monkeypatch):
    resources = train.ResourceMonitor()
    now = iter([10.0, 14.0])
    monkeypatch.setattr(resources, "_clock", lambda: next(now))
    counters = iter(
        [
            {"cpu_cores": 5.0, "machine_busy": 10.0, "disk_read_bytes": 100.0},
            {"cpu_cores": 7.0, "machine_busy": 11.0, "disk_read_bytes": 50.0},
        ]
    )
    monkeypatch.setattr(resources, "_counters", lambda: next(counters))
    monkeypatch.setattr(resources._psutil, "cpu_count", lambda: 2)
    resources.read()
    values = resources.read()
    assert values["resources/cpu_cores"] == 0.5
    assert values["resources/machine_cpu_share"] == 0.125
    assert values["resources/disk_read_bytes"] == 0.0  # never negative


def test_gpus_of_nvml_with_one_that_tells_less(monkeypatch):
    nvml: Any = types.ModuleType("pynvml")
    ended = []

    class Missing(Exception):
        pass

    class Failed(Exception):
        pass

    def watts(i):
        if i == 1:
            raise Missing
        return 250_000

    nvml.NVMLError, nvml.NVMLError_NotSupported = Failed, Missing
    nvml.NVML_TEMPERATURE_GPU = 0
    nvml.nvmlInit = lambda: None
    nvml.nvmlShutdown = lambda: ended.append(True)
    nvml.nvmlDeviceGetCount = lambda: 2
    nvml.nvmlDeviceGetHandleByIndex = lambda i: i
    nvml.nvmlDeviceGetUtilizationRates = lambda i: types.SimpleNamespace(gpu=40)
    nvml.nvmlDeviceGetMemoryInfo = lambda i: types.SimpleNamespace(used=2**30)
    nvml.nvmlDeviceGetPowerUsage = watts
    nvml.nvmlDeviceGetTemperature = lambda i, kind: 60
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    with train.ResourceMonitor() as resources:
        values = resources.read()
    assert values["resources/gpu0/watts"] == 250.0
    assert "resources/gpu1/watts" not in values
    assert values["resources/gpu1/utilization_share"] == 0.4
    assert values["resources/gpu1/memory_bytes"] == 2**30
    assert values["resources/gpu1/celsius"] == 60.0
    assert ended == [True]
