"""The images that hosts start from: this machine's own Python, or what a task names, pulled and kept in a budget.

An image is found once a backend and claimed until the backend closes; what starts from it is its id, so that a tag that
moves meanwhile changes nothing. Images that Palaestra pulled itself are removed, least recently used first, when they
take more than ``PALAESTRA_IMAGE_BUDGET_GIB``, unless someone claims them or a container uses them. No other image is
ever removed, but for defaults made from an interpreter that changed since.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.envs.errors import ImageUnavailable, UsageError
from palaestra.envs.sandboxes.claims import Claim, unclaimed
from palaestra.envs.sandboxes.image import PYTHON_LABEL, REPOSITORY, HostImage, host_image
from palaestra.envs.sandboxes.image_names import LOCAL, full_image_name
from palaestra.envs.sandboxes.image_records import ImageRecords
from palaestra.envs.sandboxes.oci_archive import host_architecture
from palaestra.envs.sandboxes.podman_cli import PodmanFailed, run_podman
from palaestra.envs.sandboxes.podman_service import PodmanService
from palaestra.envs.sandboxes.protocol import PullPolicy
from palaestra.envs.sandboxes.supervisor.interpreter import OWN_INTERPRETER

BUDGET_VARIABLE = "PALAESTRA_IMAGE_BUDGET_GIB"
PULL_VARIABLE = "PALAESTRA_PULL_TIMEOUT_S"
_DEFAULT_BUDGET_GIB = 50.0
_DEFAULT_PULL_S = 900.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Image:
    """An image in the user's storage. While it is claimed, no Palaestra removes it."""

    image_id: str
    digest: str
    """``sha256:…`` of its manifest: the same everywhere."""
    name: str
    size_bytes: int
    claim: Claim
    interpreter: str = OWN_INTERPRETER
    """The program in its containers that runs the supervisor."""


async def default_image(service: PodmanService) -> Image:
    """The image of this machine's own Python, made when it is not there yet, without any registry."""
    host = await asyncio.to_thread(host_image)
    image = await _claimed(service, host.tag) or await build_default(service, host)
    await asyncio.to_thread(ImageRecords().used, image.image_id, image.name)
    return image


async def build_default(service: PodmanService, host: HostImage) -> Image:
    """Make it, whether it is there or not; the same files give the same digest. Those of before are removed."""
    with tempfile.TemporaryDirectory(prefix="palaestra-image-") as folder:
        archive = Path(folder, "image.tar")
        digest = await asyncio.to_thread(host.write_archive, archive)
        await service.call(lambda client: list(client.images.load(file_path=str(archive))))
    image = await _claimed(service, host.tag)
    if image is None or image.digest != digest:
        _release(image)
        raise ImageUnavailable(f"Podman loaded another image than {host.tag} {digest}: {image}")
    await _remove_older_defaults(service, host)
    return image


async def named_image(service: PodmanService, name: str, policy: PullPolicy) -> Image:
    """The image of that name, pulled as the policy says. Raises ``ImageUnavailable`` with the cure.

    ``"missing"`` pulls what is not there; ``"never"`` nothing; ``"always"`` asks the registry every time; ``"newer"``
    asks too, and goes on with what is there when the registry does not answer.
    """
    name = full_image_name(name)
    local = name.startswith(LOCAL)
    if local and policy in ("always", "newer"):
        raise UsageError(f"{name} is an image of this machine, with no registry to pull it from; use pull='missing'")
    image = await _claimed(service, name)
    if not local and (policy in ("always", "newer") or (image is None and policy == "missing")):
        image = await _refreshed(service, name, image, keep=policy == "newer")
    if image is None:
        where = "build or load it" if local else f"run `podman pull {name}` or use pull='missing'"
        raise ImageUnavailable(f"the image {name} is not on this machine: {where}")
    await asyncio.to_thread(ImageRecords().used, image.image_id, name)
    return image


async def _refreshed(service: PodmanService, name: str, before: Image | None, *, keep: bool) -> Image:
    """What the registry has under the name now. ``keep``: or what is here, when the registry does not answer."""
    try:
        _log.info("pulling the image %s", name)
        await pull(name, lambda line: _log.info("%s: %s", name, line))
        after = await _claimed(service, name)
        if after is None:
            raise ImageUnavailable(f"the image {name} was pulled and is gone again; does something else remove images?")
    except ImageUnavailable as error:
        if before is None or not keep:
            _release(before)
            raise
        _log.warning("going on with the %s that is here: %s", name, error)
        return before
    except BaseException:
        _release(before)
        raise
    _release(before)
    if before is None or before.image_id != after.image_id:
        await asyncio.to_thread(functools.partial(ImageRecords().used, after.image_id, name, pulled=True))
        await keep_within_budget(service)
    return after


def _release(image: Image | None) -> None:
    if image is not None:
        image.claim.release()


async def keep_within_budget(service: PodmanService) -> list[str]:
    """Remove what Palaestra pulled, least recently used first, until it fits; returns the names of what it removed."""
    budget_bytes = _setting(BUDGET_VARIABLE, _DEFAULT_BUDGET_GIB) * (1 << 30)
    records = ImageRecords()
    sizes = {each.id: each.attrs["Size"] for each in await service.call(_list_images)}
    ours = [record for record in await asyncio.to_thread(records.all) if record.pulled and record.image_id in sizes]
    total = sum(sizes[record.image_id] for record in ours)
    removed = []
    for record in ours:
        if total <= budget_bytes:
            break
        if await remove_image(service, record.image_id, record.name):
            _log.info("removed the image %s: the images that Palaestra pulled exceed their budget", record.name)
            total -= sizes[record.image_id]
            removed.append(record.name)
    if total > budget_bytes:
        _log.warning(
            "the images that Palaestra pulled take %.1f GiB, more than %s=%g, and all of them are in use",
            total / (1 << 30),
            BUDGET_VARIABLE,
            budget_bytes / (1 << 30),
        )
    return removed


