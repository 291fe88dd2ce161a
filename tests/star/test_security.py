"""Who gets in: tokens, certificates, and the rule that an open port is on loopback."""

from __future__ import annotations

import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from adaserve_jax.errors import ConfigError
from adaserve_jax.star.messages import Refused, Resync, Welcome
from adaserve_jax.star.service.server import Audit, BearerTokens, check_secured, is_loopback
from adaserve_jax.star.settings import DraftServiceSettings, host_port
from tests.star.streams import Target, toy_service
from tests.star.toys import draft, hello, opened

FIRST, SECOND = "first-0123456789abcdef", "second-0123456789abcdef"


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"# of the lab\n{FIRST}\n\n  {SECOND}  \n")
    return path


def test_tokens_are_known_by_their_place(tokens: Path):
    known = BearerTokens(str(tokens))
    assert known.identify(f"Bearer {FIRST}") == "token-1"
    assert known.identify(f"bearer  {SECOND} ") == "token-2"
    for wrong in (
        "",
        FIRST,
        f"Basic {FIRST}",
        f"Digest {FIRST}",  # a scheme as long as Bearer
        "Bearer ",
        f"Bearer {FIRST}x",
        f"Bearer {FIRST[:-1]}",
        "Bearer # of the lab",
    ):
        assert known.identify(wrong) is None
    assert FIRST not in repr(vars(known))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "token_file must hold at least one token, got none"),
        (b"# nothing\n", "token_file must hold at least one token, got none"),
        (b"short-secret\n", "one token of at least 16 characters in each line"),
        (b"a long secret with spaces\n", "one token of at least 16 characters in each line"),
        ("geheimgeheimgeheim\u00fc\n".encode(), "token_file must hold tokens of ASCII characters"),
    ],
)
def test_files_without_good_tokens_are_refused_without_telling_them(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        BearerTokens(str(path))
    assert message in str(raised.value) and "secret" not in str(raised.value) and "geheim" not in str(raised.value)
    with pytest.raises(ConfigError, match="token_file must be a file that can be read"):
        BearerTokens(str(tmp_path / "absent"))


def test_only_who_has_a_token_gets_in(tokens: Path):
    with toy_service(token_file=str(tokens)) as service:
        for token in (None, "wrong-0123456789abcdef"):
            target = Target(service.port, token=token)
            with pytest.raises(grpc.RpcError) as raised:
                target.receive()
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
            target.close()
        assert service.server.audit.refused() == {"unauthenticated": 2}
        assert service.core.targets == []
        with service.target("a", token=FIRST) as one, service.target("a", token=SECOND) as other:
            one.send(opened(1, 1, [1, 2]))
            other.send(opened(1, 1, [3, 4]), draft(2, 1, 1, 0, [1]))
            assert other.receive() == Resync(2, 1)
            assert service.core.targets == ["token-1/a", "token-2/a"], "the same name, but not the same target"


OPEN = "listen must be on loopback without a token and without client certificates"


@pytest.mark.parametrize("listen", ["0.0.0.0:7070", "[::]:7070", "192.0.2.7:7070"])
def test_an_open_port_is_on_loopback(listen: str, tokens: Path):
    settings = DraftServiceSettings(listen=listen)
    with pytest.raises(ConfigError) as raised:
        check_secured(settings)
    assert OPEN in str(raised.value) and listen in str(raised.value)
    with pytest.raises(ConfigError, match=OPEN):  # a certificate of the service's own says nothing of who asks
        check_secured(replace(settings, tls_cert="cert.pem", tls_key="key.pem"))
    check_secured(replace(settings, insecure=True))
    check_secured(replace(settings, token_file=str(tokens)))
    for here in ("127.0.0.1:0", "[::1]:0", "localhost:0", "127.8.9.1:5"):
        check_secured(replace(settings, listen=here))


def test_hosts():
    assert is_loopback("localhost") and not is_loopback("0.0.0.0")
    with pytest.raises(ConfigError, match="there is no host"):
        is_loopback("no.such.host.invalid")


def test_a_host_is_on_loopback_if_all_of_its_addresses_are(monkeypatch: pytest.MonkeyPatch):
    def resolved(*addresses: str) -> None:
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)

    resolved("127.0.0.1", "::1")
    assert is_loopback("here")
    for addresses in (("127.0.0.1", "192.0.2.7"), ("192.0.2.7", "127.0.0.1")):
        resolved(*addresses)
        assert not is_loopback("here-and-there")
        with pytest.raises(ConfigError, match=OPEN):
            check_secured(DraftServiceSettings(listen="here-and-there:7070"))


def test_a_name_that_no_host_can_have_is_refused_as_one_that_none_has():
    with pytest.raises(ConfigError, match=r"there is no host 'x{70}' to listen on; give one of this machine's"):
        is_loopback("x" * 70)


