"""HTTPS with the certificate of a file; what is no certificate is told by one line."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from foredraft import AsyncEngine
from foredraft.cli.main import main
from foredraft.models.load import LoadedModel
from foredraft.testing.models import write_tiny_checkpoint

from .rig import NAME, PATIENCE, Running, serving

PEM = serialization.Encoding.PEM


def _key() -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8
    return key, key.private_bytes(PEM, form, serialization.NoEncryption())


def _certificate(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Of 127.0.0.1, signed by itself, for a day."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "foredraft")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return made.public_bytes(PEM)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, spelled = _key()
    certificate = _certificate(key)
    contents = {
        "cert": certificate,
        "key": spelled,
        "both": certificate + spelled,
        "other": _key()[1],
        "text": b"no certificate\n",
        "empty": b"",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: folder / name for name in contents}


@pytest.fixture
def secure(loaded: LoadedModel, files: dict[str, Path]) -> Iterator[Running]:
    engine = AsyncEngine(loaded)
    with serving(engine, certificate=(files["cert"], files["key"])) as running:
        yield running
    asyncio.run(engine.close())


def test_answers_come_encrypted_and_in_no_other_way(
    secure: Running, files: dict[str, Path]
) -> None:
    trusted = ssl.create_default_context(cafile=str(files["cert"]))
    with httpx.Client(verify=trusted, timeout=PATIENCE) as client:
        body = {"model": NAME, "prompt": "abc", "max_tokens": 3, "stream": True}
        assert secure.url.startswith("https://")
        answer = client.post(f"{secure.url}/v1/completions", json=body)
        assert answer.text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{secure.url.replace('https', 'http')}/health")


def test_a_certificate_and_its_key_may_share_a_file(
    loaded: LoadedModel, files: dict[str, Path]
) -> None:
    engine = AsyncEngine(loaded)
    trusted = ssl.create_default_context(cafile=str(files["cert"]))
    with serving(engine, certificate=(files["both"], None)) as running:
        assert httpx.get(f"{running.url}/health", verify=trusted).status_code == 200
    asyncio.run(engine.close())


@pytest.mark.parametrize(
    ("certificate", "key"),
    [("text", "key"), ("empty", "key"), ("cert", "other"), ("cert", "text"), ("cert", None),
     ("key", "cert")],
)  # fmt: skip
def test_what_cannot_be_used_is_told_by_one_line(
    certificate: str,
    key: str | None,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_checkpoint(model)
    options = ["--ssl-certfile", str(files[certificate]), "--port", "0"]
    options += [] if key is None else ["--ssl-keyfile", str(files[key])]
    assert main(["serve", str(model), *options]) == 2
    error = capsys.readouterr().err
    assert "TLS certificate or key" in error
    assert error.count("\n") == 1
