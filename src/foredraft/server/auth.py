"""API keys: who may ask. Knows headers and digests; knows no route."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from foredraft.server.errors import APIError

Headers = Iterable[tuple[bytes, bytes]]


class KeyRing:
    """The keys of a server, as digests: comparing takes as long whatever is sent."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, headers: Headers) -> None:
        """Raise APIError (401) unless a header "Authorization: Bearer KEY" has one of the keys."""
        if not self._digests:
            return
        given = [value for name, value in headers if name.lower() == b"authorization"]
        scheme, _, key = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        digest, known = _digest(key.strip()), False
        for each in self._digests:  # all of them: none may be told by the time it takes
            known |= hmac.compare_digest(each, digest)
        if scheme.lower() != b"bearer" or not known:
            raise APIError(
                401,
                "a valid API key is needed in the header 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
