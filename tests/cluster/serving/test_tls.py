"""Certificates and keys are checked before a server starts, and its own clients trust its one."""

import ssl
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import Thread

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from cluster.serving.control import RunningServer, announced, find_server
from cluster.serving.served import Operation
from cluster.serving.tls import Tls, meet, own_certificate, read_tls, trusting
from specdec_core.base.errors import UserError


def certificate(folder, password=None, authority=None, valid=(-1, 1), key=None):
    """A new one for 127.0.0.1, and its key, `valid` between these days from now: signed by itself,
    or by `authority`, whose certificate then follows it in its file."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, folder.name)])
    issuer, signing, chain = name, key, b""
    if authority is not None:
        chain = authority.certificate.read_bytes()
        issuer = x509.load_pem_x509_certificate(chain).subject
        loaded = serialization.load_pem_private_key(authority.key.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signing = loaded
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(issuer, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now + timedelta(days=valid[0]))
        .not_valid_after(now + timedelta(days=valid[1]))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .sign(signing, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    hidden = serialization.NoEncryption()
    pem, kept = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    if password is not None:
        hidden = serialization.BestAvailableEncryption(password)
    (folder / "cert.pem").write_bytes(signed.public_bytes(pem) + chain)
    (folder / "key.pem").write_bytes(key.private_bytes(pem, kept, hidden))
    return Tls(folder / "cert.pem", folder / "key.pem")


def test_what_cannot_be_used_is_said_by_its_option(tmp_path):
    good, other = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    rsa_key = certificate(tmp_path / "rsa", key=rsa.generate_private_key(65537, 2048)).key
    assert read_tls(None, None) is None
    assert read_tls(*good) == good
    for pair, said in (
        ((good.certificate, None), "--tls-cert needs --tls-key"),
        ((None, good.key), "--tls-key needs --tls-cert"),
        ((tmp_path / "no.pem", good.key), "--tls-cert .*no.pem: cannot be read: no such file"),
        ((good.certificate, tmp_path), "--tls-key .*: cannot be read: is a directory"),
        ((good.certificate, other.key), "not the key of"),
        ((good.certificate, rsa_key), "not the key of"),
        (certificate(tmp_path / "old", valid=(-2, -1)), "--tls-cert .*: certificate has expired"),
        (
            certificate(tmp_path / "new", valid=(1, 2)),
            "--tls-cert .*: certificate is not yet valid",
        ),
        ((good.key, good.certificate), "expected a certificate and its private key .*, as PEM$"),
        (certificate(tmp_path / "c", b"secret"), "without a password"),
    ):
        with pytest.raises(UserError, match=said):
            read_tls(*pair)


def test_a_servers_own_clients_trust_its_certificate_and_no_other(tmp_path):
    good, other = certificate(tmp_path / "a"), certificate(tmp_path / "b")
    for known, accepted in ((good, True), (other, False)):
        context = trusting(own_certificate(known.certificate))
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(*good)
        assert _accepted(context, server) == accepted


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def test_a_server_whose_certificate_has_expired_can_still_be_operated_and_no_other(tmp_path):
    old, other = (certificate(tmp_path / name, valid=(-2, -1)) for name in ("old", "other"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*old)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{server.server_port}"

    def known_by(its):
        own = own_certificate(its.certificate)
        return RunningServer(url=url, token="secret", certificate=own)

    assert known_by(old).health() == {}
    with pytest.raises(UserError, match="no server answers there"):
        known_by(other).health()
    server.shutdown()
    server.server_close()


def test_a_chain_trusts_the_server_and_nothing_else_that_its_authority_vouches_for(tmp_path):
    authority = certificate(tmp_path / "authority")
    ours, theirs = (certificate(tmp_path / n, authority=authority) for n in ("ours", "theirs"))
    context = trusting(own_certificate(ours.certificate))
    for shown, accepted in ((ours, True), (theirs, False), (authority, False)):
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(*shown)
        assert _accepted(context, server) == accepted
    with pytest.raises(UserError, match=r"key\.pem: expected a certificate"):
        own_certificate(ours.key)
    with pytest.raises(UserError, match=r"moved\.pem: cannot be read: no such file"):
        own_certificate(tmp_path / "moved.pem")


def test_a_certificate_that_is_renewed_on_disk_is_still_that_of_the_running_server(
    bare_home, tiny_spec, tmp_path
):
    tls = certificate(tmp_path / "tls")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*tls)
    with announced("https://127.0.0.1:8123", tiny_spec, Operation("secret"), tls.certificate):
        certificate(tmp_path / "tls")
        assert _accepted(trusting(find_server().certificate), server)


def _accepted(client, server):
    try:
        meet(client, server)
    except ssl.SSLCertVerificationError:
        return False
    return True
