"""Fetching an image from its registry, within a deadline; and what to do when the registry refuses."""

from __future__ import annotations

import os
from collections.abc import Callable

from palaestra.envs.errors import ImageUnavailable, UsageError
from palaestra.envs.sandboxes.podman.command import PodmanFailed, run_podman

TIMEOUT_VARIABLE = "PALAESTRA_PULL_TIMEOUT_S"
_DEFAULT_TIMEOUT_S = 900.0
_CURES = (
    ("manifest unknown", "The registry has no such tag: look it up, and name one that exists"),
    ("name unknown", "The registry has no such repository: check the spelling"),
    ("repository not found", "The registry has no such repository: check the spelling"),
    ("toomanyrequests", "The registry limits anonymous pulls: run `podman login` for it, or wait"),
    ("unauthorized", "The registry wants you to log in, or has no such image: run `podman login` for it"),
    ("authentication required", "The registry wants you to log in: run `podman login` for it"),
    ("denied", "The registry does not allow it, or has no such image: run `podman login` for it"),
    ("x509", "The registry's certificate is not trusted here: add its authority to /etc/containers/certs.d"),
    ("server gave HTTP response", "The registry speaks plain HTTP: mark it `insecure = true` in registries.conf"),
    ("no space left", "The disk is full: run `palaestra image rm --unused` or `podman image prune`"),
    ("did not end within", f"Allow more time in the environment variable {TIMEOUT_VARIABLE}"),
)
_UNREACHABLE = ("no such host", "connection refused", "network is unreachable", "i/o timeout", "dial tcp", "EOF")


async def pull(name: str, on_line: Callable[[str], None]) -> None:
    """``podman pull``; each line of its progress is handed on. Raises ``ImageUnavailable`` with the cure."""
    timeout_s = setting(TIMEOUT_VARIABLE, _DEFAULT_TIMEOUT_S)
    try:
        await run_podman("pull", name, timeout_s=timeout_s, on_line=on_line)
    except PodmanFailed as error:
        known = pull_cure(f"{error}\n{error.output}")
        raise ImageUnavailable(f"the image {name} could not be pulled: {error}{known}") from error


def pull_cure(output: str) -> str:
    """What to do about a registry's refusal, where it is a known one."""
    for sign, advice in _CURES:
        if sign in output:
            return f"\n{advice}"
    if any(sign in output for sign in _UNREACHABLE):
        return (
            "\nThe registry cannot be reached from here: check the network and HTTPS_PROXY, "
            "or load the image from a file (`podman load -i FILE`) and use pull='never'"
        )
    return ""


def setting(variable: str, default: float) -> float:
    """A number, not negative, from the environment. Raises ``UsageError``."""
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise UsageError(f"the environment variable {variable} must be a number of at least 0, not {text!r}")
    return value
