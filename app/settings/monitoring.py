"""`[monitoring]`: what the gateway writes and tells of itself."""

from typing import Literal

from pydantic import Field, field_validator

from .section import Section


class TracingSettings(Section):
    endpoint: str | None = None
    """Where traces go: an OTLP receiver's address for HTTP, such as `http://collector:4318`. Without it there are none.
    What else the exporter needs is read from OpenTelemetry's own variables (`OTEL_EXPORTER_OTLP_HEADERS`, …)."""
    sample_ratio: float = Field(1.0, ge=0, le=1)
    """Share of requests that are traced, of those that come without a trace context; of others their callers decide."""
    service_name: str = "headrace"
    """What the gateway is called in traces."""

    @field_validator("endpoint")
    @classmethod
    def _is_for_http(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("an OTLP receiver's address for HTTP begins with http:// or https://")
        return url

    @property
    def traces_url(self) -> str | None:
        """With the path that OTLP/HTTP has for traces."""
        if self.endpoint is None or self.endpoint.rstrip("/").endswith("/v1/traces"):
            return self.endpoint
        return f"{self.endpoint.rstrip('/')}/v1/traces"


class MonitoringSettings(Section):
    log_format: Literal["json", "console"] = "json"
    """One JSON object a line, or lines for people."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the gateway's own lines."""
    engine_log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """Of vLLM's lines."""
    max_tenants: int = Field(100, ge=0, le=10_000)
    """Tenants with metrics of their own, the first that come; the others are counted together. 0: none have any."""
    console: bool = True
    """Serve the page at `/console`."""
    tracing: TracingSettings = TracingSettings()
