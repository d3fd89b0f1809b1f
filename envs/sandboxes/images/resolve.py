"""The images that hosts start from: this machine's own Python, or what a task names.

An image is found once a backend and claimed until the backend closes; what starts from it is its id, so that a tag that
moves meanwhile changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palaestra.envs.errors import ImageUnavailable, UsageError
from palaestra.envs.sandboxes.images.claims import Claim
from palaestra.envs.sandboxes.images.host_image import PYTHON_LABEL, REPOSITORY, HostImage, host_image
from palaestra.envs.sandboxes.images.names import full_image_name, is_local
from palaestra.envs.sandboxes.images.oci_archive import host_architecture
from palaestra.envs.sandboxes.images.pull import pull
from palaestra.envs.sandboxes.images.records import ImageRecords
from palaestra.envs.sandboxes.images.store import claim_name, keep_within_budget, remove_older_defaults
from palaestra.envs.sandboxes.podman.service import PodmanService
from palaestra.envs.sandboxes.protocol import PullPolicy
from palaestra.envs.sandboxes.supervisor.interpreter import OWN_INTERPRETER

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
    image = await claimed(service, host.tag) or await build_default(service, host)
    with _kept(image):
        await asyncio.to_thread(ImageRecords().used, image.image_id, image.name)
    return image


async def build_default(service: PodmanService, host: HostImage) -> Image:
    """Make it, whether it is there or not; the same files give the same digest. Those of before are removed."""
    with tempfile.TemporaryDirectory(prefix="palaestra-image-") as folder:
        archive = Path(folder, "image.tar")
        digest = await asyncio.to_thread(host.write_archive, archive)
        await service.call(lambda client: list(client.images.load(file_path=str(archive))))
    image = await claimed(service, host.tag)
    if image is None or image.digest != digest:
        _release(image)
        raise ImageUnavailable(f"Podman loaded another image than {host.tag} {digest}: {image}")
    with _kept(image):
        await remove_older_defaults(service, tag=host.tag, interpreter=host.interpreter)
    return image


async def named_image(service: PodmanService, name: str, policy: PullPolicy) -> Image:
    """The image of that name, pulled as the policy says. Raises ``ImageUnavailable`` with the cure.

    ``"missing"`` pulls what is not there; ``"never"`` nothing; ``"always"`` asks the registry every time; ``"newer"``
    asks too, and goes on with what is there when the registry does not answer.
    """
    name = full_image_name(name)
    local = is_local(name)
    if local and policy in ("always", "newer"):
        raise UsageError(f"{name} is an image of this machine, with no registry to pull it from; use pull='missing'")
    image = await claimed(service, name)
    if not local and (policy in ("always", "newer") or (image is None and policy == "missing")):
        image = await _refreshed(service, name, image, keep=policy == "newer")
    if image is None:
        where = "build or load it" if local else f"run `podman pull {name}` or use pull='missing'"
        raise ImageUnavailable(f"the image {name} is not on this machine: {where}")
    with _kept(image):
        await asyncio.to_thread(ImageRecords().used, image.image_id, name)
    return image


async def _refreshed(service: PodmanService, name: str, before: Image | None, *, keep: bool) -> Image:
    """What the registry has under the name now. ``keep``: or what is here, when the registry does not answer."""
    try:
        _log.info("pulling the image %s", name)
        await pull(name, lambda line: _log.info("%s: %s", name, line))
        after = await claimed(service, name)
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
        with _kept(after):
            await asyncio.to_thread(ImageRecords().used, after.image_id, name, "pulled")
            await keep_within_budget(service)
    return after


@contextlib.contextmanager
def _kept(image: Image) -> Iterator[None]:
    """Give the claim back if the caller, who was to get it, gets an error instead."""
    try:
        yield
    except BaseException:
        image.claim.release()
        raise


def _release(image: Image | None) -> None:
    if image is not None:
        image.claim.release()


async def claimed(service: PodmanService, name: str) -> Image | None:
    """The image that has the name now, claimed; None where there is none. Raises ``ImageUnavailable`` when it is for
    another kind of machine."""
    while (attributes := await service.call(lambda client: _find(client, name))) is not None:
        claim = await asyncio.to_thread(Claim, claim_name(attributes["Id"]))
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
