"""Metrics for Prometheus, which fetches them by HTTP."""

import re
import threading
import time
from collections.abc import Mapping
from typing import Any

from jaxaccel.train._writers import flatten


class PrometheusWriter:
    """Serves the latest scalars as gauges, at `http://<address>:<port>/metrics`.

    The gauge of `loss` is `jaxaccel_loss`; other characters than letters, digits
    and underscores become underscores. `jaxaccel_step` is the step that they
    belong to and `jaxaccel_updated_seconds` the time of the last one, by which an
    alarm notices a run that hangs. Hand it the metrics, `Meter.reading().scalars()`
    (step time, throughput, starvation) and `ResourceMonitor.read()` (memory).

    Args:
      port: Where it listens; 0 lets the system choose, see the attribute.
      address: Of the interface; the default is reached from this machine only.
      labels: Labels of every gauge, such as `{"run": "baseline"}`.

    Attributes:
      port: Where it listens.

    Raises:
      ImportError: If prometheus-client is not installed.
      OSError: If the port is taken.
    """

    def __init__(
        self,
        port: int = 9101,
        *,
        address: str = "127.0.0.1",
        labels: Mapping[str, str] | None = None,
    ):
        try:
            import prometheus_client
        except ImportError as error:
            raise ImportError(
                "PrometheusWriter needs prometheus-client: "
                "pip install 'jaxaccel[monitor]'"
            ) from error
        self._client = prometheus_client
        self._labels = {name: str(x) for name, x in (labels or {}).items()}
        # A registry of its own: two runs of one process do not meet.
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        self._server, self._thread = prometheus_client.start_http_server(
            port, addr=address, registry=self._registry
        )
        self.port: int = self._server.server_port
        self._closed = threading.Event()

    def scalars(self, step: int, values: Mapping[str, Any]) -> None:
        """Sets the gauges of host scalars; nested names are joined by underscores."""
        for name, value in flatten(values):
            self._set(name, float(value))
        self._set("step", float(step))
        self._set("updated_seconds", time.time())

    def flush(self) -> None:
        """Does nothing: values are served as soon as they are set."""

    def close(self) -> None:
        """Stops listening."""
        if not self._closed.is_set():
            self._closed.set()
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def __enter__(self) -> "PrometheusWriter":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _set(self, name: str, value: float) -> None:
        legal = "jaxaccel_" + re.sub(r"\W", "_", name, flags=re.ASCII)
        if legal not in self._gauges:
            self._gauges[legal] = self._client.Gauge(
                legal,
                f"Latest {name} of the training run",
                list(self._labels),
                registry=self._registry,
            )
        gauge = self._gauges[legal]
        (gauge.labels(**self._labels) if self._labels else gauge).set(value)
