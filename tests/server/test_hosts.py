"""Requests are taken under this machine's names alone where no key guards the server: a web page
may have made a name of its own mean this machine.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from foredraft import AsyncEngine
from foredraft.cli.serve_options import ListenOptions
from foredraft.core.errors import ConfigError
from foredraft.models.load import LoadedModel
from foredraft.server.hosts import LOOPBACK, is_loopback
from foredraft.server.settings import ServerSettings

from .rig import NAME, Running, serving

OURS = ["localhost", "LOCALHOST:8000", "localhost.:80", "127.0.0.1", "127.0.0.1:9", "[::1]:8000"]
OTHERS = [
    "example.org", "example.org:8000", "localhost.example.org", "127.0.0.1.example.org", "0.0.0.0",
    "", "[::2]", "[", "::1", "localhost@example.org", "xlocalhost", "127.0.0.1\xe9",
]  # fmt: skip


@pytest.fixture(scope="module")
def named(loaded: LoadedModel) -> Iterator[Running]:
    engine = AsyncEngine(loaded)
    with serving(engine, allowed_hosts=(*LOOPBACK, "Models.Example")) as running:
        yield running
    asyncio.run(engine.close())


def test_only_names_of_the_server_are_answered(named: Running) -> None:
    with named.http() as client:
        for host in [*OURS, "models.example", "models.example:443"]:
            assert client.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in OTHERS:
            for path in ("/", "/health", "/live", "/v1/models", "/nowhere"):
                answer = client.get(path, headers=[(b"host", host.encode("latin-1"))])
                assert answer.status_code == 421, (host, path)
                error = answer.json()["error"]
                assert error["code"] == "host_not_allowed"
                assert "--allowed-host" in error["message"]
        document = client.get("/openapi.json").json()
    assert all(
        "421" in operation["responses"]
        for path in document["paths"].values()
        for operation in path.values()
    )


def test_a_target_with_a_host_in_it_names_the_host(named: Running) -> None:
    """RFC 9112, 3.2.2: whatever the header says."""

    def status(target: str, host: str) -> int:
        with socket.create_connection(named.address, 30) as client:
            client.sendall(f"GET {target} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            return int(client.recv(4000).split()[1])

    for target, expected in (
        ("http://localhost:8000/v1/models", 200),
        ("HTTP://127.0.0.1/health?a=b", 200),
        ("https://models.example", 200),
        ("http://localhost/v1/nothing", 404),
        ("http://example.org/v1/models", 421),
        ("http:///v1/models", 421),
    ):
        for host in ("localhost", "example.org"):
            assert status(target, host) == expected, target


def test_without_names_every_host_is_answered(server: Running) -> None:
    with server.http() as client:
        for host in OURS + OTHERS[:3]:
            assert client.get("/health", headers={"host": host}).status_code == 200
        assert "421" not in client.get("/openapi.json").text


@pytest.mark.parametrize(
    ("options", "keys", "names"),
    [
        (ListenOptions(), [], (*LOOPBACK, "127.0.0.1")),
        (ListenOptions(host="127.0.0.2"), [], (*LOOPBACK, "127.0.0.2")),
        (ListenOptions(), ["key"], ()),
        (ListenOptions(host="0.0.0.0"), [], ()),
        (ListenOptions(allowed_host=["a.b"]), ["key"], (*LOOPBACK, "127.0.0.1", "a.b")),
        (ListenOptions(host="::", allowed_host=["a.b"]), [], (*LOOPBACK, "::", "a.b")),
    ],
)
def test_names_are_asked_for_where_nothing_else_guards(
    options: ListenOptions, keys: list[str], names: tuple[str, ...]
) -> None:
    assert options.hosts(keys) == names


def test_what_is_no_name_of_a_host_is_refused() -> None:
    for wrong in ("", "a:80", "http://a", "a/b", "*", "a b", "-", "[::1]"):
        with pytest.raises(ConfigError, match="allowed host"):
            ServerSettings(model_names=(NAME,), allowed_hosts=(wrong,))
    ServerSettings(model_names=(NAME,), allowed_hosts=("a-b.c_d", "10.0.0.1", "fe80::1", "x"))


def test_loopback_is_told_from_other_addresses() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert is_loopback(host)
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", ""):
        assert not is_loopback(host)
