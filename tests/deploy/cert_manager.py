"""The secrets that cert-manager makes of Certificate manifests, as files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Manifest = dict[str, Any]
USAGES = {"server auth": ExtendedKeyUsageOID.SERVER_AUTH, "client auth": ExtendedKeyUsageOID.CLIENT_AUTH}
ISSUED = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)


def make_secrets(certificates: list[Manifest], folder: Path) -> None:
    """For each certificate a folder named like its secret, with tls.crt, tls.key and ca.crt.

    The one with isCA signs itself and the others, for any issuer.
    """
    (ca_manifest,) = [certificate for certificate in certificates if certificate["spec"].get("isCA")]
    ca_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ca_manifest["spec"]["commonName"])])
    basic = x509.BasicConstraints(ca=True, path_length=None)
    ca = builder(name, name, ca_key, days=3650).add_extension(basic, critical=True).sign(ca_key, hashes.SHA256())
    for certificate in certificates:
        if certificate is not ca_manifest:
            key = ec.generate_private_key(ec.SECP256R1())
            issued = leaf(certificate["spec"], key, name).sign(ca_key, hashes.SHA256())
            write_secret(folder / certificate["spec"]["secretName"], issued, key, ca)


def leaf(spec: Manifest, key: ec.EllipticCurvePrivateKey, issuer: x509.Name) -> x509.CertificateBuilder:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(uri) for uri in spec.get("uris", [])]
    names += [x509.DNSName(name) for name in spec.get("dnsNames", [])]
    usages = [USAGES[usage] for usage in spec["usages"] if usage in USAGES]
    days = int(spec["duration"].removesuffix("h")) // 24
    return (
        builder(x509.Name([]), issuer, key, days=days)
        .add_extension(x509.SubjectAlternativeName(names), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )


def builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ISSUED)
        .not_valid_after(ISSUED + datetime.timedelta(days=days))
    )


def write_secret(folder: Path, issued: x509.Certificate, key: ec.EllipticCurvePrivateKey, ca: x509.Certificate) -> None:
    folder.mkdir()
    (folder / "tls.crt").write_bytes(issued.public_bytes(serialization.Encoding.PEM))
    (folder / "ca.crt").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
