"""Which hosts a request may be addressed to.

Knows the header "Host"; knows no route. A web page can make its own name mean this machine (DNS
rebinding), and a browser then takes the server for a part of that page; the name stays the page's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from foredraft.server.errors import APIError

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


class AllowedHosts:
    """The names of a server, without ports; none: it answers to every name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(name.lower() for name in names)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raise APIError (421) for a header "Host" with another name. A request without one comes
        from no browser.
        """
        if not self._names:
            return
        for key, value in headers:
            if key.lower() == b"host" and (name := _name(value)) not in self._names:
                raise APIError(
                    421,
                    f"the host {name[:100]!a} is not served here; --allowed-host would name it",
                    code="host_not_allowed",
                )


def is_name(text: str) -> bool:
    """Whether this is a host's name or address, without a port."""
    return is_address(text) or _NAME.fullmatch(text) is not None


def is_address(text: str) -> bool:
    """Whether this is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def _name(value: bytes) -> str:
    text = value.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].removesuffix(".")
