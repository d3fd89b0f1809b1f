"""Names of container images, always with the registry they come from.

Podman completes a short name (``python:3.12``) by asking at a terminal, or by trying one registry after the other; what
it comes to depends on the machine. Tasks name their image whole, so that it is the same one everywhere.
"""

from __future__ import annotations

import re

from palaestra.envs.errors import UsageError

LOCAL = "localhost/"
"""Images of this machine, which no registry has."""
_HOST = r"(?:localhost|(?:[A-Za-z0-9-]+\.)+[A-Za-z0-9-]+|[A-Za-z0-9-]+(?=:[0-9])|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}"
_FULL = re.compile(rf"(?P<path>{_HOST}(?:/{_PART})+)(?::(?P<tag>{_TAG}))?(?P<digest>@{_DIGEST})?")
_SHORT = re.compile(rf"(?P<path>{_PART}(?:/{_PART})*)(?P<rest>(?::{_TAG})?(?:@{_DIGEST})?)")


def full_image_name(name: str) -> str:
    """The name with its tag (``latest`` where it has neither tag nor digest).

    Raises ``UsageError`` for what is no name, and for one without a registry, naming the full form.

    >>> full_image_name("docker.io/library/python")
    'docker.io/library/python:latest'
    """
    if match := _FULL.fullmatch(name):
        if match["digest"]:  # Podman takes no name with both; the digest says which image it is
            return match["path"] + match["digest"]
        return f"{match['path']}:{match['tag'] or 'latest'}"
    if match := _SHORT.fullmatch(name):
        path = match["path"] if "/" in match["path"] else f"library/{match['path']}"
        local = f"localhost/{match['path']}{match['rest']}"
        raise UsageError(
            f"image {name!r} does not say which registry it is from; write it whole, "
            f"like 'docker.io/{path}{match['rest']}' (or {local!r} for one of this machine)"
        )
    raise UsageError(
        f"{name!r} is not the name of an image; write registry/path:tag in lower case, "
        "like 'docker.io/library/python:3.12-slim', or registry/path@sha256:DIGEST"
    )


def is_local(name: str) -> bool:
    """Whether the image can only be on this machine."""
    return name.startswith(LOCAL)
