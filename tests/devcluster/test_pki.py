"""Certificates, checked as a TLS peer would."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from cryptography.x509.verification import PolicyBuilder, Store

from devcluster import pki
from devcluster.network import Network

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pki")
    pki.write_all(directory, pki.identities(Network(2), "npu-node-0"), NOW)
    return directory


def certificate(directory: Path, name: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / f"{name}.crt").read_bytes())


def authority(directory: Path) -> Store:
    return Store([certificate(directory, "ca")])


@pytest.mark.parametrize("name", ["10.133.0.1", "10.132.255.254", "127.0.0.1"])
def test_the_api_server_may_serve_its_addresses(written: Path, name: str) -> None:
    names = certificate(written, "apiserver").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert name in {str(address) for address in names.get_values_for_type(x509.IPAddress)}
    verifier = PolicyBuilder().store(authority(written)).time(NOW).build_server_verifier(x509.DNSName("kubernetes.default.svc"))
    assert verifier.verify(certificate(written, "apiserver"), [])


@pytest.mark.parametrize(
    ("file", "common_name", "organization"),
    [
        ("admin", "devcluster-admin", "system:masters"),
        ("kubelet", "system:node:npu-node-0", "system:nodes"),
        ("scheduler", "system:kube-scheduler", None),
        ("coredns", "system:coredns", None),
    ],
)
def test_client_certificates_carry_the_names_that_roles_are_bound_to(
    written: Path, file: str, common_name: str, organization: str | None
) -> None:
    found = certificate(written, file)
    assert [a.value for a in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [common_name]
    assert [a.value for a in found.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ([organization] if organization else [])
    assert found.issuer == certificate(written, "ca").subject


def test_a_client_certificate_cannot_serve(written: Path) -> None:
    usage = certificate(written, "coredns").extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_keys_belong_to_their_certificates_and_only_the_owner_reads_them(written: Path) -> None:
    for key in written.glob("*.key"):
        assert key.stat().st_mode & 0o077 == 0
        if (pair := key.with_suffix(".crt")).exists():
            ssl.create_default_context().load_cert_chain(pair, key)
    assert written.stat().st_mode & 0o077 == 0 or written.parent.stat().st_mode & 0o077 == 0


def test_certificates_outlive_a_laptops_sleep_and_are_valid_at_once(written: Path) -> None:
    for file in written.glob("*.crt"):
        found = x509.load_pem_x509_certificate(file.read_bytes())
        assert found.not_valid_before_utc < NOW < NOW + datetime.timedelta(days=3000) < found.not_valid_after_utc


def test_an_interrupted_directory_counts_as_incomplete(tmp_path: Path) -> None:
    assert not pki.complete(tmp_path)
    (tmp_path / "ca.key").touch()
    assert not pki.complete(tmp_path)
