"""Settings of the proxy program."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.engines.engine_settings import EngineSettings

DEFAULT_REDIS_URL = "redis://127.0.0.1:6379"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Checked when the parts that use them are made; each raises ConfigError."""

    redis_url: str | None
    """None keeps everything in this process, which only plain engines can do without."""
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    """0 takes a free port."""
    policy: str
    key_prefix: str
    secret: bytes | None = None
    """Deployment secret; None takes the one in Redis, or makes one."""
    worker_token: bytes | None = field(default=None, repr=False)
    drain_delay_s: float
    drain_s: float
    cors_origins: tuple[str, ...] = ()
    engines: EngineSettings = field(default_factory=EngineSettings)
