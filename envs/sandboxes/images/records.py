"""What this user's Palaestra knows of images beyond what Podman does: where they came from, and when each was used.

One small JSON file in the cache, changed under a lock. A lost or unreadable one costs nothing but the order of
eviction: images that are not in it are never removed.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from palaestra.envs.sandboxes.images.claims import alone, cache_folder

_log = logging.getLogger(__name__)


Origin = Literal["made", "built", "pulled", "found"]
"""Made from this machine's Python; built from a Containerfile; pulled by Palaestra, which may remove it; or found here
when it was first used."""


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """One image in Podman's storage."""

    image_id: str
    name: str
    """The name that it was used by last."""
    origin: Origin
    used_s: float
    """When it was used last: seconds since the epoch."""


class ImageRecords:
    """The file; every method is one short transaction."""

    def __init__(self) -> None:
        folder = cache_folder()
        self._file, self._lock = folder / "images.json", folder / "images.lock"

    def all(self) -> list[ImageRecord]:
        """Least recently used first."""
        with alone(self._lock):
            return sorted(self._read().values(), key=lambda record: record.used_s)

    def used(self, image_id: str, name: str, origin: Origin | None = None) -> None:
        """Note that an image is used now. ``origin`` None: what is known already, else it was found here."""

        def change(records: dict[str, ImageRecord]) -> None:
            known = records.get(image_id)
            whence = origin or (known.origin if known else "found")
            records[image_id] = ImageRecord(image_id, name, whence, time.time())

        self._change(change)

    def forget(self, image_id: str) -> None:
        """Drop an image that is gone."""
        self._change(lambda records: records.pop(image_id, None))

    def _change(self, change: Callable[[dict[str, ImageRecord]], object]) -> None:
        with alone(self._lock):
            records = self._read()
            change(records)
            unfinished = self._file.with_suffix(".new")
            unfinished.write_text(json.dumps([asdict(record) for record in records.values()], indent=1))
            os.replace(unfinished, self._file)

    def _read(self) -> dict[str, ImageRecord]:
        try:
            records = [ImageRecord(**fields) for fields in json.loads(_text(self._file))]
        except (ValueError, TypeError) as error:
            _log.warning("%s is not readable and is begun anew: %s", self._file, error)
            return {}
        return {record.image_id: record for record in records}


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except FileNotFoundError:
        return "[]"
