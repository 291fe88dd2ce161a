"""https over real sockets, with certificates made here; wrong files are told before a port opens."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from adaserve_jax.bench.engine import Ask, Due
from adaserve_jax.bench.http_load import UrlEngine
from adaserve_jax.errors import ConfigError
from adaserve_jax.http_client.settings import UrlSettings
from adaserve_jax.server import probe
from adaserve_jax.server.connection import tls_options
from adaserve_jax.server.serve import reload_certificate
from adaserve_jax.server.settings import ServerSettings
from adaserve_jax.types import SLO
from adaserve_jax.workloads.items import WorkloadItem

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates with")


def openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """ca.pem; server.pem for 127.0.0.1 and client.pem, both signed by it; a key under a passphrase; another key."""
    folder = tmp_path_factory.mktemp("tls")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl(folder, "req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2",
            "-addext", "keyUsage=critical,keyCertSign")  # fmt: skip
    for name, extension in (("server", "subjectAltName=IP:127.0.0.1"), ("client", "extendedKeyUsage=clientAuth")):
        openssl(folder, "req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "extensions").write_text(extension + "\n")
        openssl(folder, "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-days", "2", "-extfile", "extensions")  # fmt: skip
    openssl(folder, "ec", "-in", "server.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
    (folder / "junk.pem").write_text("no certificate")
    return folder


def settings(files: Path, cert: str = "server.pem", key: str = "server.key", ca: str | None = None) -> ServerSettings:
    return ServerSettings(
        tls_cert=str(files / cert), tls_key=str(files / key), tls_client_ca=str(files / ca) if ca else None, api_key="k"
    )


def trusting(files: Path, client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=files / "ca.pem")
    if client is not None:
        context.load_cert_chain(files / f"{client}.pem", files / f"{client}.key")
    return context


def ask(server, context: ssl.SSLContext) -> httpx.Response:
    url = server.url.replace("http://", "https://")
    with httpx.Client(base_url=url, verify=context, headers={"authorization": "Bearer k"}, timeout=10) as client:
        return client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3, "stream": True})


def test_requests_are_served_over_https_and_nothing_else(files, start_server):
    with start_server(settings(files)) as server:
        answer = ask(server, trusting(files))
        assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n")
        with pytest.raises(httpx.TransportError):
            server.http.get("/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            ask(server, ssl.create_default_context())
        for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
            context = trusting(files)
            context.minimum_version = context.maximum_version = version
            assert ask(server, context).status_code == 200
        assert handshake(server, files, "ECDHE-ECDSA-AES128-SHA256") is None, (
            "no ciphers without authentication of data"
        )
        assert handshake(server, files, "ECDHE-ECDSA-AES128-GCM-SHA256") == "TLSv1.2"


def handshake(server, files: Path, ciphers: str) -> str | None:
    context = trusting(files)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(ciphers)
    port = int(server.url.rsplit(":", 1)[1])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            return connection.version()
    except ssl.SSLError:
        return None


def test_with_a_client_ca_only_its_certificates_get_through(files, start_server):
    with start_server(settings(files, ca="ca.pem")) as server:
        assert ask(server, trusting(files, "client")).status_code == 200
        with pytest.raises(httpx.TransportError):
            ask(server, trusting(files))


def test_the_health_check_of_containers_may_have_a_certificate_too(files, start_server, monkeypatch):
    with start_server(settings(files, ca="ca.pem")) as server:
        variables = {"PORT": server.url.rsplit(":", 1)[1], "TLS_CERT": "there", "PROBE_KEY": "k", "HOST": "0.0.0.0"}
        for name, value in variables.items():
            monkeypatch.setenv(f"ADASERVE_{name}", value)
        monkeypatch.setattr("sys.argv", ["probe", "/ready"])
        with pytest.raises(SystemExit, match="/ready of port"):
            probe.main()
        monkeypatch.setenv("ADASERVE_PROBE_TLS_CERT", str(files / "client.pem"))
        monkeypatch.setenv("ADASERVE_PROBE_TLS_KEY", str(files / "client.key"))
        with pytest.raises(SystemExit) as ended:
            probe.main()
        assert ended.value.code is None


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"cert": "nowhere.pem"}, r"tls_cert must be a file that can be read, got \S+nowhere.pem: No such file"),
        ({"key": "nowhere.key"}, r"tls_key must be a file that can be read"),
        ({"cert": "junk.pem"}, r"PEM files of a certificate and its own private key, .* got \S+junk.pem and \S+: \S+"),
        ({"key": "client.key"}, r"got \S+server.pem and \S+client.key: key values mismatch"),
        (
            {"key": "locked.key"},
            r"without a passphrase, got \S+server.pem and \S+locked.key: the key is under a passph",
        ),
        ({"ca": "junk.pem"}, r"tls_client_ca must be a PEM file of certificates, got \S+junk.pem"),
    ],
)
def test_wrong_files_are_told_by_name(files, names, text):
    with pytest.raises(ConfigError, match=text):
        tls_options(settings(files, **names))


def test_without_a_certificate_there_is_no_tls():
    assert tls_options(ServerSettings()) == {}


def test_a_new_certificate_is_taken_whole_or_not_at_all(files, tmp_path, caplog):
    for name in ("server.pem", "server.key"):
        shutil.copy(files / name, tmp_path / name)
    given = settings(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(given.tls_cert, given.tls_key)

    def shown() -> bytes:
        """The certificate of a handshake in memory."""
        client, server = (ssl.MemoryBIO(), ssl.MemoryBIO()), (ssl.MemoryBIO(), ssl.MemoryBIO())
        asking = trusting(files)
        asking.check_hostname = False
        asking.verify_mode = ssl.CERT_NONE
        ends = asking.wrap_bio(*client), context.wrap_bio(*server, server_side=True)
        for _ in range(4):
            for end in ends:
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            server[0].write(client[1].read())
            client[0].write(server[1].read())
        return ends[0].getpeercert(binary_form=True)

    first = shown()
    shutil.copy(files / "client.pem", tmp_path / "server.pem")  # the key of another
    reload_certificate(context, given)
    assert shown() == first and "the certificate is as before: tls_cert and tls_key must be" in caplog.text
    shutil.copy(files / "client.key", tmp_path / "server.key")
    reload_certificate(context, given)
    assert shown() == ssl.PEM_cert_to_DER_cert((files / "client.pem").read_text()) != first


@pytest.mark.slow
def test_a_bench_measures_it_and_checks_its_certificate(files, start_server, monkeypatch):
    with start_server(settings(files)) as server:
        url = UrlSettings(server.url.replace("http://", "https://"), api_key="k", baseline_s=0.01)
        with pytest.raises(ConfigError, match="certificate verify failed"):
            UrlEngine(url)
        monkeypatch.setenv("SSL_CERT_FILE", str(files / "ca.pem"))
        engine = UrlEngine(url)
        item = WorkloadItem("abc", (), 7, "chat", SLO(), 0.0, 0, None)
        loop = engine.drive([Due(0.0, engine.prepare(Ask("r", item, 0, SLO(), "", 7)))], drain_s=10.0)
        engine.close()
    assert [len(probe.token_times_s) for probe in loop.probes] == [7]
