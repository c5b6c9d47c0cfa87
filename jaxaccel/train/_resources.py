"""What a run takes of its machine."""

import time
from typing import Any

import jax


class ResourceMonitor:
    """Reads CPU, memory, disk, network and accelerators; a context manager.

    Nothing runs in the background: a call of `read` gives the state, and rates over
    the time since the call before (the first gives none). It takes milliseconds, for
    looking through the system's processes: read it at log steps.

    Raises:
      ImportError: If psutil is not installed.

    Examples:
      >>> from jaxaccel import train
      >>> with train.ResourceMonitor() as resources:
      ...     values = resources.read()
      >>> values["resources/memory_bytes"] > 1e6
      True
    """

    def __init__(self):
        try:
            import psutil
        except ImportError as error:
            raise ImportError(
                "ResourceMonitor needs psutil: pip install 'jaxaccel[monitor]'"
            ) from error
        self._psutil = psutil
        self._process = psutil.Process()
        self._clock = time.monotonic
        self._before: tuple[float, dict[str, float]] | None = None
        self._nvml = _start_nvml()

    def read(self) -> dict[str, float]:
        """Reads everything that this system tells.

        Returns:
          By name, after `resources/`: `cpu_cores` (cores that this process and its
          children kept busy), `machine_cpu_share` (0 to 1), `memory_bytes` (of the
          process and its children), `machine_memory_share`, `disk_read_bytes`,
          `disk_written_bytes`, `network_received_bytes`, `network_sent_bytes` (of
          the machine, each a second), `device<i>/bytes_in_use` and
          `device<i>/peak_bytes_in_use` (of jax's allocator), and, of NVIDIA GPUs,
          `gpu<i>/utilization_share`, `gpu<i>/memory_bytes`, `gpu<i>/watts` and
          `gpu<i>/celsius`.
        """
        values = {
            "memory_bytes": self._memory(),
            "machine_memory_share": self._psutil.virtual_memory().percent / 100,
            **self._rates(),
            **_device_memory(),
            **self._gpus(),
        }
        return {f"resources/{name}": float(x) for name, x in values.items()}

    def close(self) -> None:
        """Ends the connection to the driver of the GPUs."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
            self._nvml = None

    def __enter__(self) -> "ResourceMonitor":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _family(self) -> list[Any]:
        return [self._process, *self._process.children(recursive=True)]

    def _memory(self) -> float:
        total = 0.0
        for process in self._family():
            try:
                total += process.memory_info().rss
            except self._psutil.NoSuchProcess:
                continue  # a child ended meanwhile
        return total

    def _counters(self) -> dict[str, float]:
        times = self._psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        counters = {
            "cpu_cores": self._cpu_seconds(),
            "machine_busy": sum(times) - idle - getattr(times, "guest", 0.0),
        }
        disk = self._psutil.disk_io_counters()
        if disk is not None:  # some containers have no disk of their own
            counters["disk_read_bytes"] = disk.read_bytes
            counters["disk_written_bytes"] = disk.write_bytes
        network = self._psutil.net_io_counters()
        if network is not None:
            counters["network_received_bytes"] = network.bytes_recv
            counters["network_sent_bytes"] = network.bytes_sent
        return counters

    def _cpu_seconds(self) -> float:
        total = 0.0
        for process in self._family():
            try:
                times = process.cpu_times()
            except self._psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def _rates(self) -> dict[str, float]:
        now, counters = self._clock(), self._counters()
        before, self._before = self._before, (now, counters)
        if before is None or now <= before[0]:
            return {}
        seconds = now - before[0]
        # A child that ended takes its seconds along; a rate is never negative.
        rates = {
            name: max(0.0, x - before[1].get(name, x)) / seconds
            for name, x in counters.items()
        }
        cores = self._psutil.cpu_count() or 1
        rates["machine_cpu_share"] = min(1.0, rates.pop("machine_busy") / cores)
        return rates

    def _gpus(self) -> dict[str, float]:
        nvml, values = self._nvml, {}
        if nvml is None:
            return values
        for i in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(i)
            readings = {
                "utilization_share": lambda gpu=gpu: (
                    nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
                ),
                "memory_bytes": lambda gpu=gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
                "watts": lambda gpu=gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
                "celsius": lambda gpu=gpu: nvml.nvmlDeviceGetTemperature(
                    gpu, nvml.NVML_TEMPERATURE_GPU
                ),
            }
            for name, read in readings.items():
                try:
                    values[f"gpu{i}/{name}"] = float(read())
                except nvml.NVMLError_NotSupported:
                    continue  # virtual and partitioned GPUs tell less
        return values


def _start_nvml() -> Any:
    """Returns the module of NVIDIA's management library, or None without GPUs."""
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _device_memory() -> dict[str, float]:
    values = {}
    for i, device in enumerate(jax.local_devices()):
        stats = device.memory_stats() or {}
        for name in ("bytes_in_use", "peak_bytes_in_use"):
            if name in stats:
                values[f"device{i}/{name}"] = float(stats[name])
    return values
