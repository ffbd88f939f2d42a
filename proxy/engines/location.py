"""A place that an engine names in its answer, as the client can reach it: through this proxy.

http://10.0.0.5:8000/v1/files/   the engine itself    ──► /v1/files/
/base/v1/files/                  with the URL's /base ──► /v1/files/
v1/files/  https://elsewhere/x   anything else        ──► as it is
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from proxy.engines.engine_url import EngineUrl

_DEFAULT_PORTS = {"http": 80, "https": 443}


def seen_from_outside(place: bytes, url: EngineUrl) -> bytes:
    """`url` is the engine's; a place that is no URL stays as it is."""
    try:
        parts = urlsplit(place.decode("latin-1"))
        is_own = _is_own(parts, url)
    except ValueError:
        return place
    if not is_own:
        return place
    path = parts.path
    base = url.base_path.decode()
    if base and (path == base or path.startswith(base + "/")):
        path = path[len(base) :]
    # Two slashes would name another host.
    rest = "/" + path.lstrip("/\\")
    if parts.query:
        rest += "?" + parts.query
    if parts.fragment:
        rest += "#" + parts.fragment
    return rest.encode("latin-1")


def _is_own(parts: SplitResult, url: EngineUrl) -> bool:
    """Whether it names the engine. Whatever ends TLS before it, it may take its own scheme for http. ValueError."""
    if not parts.netloc:
        return not parts.scheme and parts.path.startswith("/")
    if parts.scheme not in ("", *_DEFAULT_PORTS) or parts.hostname != url.host:
        return False
    port = parts.port
    if port is None:
        return url.port in _DEFAULT_PORTS.values()
    return port == url.port
