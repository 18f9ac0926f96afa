"""Certificates of registered versions."""

from __future__ import annotations

import json
import logging
from tempfile import TemporaryDirectory

from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion

from dashboards.store import artifact, connect, no_store
from specdec_core.base.errors import UserError
from specdec_core.base.files import write_atomically
from specdec_core.base.names import digest_name
from specdec_core.config import Configuration, PairSpec, parse_json
from specdec_core.evidence.certificate.certificate import (
    Certificate,
    certificate_path,
    find_certificate,
)
from specdec_core.models.fingerprints import TARGET
from specdec_core.servers.table import SERVERS

logger = logging.getLogger(__name__)

CERTIFIED = "certified"  # tag of a version: true or false
CERTIFICATE = "certificate"  # tag of a certified version: the certificate's id
ARTIFACT = "certificate/certificate.json"  # of the version's run
# Of the version's run: digests of what it was registered with, where all was there.
WEIGHTS = "champion/weights.json"


def attach(certificate: Certificate) -> list[str]:
    """Give a certificate to all registered versions of its configuration and its weights; returns
    them in words. Logs a warning for versions of other weights."""
    if no_store():
        return []
    client, wanted = connect(), certificate.configuration.id
    server = None if certificate.server is None else certificate.server.name
    known = [
        version
        for name in dict.fromkeys(model_of(certificate.pair.name, each) for each in (None, server))
        for version in client.search_model_versions(f"name = '{name}'")
        if version.tags.get("config_id") == wanted
    ]
    versions = [version for version in known if _of_its_weights(client, version, certificate)]
    for version in versions:
        _attach(client, version, certificate)
    for other in (version for version in known if version not in versions):
        logger.warning(
            "version %s of %s was registered with other weights than are certified",
            *(other.version, other.name),
        )
    return [f"version {version.version} of {version.name}" for version in versions]


def model_of(pair: str, server: str | None = None) -> str:
    """The registered model of a pair, in this library's engine or in another server."""
    return pair if server is None else f"{pair}-{server}"


def tag_version(
    client: MlflowClient,
    version: ModelVersion,
    pair: PairSpec,
    configuration: Configuration,
    server: str | None,
) -> None:
    """Add the workspace's certificates to a version, and say whether one is for `server`, in which
    its configuration is served; None: this library's engine. A version that has one keeps it,
    unless it is now registered with other weights."""
    for each in (None, *SERVERS):
        certificate = find_certificate(pair, configuration, each)
        if certificate is not None:
            _attach(client, version, certificate)
        elif (each == server or _has_tag(version, each)) and not _certified(client, version, each):
            place, end = (version.name, version.version), _end(each)
            client.set_model_version_tag(*place, CERTIFIED + end, "false")
            if CERTIFICATE + end in version.tags:
                client.delete_model_version_tag(*place, CERTIFICATE + end)


def fetch(
    client: MlflowClient, version: ModelVersion, pair: PairSpec, configuration: Configuration
) -> None:
    """Copy a certified version's certificates, for this engine and for servers, into the workspace,
    unless that has a certificate for the weights that are here."""
    for tag, value in version.tags.items():
        name, _, key = tag.partition(".")
        server = key or None
        if name != CERTIFIED or value != "true":
            continue
        try:
            if find_certificate(pair, configuration, server) is not None:
                continue
        except UserError:  # a broken file, or no weights yet to hold it against: its reader says so
            continue
        with TemporaryDirectory() as scratch:
            file = artifact(client, version, _artifact(server), scratch)
            write_atomically(certificate_path(pair, configuration, server), file.read_text())


def _has_tag(version: ModelVersion, server: str | None) -> bool:
    """Whether a version is tagged as certified in the server of a key."""
    return bool(version.tags.get(CERTIFIED + _end(server)) == "true")


def _certified(client: MlflowClient, version: ModelVersion, server: str | None) -> bool:
    """Whether a version has a certificate of the weights that it is registered with."""
    if not _has_tag(version, server):
        return False
    try:
        with TemporaryDirectory() as scratch:
            file = artifact(client, version, _artifact(server), scratch)
            found = parse_json(Certificate, file.read_bytes(), _artifact(server))
        return _of_its_weights(client, version, found)
    except UserError:  # what cannot be read here says nothing against it
        return True


def _of_its_weights(client: MlflowClient, version: ModelVersion, certificate: Certificate) -> bool:
    """Whether a certificate is of the weights that a version was registered with, as far as both
    are known: of a server's target perhaps only the name is."""
    folder, run = WEIGHTS.partition("/")[0], version.run_id
    if run is None or WEIGHTS not in [file.path for file in client.list_artifacts(run, folder)]:
        return True
    with TemporaryDirectory() as scratch:
        registered = json.loads(artifact(client, version, WEIGHTS, scratch).read_text())
    certified = dict(certificate.fingerprints)
    by_name = digest_name(certificate.pair.target)
    if certificate.server is not None and certified.get(TARGET) == by_name:
        del certified[TARGET]
    return all(registered.get(name, digest) == digest for name, digest in certified.items())


def _artifact(server: str | None) -> str:
    """The file of a version's run, for the server of a key."""
    return ARTIFACT if server is None else f"certificate/{server}.json"


def _end(server: str | None) -> str:
    """The end of the tags of a server's certificate."""
    return "" if server is None else f".{server}"


def _attach(client: MlflowClient, version: ModelVersion, certificate: Certificate) -> None:
    """Add the certificate to a version. A server's certificate says nothing of this library's
    engine: its artifact and tags have the server's name."""
    assert version.run_id  # every version of ours is a run's
    server = None if certificate.server is None else certificate.server.key
    end = _end(server)
    client.log_text(version.run_id, certificate.model_dump_json(indent=1), _artifact(server))
    for tag, value in ((f"{CERTIFIED}{end}", "true"), (f"{CERTIFICATE}{end}", certificate.id)):
        client.set_model_version_tag(version.name, version.version, tag, value)