@pytest.mark.parametrize(
    "address",
    ["", "7070", "localhost", "localhost:", ":7070", "h:x", "h:70000", "::1:7070", "h:-1", "h:" + "1" * 5000],
    ids=lambda address: address[:10],
)
def test_addresses_that_are_none(address: str):
    with pytest.raises(ConfigError, match="listen must be host:port"):
        host_port("listen", address)
    assert host_port("listen", "[::1]:7070") == ("::1", 7070) and host_port("http", "a.b:1") == ("a.b", 1)


def test_streams_are_counted_by_peer():
    audit = Audit()
    assert [audit.open(peer, 3, 2) for peer in ("a", "a", "b")] == ["", "", ""]
    assert audit.open("a", 9, 2).startswith("2 connections") and audit.open("c", 3, 2).startswith("3 targets")
    audit.close("a")
    assert audit.open("a", 3, 2) == "" and audit.streams == 3 and audit.opened == 4


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"max_sessions": 0}, "max_sessions must be an integer >= 1, got 0"),
        ({"max_width": 65}, "max_width must be an integer from 1 to 64, got 65"),
        ({"max_depth": 65}, "max_depth must be an integer from 1 to 64, got 65"),
        ({"num_pages": -1}, "num_pages must be an integer >= 0, got -1"),
        ({"lease_s": float("nan")}, "lease_s must be a finite number above 0, got nan"),
        ({"dtype": "f16"}, "dtype must be one of auto, f32, bf16, got 'f16'"),
        ({"tls_cert": "a"}, "tls_cert and tls_key must be given together"),
        ({"tls_client_ca": "a"}, "tls_client_ca needs tls_cert and tls_key"),
        ({"http": "nonsense"}, "http must be host:port"),
    ],
)
def test_settings_that_cannot_be(changed: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as raised:
        DraftServiceSettings(**changed)
    assert message in str(raised.value)


# ---- certificates ----


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem; server.pem for 127.0.0.1, and one.pem, two.pem, serve.pem and serve-eu.pem of targets, signed by it;
    stranger.pem, by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ca", "stranger"):
        openssl(folder, "req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
                "-days", "2")  # fmt: skip
    for name, extension in (
        ("server", "subjectAltName=IP:127.0.0.1"),
        ("one", "subjectAltName=DNS:one.test"),
        ("two", "subjectAltName=DNS:two.test"),
        ("serve", "subjectAltName=URI:spiffe://corp/serve"),
        ("serve-eu", "subjectAltName=URI:spiffe://corp/serve/eu"),
    ):
        openssl(folder, "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "extensions").write_text(extension + "\n")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-days", "2", "-extfile", "extensions")  # fmt: skip
    return folder


def credentials(files: Path, name: str | None) -> grpc.ChannelCredentials:
    pair = (None, None) if name is None else tuple((files / f"{name}.{kind}").read_bytes() for kind in ("key", "pem"))
    return grpc.ssl_channel_credentials((files / "ca.pem").read_bytes(), *pair)


def test_with_an_authority_only_its_targets_get_in_and_are_told_apart(files: Path):
    tls = {name: str(files / file) for name, file in (
        ("tls_cert", "server.pem"), ("tls_key", "server.key"), ("tls_client_ca", "ca.pem"))}  # fmt: skip
    with toy_service(**tls) as service:
        for name in (None, "stranger"):
            target = Target(service.port, credentials=credentials(files, name))
            target.send(hello("a"))
            with pytest.raises(grpc.RpcError) as raised:
                target.receive()
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
            target.close()
        with (
            service.target("a", credentials=credentials(files, "one")),
            service.target("a", credentials=credentials(files, "two")),
        ):
            assert service.core.targets == ["certificate-one.test/a", "certificate-two.test/a"]
        with (
            service.target("eu/a", credentials=credentials(files, "serve")),
            service.target("a", credentials=credentials(files, "serve-eu")),
        ):
            named = [target_id for target_id in service.core.targets if "spiffe" in target_id]
            assert len(named) == 2, "a slash in a certificate's name ends no identity"
        plain = Target(service.port)
        plain.send(hello("a"))
        assert not [each for each in plain.rest() if isinstance(each, (Refused, Welcome))], "TLS is not optional"
        plain.close()


def test_wrong_certificates_are_told_before_the_port_opens(files: Path):
    def check(**changed: str) -> str:
        names = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"} | changed
        with pytest.raises(ConfigError) as raised:
            check_secured(DraftServiceSettings(**{name: str(files / file) for name, file in names.items()}))
        return str(raised.value)

    assert "tls_cert and tls_key must be PEM files" in check(tls_key="one.key")
    assert "tls_cert must be a file that can be read" in check(tls_cert="absent.pem")
    assert "tls_client_ca must be a PEM file" in check(tls_client_ca="server.key")
