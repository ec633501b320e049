"""Certificates: one authority per cluster, one identity per component."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from devcluster.network import Network

_VALIDITY = datetime.timedelta(days=3650)
_CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Identity:
    """A leaf certificate: who it names and where it may serve."""

    file: str
    common_name: str
    organization: str = ""
    dns_names: tuple[str, ...] = ()
    addresses: tuple[IPv4Address, ...] = ()


def identities(network: Network, node_name: str) -> tuple[Identity, ...]:
    """Every leaf certificate of a cluster. Names are those that Kubernetes' built-in roles expect."""
    loopback = IPv4Address("127.0.0.1")
    return (
        Identity(
            "apiserver",
            "kube-apiserver",
            dns_names=(
                "localhost",
                "kubernetes",
                "kubernetes.default",
                "kubernetes.default.svc",
                "kubernetes.default.svc.cluster.local",
            ),
            addresses=(loopback, network.node, network.kubernetes_service),
        ),
        Identity("kubelet-server", node_name, dns_names=(node_name,), addresses=(loopback, network.node)),
        Identity("admin", "devcluster-admin", "system:masters"),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("proxy", "system:kube-proxy"),
        Identity("coredns", "system:coredns"),
        Identity("kwok", "devcluster:kwok"),
        Identity("kubelet", f"system:node:{node_name}", "system:nodes"),
        Identity("apiserver-kubelet", "devcluster:apiserver"),
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(pem)


def _write_certificate(path: Path, certificate: x509.Certificate) -> None:
    path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def _name(identity: Identity) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, identity.common_name)]
    if identity.organization:
        attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, identity.organization))
    return x509.Name(attributes)


class _Authority:
    def __init__(self, common_name: str, now: datetime.datetime) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self._now = now
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])
        key_id = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key())
        self.certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _CLOCK_SKEW)
            .not_valid_after(now + _VALIDITY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    key_cert_sign=True,
                    crl_sign=True,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
            .add_extension(key_id, critical=False)
            .sign(self.key, hashes.SHA256())
        )

    def issue(self, directory: Path, identity: Identity) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            x509.CertificateBuilder()
            .subject_name(_name(identity))
            .issuer_name(self.certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - _CLOCK_SKEW)
            .not_valid_after(self._now + _VALIDITY)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in identity.dns_names]
        alternatives += [x509.IPAddress(address) for address in identity.addresses]
        usage = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if alternatives:
            usage = [ExtendedKeyUsageOID.SERVER_AUTH]
            builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        _write_key(directory / f"{identity.file}.key", key)
        _write_certificate(directory / f"{identity.file}.crt", builder.sign(self.key, hashes.SHA256()))


def write_all(directory: Path, leaves: Sequence[Identity], now: datetime.datetime) -> None:
    """Write a new authority, a front-proxy authority, `leaves` and the service-account key into `directory`.

    Keys are readable by the owner only. `now` is timezone-aware; certificates are valid for ten years from it.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _Authority("devcluster-ca", now)
    _write_key(directory / "ca.key", authority.key)
    for leaf in leaves:
        authority.issue(directory, leaf)
    front_proxy = _Authority("devcluster-front-proxy-ca", now)
    front_proxy.issue(directory, Identity("front-proxy-client", "front-proxy-client"))
    _write_certificate(directory / "front-proxy-ca.crt", front_proxy.certificate)
    service_account = ec.generate_private_key(ec.SECP256R1())
    _write_key(directory / "service-account.key", service_account)
    (directory / "service-account.pub").write_bytes(
        service_account.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    # Written last: its presence says that the directory is complete.
    _write_certificate(directory / "ca.crt", authority.certificate)


def complete(directory: Path) -> bool:
    """Whether `write_all` finished in `directory`."""
    return (directory / "ca.crt").is_file()
