"""Certificates for tests: a private authority and its certificates."""

from __future__ import annotations

import ipaddress
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


class Authority:
    """Issues certificates into ``directory``; ``path`` is its own certificate, which clients trust."""

    def __init__(self, directory: Path, name: str = "tests") -> None:
        self.directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {name}")])
        certificate = (
            _builder(self._name, self._name, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = directory / f"{name}-authority.pem"
        self.path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, host: str, *, expired: bool = False, self_signed: bool = False) -> tuple[Path, Path]:
        """Return the files of a certificate for ``host`` (a name or an address), and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        try:
            alternative: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            alternative = x509.DNSName(host)
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        certificate = (
            _builder(name, name if self_signed else self._name, key, timedelta(days=-1 if expired else 1))
            .add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .sign(key if self_signed else self._key, hashes.SHA256())
        )
        paths = self.directory / f"{host}.pem", self.directory / f"{host}.key"
        paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, *form))
        paths[1].chmod(0o600)
        return paths

    def peer_settings(self, folder: Path, host: str = "127.0.0.1") -> dict[str, Path]:
        """Return the settings of a node with a certificate for ``host``, whose files are in the new ``folder``."""
        folder.mkdir()
        for path, name in zip(self.issue(host), ("tls.crt", "tls.key"), strict=True):
            path.rename(folder / name)
        shutil.copy(self.path, folder / "ca.crt")
        return {"peer_tls_dir": folder}

    def server_side(self, host: str = "127.0.0.1", **issued: bool) -> ssl.SSLContext:
        """Return the TLS context of a server for ``host``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(host, **issued))
        return context


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid: timedelta = timedelta(days=1)
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=2))
        .not_valid_after(now + valid)
    )
