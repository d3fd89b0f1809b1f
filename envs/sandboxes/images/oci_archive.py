"""Packs one layer as an OCI image archive (OCI image-spec 1.0), which ``podman load`` takes.

``podman import`` stamps an image with the time, so that the same files give another digest every time; here every
byte follows from the layer and the labels.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_CREATED = "1970-01-01T00:00:00Z"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def host_architecture() -> str:
    """This machine's architecture, as images name it."""
    machine = platform.machine()
    return _ARCHITECTURES.get(machine, machine)


def write_archive(
    target: Path, layer: Path, name: str, *, environment: Mapping[str, str], labels: Mapping[str, str]
) -> str:
    """Write an image of one uncompressed layer (a tar), and return its digest (``sha256:…``)."""
    with open(layer, "rb") as file:
        layer_digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    config = _json(
        {
            "created": _CREATED,
            "architecture": host_architecture(),
            "os": "linux",
            "config": {"Env": [f"{key}={value}" for key, value in environment.items()], "Labels": dict(labels)},
            "rootfs": {"type": "layers", "diff_ids": [layer_digest]},
            "history": [{"created": _CREATED, "created_by": "palaestra"}],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": _descriptor(_CONFIG, config),
            "layers": [{"mediaType": _LAYER, "digest": layer_digest, "size": layer.stat().st_size}],
        }
    )
    entry = {**_descriptor(_MANIFEST, manifest), "annotations": {"org.opencontainers.image.ref.name": name}}
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
        _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
        _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [entry]}))
        for blob in (config, manifest):
            _add(archive, _blob_name(_digest(blob)), blob)
        with open(layer, "rb") as file:
            information = tarfile.TarInfo(_blob_name(layer_digest))
            information.size = layer.stat().st_size
            archive.addfile(information, file)
    return _digest(manifest)


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _descriptor(media_type: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    information = tarfile.TarInfo(name)
    information.size = len(data)
    archive.addfile(information, io.BytesIO(data))
