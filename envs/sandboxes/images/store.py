"""The images of Palaestra's in the user's storage: what there is, what it takes, and what may go.

Images that Palaestra pulled itself are removed, least recently used first, when together they take more than
``PALAESTRA_IMAGE_BUDGET_GIB``, unless someone claims them or a container uses them. (Layers that images share are
counted with each, so that the budget is never exceeded, and may not be used up.) No other image is ever removed
unasked, but for defaults made from the same interpreter before it changed.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from palaestra.envs.sandboxes.images.claims import unclaimed
from palaestra.envs.sandboxes.images.host_image import PYTHON_LABEL, REPOSITORY
from palaestra.envs.sandboxes.images.pull import setting
from palaestra.envs.sandboxes.images.records import ImageRecord, ImageRecords, Origin
from palaestra.envs.sandboxes.podman.service import PodmanService

BUDGET_VARIABLE = "PALAESTRA_IMAGE_BUDGET_GIB"
_DEFAULT_BUDGET_GIB = 50.0
_GIB = 1 << 30
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownImage:
    """An image that is here and that Palaestra made, pulled or used."""

    image_id: str
    name: str
    """With the digest in place of the tag, where the tag names another image by now."""
    digest: str
    size_bytes: int
    origin: Origin
    used_s: float | None
    """When it was used last: seconds since the epoch; None: not since it was made."""
    containers: int
    """How many are made from it, running or not."""


def claim_name(image_id: str) -> str:
    """What its users claim (``palaestra.envs.sandboxes.images.claims``)."""
    return f"image-{image_id.removeprefix('sha256:')}"


async def known_images(service: PodmanService) -> list[KnownImage]:
    """Most recently used first."""
    records = {record.image_id: record for record in await asyncio.to_thread(ImageRecords().all)}
    known = [
        _known(each, records.get(each.id), default)
        for each in await service.call(_all_images)
        for default in [_default_tag(each)]
        if each.id in records or default is not None
    ]
    return sorted(known, key=lambda image: -(image.used_s or 0.0))


async def keep_within_budget(service: PodmanService) -> list[str]:
    """Remove what Palaestra pulled, least recently used first, until it fits; returns the names of what it removed."""
    budget_bytes = setting(BUDGET_VARIABLE, _DEFAULT_BUDGET_GIB) * _GIB
    ours = [image for image in await known_images(service) if image.origin == "pulled"]
    total = sum(image.size_bytes for image in ours)
    removed = []
    for image in reversed(ours):
        if total <= budget_bytes:
            break
        if await remove_image(service, image):
            _log.info("removed the image %s: what Palaestra pulled exceeds %s", image.name, BUDGET_VARIABLE)
            total -= image.size_bytes
            removed.append(image.name)
    if total > budget_bytes:
        taken, allowed = total / _GIB, budget_bytes / _GIB
        _log.warning("images in use take %.2f GiB, more than %s allows (%.2f)", taken, BUDGET_VARIABLE, allowed)
    return removed


async def remove_image(service: PodmanService, image: KnownImage) -> bool:
    """Remove it, unless it is claimed, in use by a container, or has a name that is none of ours."""
    with unclaimed(claim_name(image.image_id)) as free:
        if not free or not await service.call(lambda client: _removed(client, image)):
            return False
        await asyncio.to_thread(ImageRecords().forget, image.image_id)
        return True


async def remove_older_defaults(service: PodmanService, *, tag: str, interpreter: str) -> None:
    """Default images of that interpreter but for the one with the tag: it has changed since they were made."""
    for image in await service.call(_all_images):
        older = _default_tag(image)
        if older is not None and older != tag and image.labels.get(PYTHON_LABEL, interpreter) == interpreter:
            await remove_image(service, _known(image, None, older))


def _known(image: Any, record: ImageRecord | None, default: str | None) -> KnownImage:
    name = default or (record.name if record else "")
    if "@" not in name and name not in image.tags:
        name = f"{name.rpartition(':')[0]}@{image.attrs['Digest']}"
    origin: Origin = "made" if default else record.origin if record else "found"
    used_s = record.used_s if record else None
    size, containers = int(image.attrs["Size"]), int(image.attrs.get("Containers") or 0)
    return KnownImage(image.id, name, image.attrs["Digest"], size, origin, used_s, containers)


def _default_tag(image: Any) -> str | None:
    """The tag of a default image."""
    return next((tag for tag in image.tags if tag.startswith(f"{REPOSITORY}:")), None)


def _removed(client: Any, image: KnownImage) -> bool:
    from podman.errors import APIError

    found = next((each for each in _all_images(client) if each.id == image.image_id), None)
    if found is None:
        return True
    if set(found.tags) - {image.name}:
        return False
    try:
        client.images.remove(image.image_id)
    except APIError as error:
        status = error.response.status_code if error.response is not None else None
        if status not in (404, 409):  # gone by now, or in use
            raise
        return bool(status == 404)
    return True


def _all_images(client: Any) -> list[Any]:
    images: list[Any] = client.images.list()
    return images
