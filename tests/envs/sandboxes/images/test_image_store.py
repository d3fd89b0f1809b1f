"""Which images may be removed, and which never are."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from palaestra.envs.sandboxes import BackendName
from palaestra.envs.sandboxes.images.claims import Claim, scratch_folder, unclaimed
from palaestra.envs.sandboxes.images.host_image import PYTHON_LABEL, REPOSITORY
from palaestra.envs.sandboxes.images.oci_archive import write_archive
from palaestra.envs.sandboxes.images.records import ImageRecords
from palaestra.envs.sandboxes.images.resolve import named_image
from palaestra.envs.sandboxes.images.store import keep_within_budget, known_images, remove_older_defaults
from palaestra.envs.sandboxes.podman.service import PodmanService

MIB = bytes(1 << 20)


@pytest_asyncio.fixture
async def service(podman: BackendName) -> AsyncIterator[PodmanService]:
    opened = PodmanService()
    yield opened
    await opened.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What Palaestra notes of images, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def here(name: str) -> bool:
    return subprocess.run(["podman", "image", "exists", name], timeout=60, check=False).returncode == 0


def podman_does(*arguments: str) -> str:
    done = subprocess.run(["podman", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


async def test_the_least_recently_used_of_what_was_pulled_goes_first_and_nothing_else(
    registry: Any, service: PodmanService, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {}
    for number, which in enumerate(("found", "old", "used", "tagged", "contained", "claimed", "new")):
        registry.push(f"{which}:1", {"file": bytes([number]) + MIB})
        names[which] = f"{registry.host}/{which}:1"
    podman_does("pull", "--quiet", names["found"])
    for which in ("found", "old", "used", "tagged", "contained"):
        (await named_image(service, names[which], "missing")).claim.release()
    claimed = await named_image(service, names["claimed"], "missing")
    (await named_image(service, names["used"], "missing")).claim.release()
    own_name = f"localhost/palaestra-test-kept:{os.getpid()}"
    podman_does("tag", names["tagged"], own_name)
    container = podman_does("create", "--network=none", names["contained"], "/file")
    try:
        monkeypatch.setenv("PALAESTRA_IMAGE_BUDGET_GIB", str(5.5 / 1024))
        new = await named_image(service, names["new"], "missing")

        assert [which for which, name in names.items() if not here(name)] == ["old"]
        monkeypatch.setenv("PALAESTRA_IMAGE_BUDGET_GIB", "0")
        assert await keep_within_budget(service) == [names["used"]]
        new.claim.release()
        claimed.claim.release()
        assert await keep_within_budget(service) == [names["claimed"], names["new"]]
        assert [which for which, name in names.items() if here(name)] == ["found", "tagged", "contained"]
    finally:
        podman_does("rm", "--force", container)
        podman_does("untag", own_name, own_name)


async def test_an_image_whose_tag_moved_on_can_still_be_removed(
    registry: Any, service: PodmanService, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{registry.host}/renewed:1"
    first = registry.push("renewed:1", {"file": b"first" + MIB})
    (await named_image(service, name, "missing")).claim.release()
    second = registry.push("renewed:1", {"file": b"second" + MIB})
    (await named_image(service, name, "always")).claim.release()

    known = {image.digest: image.name for image in await known_images(service) if image.origin == "pulled"}
    assert known == {first: f"{registry.host}/renewed@{first}", second: name}
    monkeypatch.setenv("PALAESTRA_IMAGE_BUDGET_GIB", "0")
    assert await keep_within_budget(service) == [f"{registry.host}/renewed@{first}", name]
    assert not here(name)


async def test_a_default_image_goes_when_its_interpreter_has_changed(
    service: PodmanService, cache: Path, tmp_path: Path
) -> None:
    layer = tmp_path / "layer.tar"
    layer.write_bytes(bytes(10_240))
    tags = {}
    for which, interpreter in (
        ("changed", "/opt/a/python3"),
        ("current", "/opt/a/python3"),
        ("other", "/opt/b/python3"),
    ):
        tags[which] = f"{REPOSITORY}:test-{which}-{os.getpid()}"
        archive = tmp_path / f"{which}.tar"
        write_archive(archive, layer, tags[which], environment={"W": which}, labels={PYTHON_LABEL: interpreter})
        podman_does("load", "--quiet", "--input", str(archive))
    try:
        await remove_older_defaults(service, tag=tags["current"], interpreter="/opt/a/python3")

        assert [which for which, tag in tags.items() if here(tag)] == ["current", "other"]
    finally:
        podman_does("rmi", tags["current"], tags["other"])


def test_a_claim_of_any_holder_keeps_others_from_removing(cache: Path) -> None:
    first, second = Claim("thing"), Claim("thing")
    first.release()
    with unclaimed("thing") as free:
        assert not free
    second.release()
    with unclaimed("thing") as free:
        assert free
        with unclaimed("thing") as again:
            assert not again
    Claim("thing").release()


def test_what_a_killed_process_left_of_its_scratch_folder_goes_with_the_next(cache: Path) -> None:
    left = cache / "palaestra" / "scratch-left"
    left.mkdir(parents=True)
    (left / "blob").write_bytes(b"x")
    with scratch_folder() as first:
        with scratch_folder() as second:
            assert first.is_dir()
            assert second.is_dir()
        assert not left.exists()
        assert first.is_dir()
    assert not list((cache / "palaestra").rglob("scratch-*"))


def test_records_that_cannot_be_read_are_begun_anew(cache: Path) -> None:
    records = ImageRecords()
    records.used("a", "localhost/a:1")
    records.used("b", "localhost/b:1", "pulled")
    records.used("a", "localhost/a:2")
    records.used("b", "localhost/b:1")
    assert [(record.image_id, record.name, record.origin) for record in records.all()] == [
        ("a", "localhost/a:2", "found"),
        ("b", "localhost/b:1", "pulled"),
    ]
    (cache / "palaestra" / "images.json").write_text('[{"half": ')
    assert records.all() == []
    records.used("c", "localhost/c:1")
    assert [record.image_id for record in records.all()] == ["c"]