async def remove_image(service: PodmanService, image_id: str, name: str) -> bool:
    """Remove an image, unless it is claimed, in use by a container, or has another name as well."""
    records = ImageRecords()

    def remove(client: Any) -> bool:
        from podman.errors import APIError

        found = [each for each in client.images.list() if each.id == image_id]
        if found and set(found[0].tags) - {name}:
            records.disown(image_id)
            return False
        try:
            if found:
                client.images.remove(image_id)
        except APIError as error:
            if error.response is not None and error.response.status_code in (404, 409):  # gone, or in use
                return bool(error.response.status_code == 404)
            raise
        records.forget(image_id)
        return True

    with unclaimed(_claim_name(image_id)) as free:
        return free and await service.call(remove)


async def pull(name: str, on_line: Callable[[str], None]) -> None:
    """``podman pull``, with a deadline. Raises ``ImageUnavailable`` with the cure."""
    timeout_s = _setting(PULL_VARIABLE, _DEFAULT_PULL_S)
    try:
        await run_podman("pull", name, timeout_s=timeout_s, on_line=on_line)
    except PodmanFailed as error:
        raise ImageUnavailable(f"the image {name} could not be pulled: {error}{pull_cure(str(error))}") from error


async def _claimed(service: PodmanService, name: str) -> Image | None:
    """The image that has the name now, claimed; None where there is none."""
    while (attributes := await service.call(lambda client: _find(client, name))) is not None:
        claim = await asyncio.to_thread(Claim, _claim_name(attributes["Id"]))
        try:
            again = await service.call(lambda client: _find(client, name))
        except BaseException:
            claim.release()
            raise
        if again is not None and again["Id"] == attributes["Id"]:  # else it was removed, or replaced, meanwhile
            try:
                return _image(again, name, claim)
            except BaseException:
                claim.release()
                raise
        claim.release()
    return None


def _image(attributes: dict[str, Any], name: str, claim: Claim) -> Image:
    architecture = attributes.get("Architecture") or host_architecture()
    if architecture != host_architecture():
        raise ImageUnavailable(
            f"the image {name} is for {architecture}, and this machine is {host_architecture()}; "
            f"remove it (podman rmi {name}) and pull the right one"
        )
    made_from = (attributes.get("Labels") or {}).get(PYTHON_LABEL)
    own = made_from if made_from and name.startswith(f"{REPOSITORY}:") else OWN_INTERPRETER
    return Image(attributes["Id"], attributes["Digest"], name, int(attributes["Size"]), claim, own)


def _find(client: Any, name: str) -> dict[str, Any] | None:
    from podman.errors import ImageNotFound

    try:
        attributes: dict[str, Any] = client.images.get(name).attrs
    except ImageNotFound:
        return None
    return attributes


def _list_images(client: Any) -> list[Any]:
    images: list[Any] = client.images.list()
    return images


def _claim_name(image_id: str) -> str:
    return f"image-{image_id.removeprefix('sha256:')}"


async def _remove_older_defaults(service: PodmanService, host: HostImage) -> None:
    def older(client: Any) -> list[tuple[str, str]]:
        found = [(each.id, tag, each.labels) for each in _list_images(client) for tag in each.tags]
        return [
            (image_id, tag)
            for image_id, tag, labels in found
            if tag.startswith(f"{REPOSITORY}:") and tag != host.tag and labels.get(PYTHON_LABEL) == host.interpreter
        ]

    for image_id, tag in await service.call(older):
        await remove_image(service, image_id, tag)


def _setting(variable: str, default: float) -> float:
    text = os.environ.get(variable, "")
    try:
        value = float(text or default)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise UsageError(f"the environment variable {variable} must be a number, not {text!r}")
    return value


_PULL_CURES = (
    ("manifest unknown", "the registry has no such tag; look it up, and name one that exists"),
    ("name unknown", "the registry has no such repository; check the spelling"),
    ("repository not found", "the registry has no such repository; check the spelling"),
    ("toomanyrequests", "the registry limits anonymous pulls; run `podman login` for it, or wait"),
    ("unauthorized", "the registry wants you to log in, or has no such image; run `podman login` for it"),
    ("authentication required", "the registry wants you to log in; run `podman login` for it"),
    ("denied", "the registry does not allow it, or has no such image; run `podman login` for it"),
    (
        "x509",
        "the registry's certificate is not trusted here; add its authority to /etc/containers/certs.d",
    ),
    ("server gave HTTP response", "the registry speaks plain HTTP; mark it `insecure = true` in registries.conf"),
    ("no space left", "the disk is full; run `palaestra image rm` or `podman image prune`"),
    ("did not end within", f"allow more time in the environment variable {PULL_VARIABLE}"),
)
_UNREACHABLE = ("no such host", "connection refused", "network is unreachable", "i/o timeout", "dial tcp", "EOF")


def pull_cure(output: str) -> str:
    """What to do about a registry's refusal, where it is a known one."""
    for sign, advice in _PULL_CURES:
        if sign in output:
            return f"\n{advice[0].upper()}{advice[1:]}"
    if any(sign in output for sign in _UNREACHABLE):
        return (
            "\nThe registry cannot be reached from here: check the network and HTTPS_PROXY, "
            "or load the image from a file (`podman load -i FILE`) and use pull='never'"
        )
    return ""
