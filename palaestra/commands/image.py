"""Make, list and remove the container images that sandboxes run in."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from palaestra.envs.errors import ImageUnavailable, UsageError
from palaestra.envs.sandboxes.images.build import build_image
from palaestra.envs.sandboxes.images.host_image import host_image
from palaestra.envs.sandboxes.images.names import full_image_name, is_local
from palaestra.envs.sandboxes.images.records import ImageRecords
from palaestra.envs.sandboxes.images.resolve import build_default, claimed
from palaestra.envs.sandboxes.images.store import known_images, remove_image
from palaestra.envs.sandboxes.podman.service import PodmanService

_MIB = 1 << 20
_SHOWN_OF_A_DIGEST = 19
_T = TypeVar("_T")


def build_default_image(console: Console) -> int:
    """Make the image of this machine's own Python, without any registry."""
    started = time.perf_counter()

    async def build(service: PodmanService) -> None:
        image = await build_default(service, host_image())
        image.claim.release()
        _show_built(image.name, image.digest, image.size_bytes, started, console)

    _with_service(build)
    return 0


def build_containerfile(
    file: Path | None, tag: str, arguments: Sequence[str], timeout_s: float, console: Console
) -> int:
    """Build a Containerfile (None: the one that comes with Palaestra), showing what Podman says meanwhile."""
    name = full_image_name(tag)
    if not is_local(name):
        raise UsageError(f"an image that is built here is named localhost/NAME:TAG, not {tag!r}")
    if file is not None and not file.is_file():
        raise UsageError(f"there is no file {file}; --containerfile takes the path of a Containerfile")
    started = time.perf_counter()

    def show(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    async def build(service: PodmanService) -> None:
        await build_image(source, source.parent, name, arguments, timeout_s=timeout_s, on_line=show)
        image = await claimed(service, name)
        if image is None:
            raise ImageUnavailable(f"{name} was built and is gone again; does something else remove images?")
        image.claim.release()
        await asyncio.to_thread(ImageRecords().used, image.image_id, name, "built")
        _show_built(image.name, image.digest, image.size_bytes, started, console)

    with tempfile.TemporaryDirectory(prefix="palaestra-build-") as folder:
        if file is None:
            source = Path(folder, "Containerfile")
            source.write_text(resources.files("palaestra.envs.sandboxes.images").joinpath("Containerfile").read_text())
        else:
            source = file.absolute()
        _with_service(build)
    return 0


def list_images(console: Console) -> int:
    """The images that Palaestra made, pulled or used, and what they take."""
    images = _with_service(known_images)
    if not images:
        console.print("no images yet; `palaestra image build` makes the default one")
        return 0
    table = Table()
    for heading in ("image", "digest", "MiB", "from", "last used", "containers"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("MiB", "containers") else "left")
    for image in images:
        used = "" if image.used_s is None else datetime.fromtimestamp(image.used_s).isoformat(" ", "minutes")
        size = f"{image.size_bytes / _MIB:.0f}"
        digest = image.digest[:_SHOWN_OF_A_DIGEST]
        table.add_row(image.name, digest, size, image.origin, used, str(image.containers))
    console.print(table)
    return 0


def remove_images(names: Sequence[str], unused: bool, console: Console) -> int:
    """Remove images by name, or all that Palaestra made or pulled and nobody uses. Returns 1 if one was kept."""
    if bool(names) == unused:
        raise UsageError("name the images to remove, or say --unused; `palaestra image list` shows them")

    async def remove(service: PodmanService) -> int:
        known = {image.name: image for image in await known_images(service)}
        wanted = [full_image_name(name) for name in names]
        if unused:
            wanted = [image.name for image in known.values() if image.origin != "found"]
        if missing := [name for name in wanted if name not in known]:
            raise UsageError(f"{missing[0]} is no image of Palaestra's; remove it with `podman rmi {missing[0]}`")
        kept = 0
        for name in wanted:
            gone = await remove_image(service, known[name])
            kept += not gone
            reason = "" if gone else ": something uses it, or it has another name too"
            console.print(f"{'removed' if gone else 'kept'} {name}{reason}", highlight=False, markup=False)
        return 1 if kept and not unused else 0

    return _with_service(remove)


def _with_service(work: Callable[[PodmanService], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        service = PodmanService()
        try:
            return await work(service)
        finally:
            await service.close()

    return asyncio.run(run())


def _show_built(name: str, digest: str, size_bytes: int, started: float, console: Console) -> None:
    seconds = time.perf_counter() - started
    console.print(
        f"{name}\n{digest}\n{size_bytes / _MIB:.1f} MiB in {seconds:.1f} s",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
