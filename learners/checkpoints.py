"""What survives a crash: the learner's whole state and the caller's own notes, in numbered Orbax checkpoints.

Orbax writes a checkpoint aside and renames it; then the digests of its files are put beside them, which makes it whole.
One that was never finished, or was damaged later (a bad disk, a truncated copy), is recognised before anything is read
from it, set aside with a warning, and the one before it is used. ``save`` returns when the checkpoint is on disk;
nothing runs in the background.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from palaestra.learners.learner import LearnerState
from palaestra.learners.models.parameters import named_leaves, path_name

logger = logging.getLogger(__name__)

DIGESTS_FILE = "palaestra_digests.json"


class CheckpointError(Exception):
    """No checkpoint of the folder can be used; the message says why and what to do."""


class _DamagedError(Exception):
    """A checkpoint is not what was saved."""


class _UnfinishedError(_DamagedError):
    """The process died inside ``save``, which therefore promised nothing."""


class Checkpoints:
    """The checkpoints of one run. Use it as a context manager, or call :meth:`close`.

    ``keep`` newest ones stay on disk.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 3) -> None:
        if keep < 2:
            raise ValueError(
                f"keep is {keep}; give at least 2, so that there is one to fall back on while one is written"
            )
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._manager.close()

    def numbers(self) -> list[int]:
        """The checkpoints on disk, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, number: int, state: LearnerState, extra: Mapping[str, Any] | None = None) -> None:
        """Write checkpoint ``number``, which must be above the last one (a loop's iteration, say).

        ``extra`` is the caller's own JSON: a position in the data, the state of a random generator. It comes back as
        it was given. Raises ``ValueError`` for a number that is not above the last, ``TypeError`` where extra is not
        JSON.
        """
        last = max(self.numbers(), default=-1)
        if number <= last:
            raise ValueError(f"checkpoint {number} would not be the newest of {self.folder} (which is {last})")
        arrays = _arrays(state)
        notes = {
            "step": state.step,
            "version": state.version,
            "shapes": _shapes(arrays),
            "extra": json.loads(json.dumps(dict(extra or {}))),
        }
        self._manager.save(
            number, args=ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), notes=ocp.args.JsonSave(notes))
        )
        self._manager.wait_until_finished()
        _write_digests(self.folder / str(number))

    def restore(self, like: LearnerState) -> tuple[LearnerState, dict[str, Any]] | None:
        """The newest whole checkpoint as ``(state, extra)``, bit for bit; None where the folder has none.

        ``like`` is a state of the same model and optimizer. A damaged or unfinished checkpoint is renamed to
        ``damaged-<number>``, a warning logged, and the one before it taken. Raises ``CheckpointError`` where only
        damaged ones are left, or where a whole one belongs to another model or optimizer.
        """
        lost = []
        for number in reversed(self.numbers()):
            try:
                _verify_digests(self.folder / str(number))
            except _DamagedError as damage:
                aside = self._set_aside(number)
                lost += [] if isinstance(damage, _UnfinishedError) else [number]
                logger.warning("checkpoint %d %s; moved to %s, using an older one", number, damage, aside)
            else:
                return self._read(number, like)
        if lost:
            raise CheckpointError(
                f"all checkpoints of {self.folder} are damaged ({', '.join(map(str, lost))}); restore the folder from "
                "a backup, or start the run in a new one"
            )
        return None

    def _read(self, number: int, like: LearnerState) -> tuple[LearnerState, dict[str, Any]]:
        notes = self._manager.restore(number, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))["notes"]
        wanted = _arrays(like)
        if notes["shapes"] != _shapes(wanted):
            raise CheckpointError(
                f"checkpoint {number} of {self.folder} belongs to another model or optimizer; resume with the "
                "configuration it was saved with, or start the run in a new folder"
            )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, wanted)
        arguments = ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract))
        arrays = self._manager.restore(number, args=arguments)["arrays"]
        params, optimizer = jax.tree_util.tree_map_with_path(
            lambda path, _: arrays[path_name(path)], (like.params, like.optimizer)
        )
        return LearnerState(params, optimizer, notes["step"], notes["version"]), notes["extra"]

    def _set_aside(self, number: int) -> Path:
        target = self.folder / f"damaged-{number}"
        attempt = 1
        while target.exists():
            attempt += 1
            target = self.folder / f"damaged-{number}-{attempt}"
        (self.folder / str(number)).rename(target)
        self._manager.reload()
        return target


def _write_digests(checkpoint: Path) -> None:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    digests = {str(path.relative_to(checkpoint)): _digest(path) for path in files}
    staging = checkpoint / f"{DIGESTS_FILE}.unfinished"
    staging.write_text(json.dumps(digests, indent=1), encoding="utf-8")
    staging.replace(checkpoint / DIGESTS_FILE)


def _verify_digests(checkpoint: Path) -> None:
    path = checkpoint / DIGESTS_FILE
    if not path.is_file():
        raise _UnfinishedError("was never finished")
    try:
        digests = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _DamagedError(f"is damaged ({DIGESTS_FILE} cannot be read)") from error
    for name, expected in digests.items():
        if not (checkpoint / name).is_file():
            raise _DamagedError(f"is damaged ({name} is missing)")
        if _digest(checkpoint / name) != expected:
            raise _DamagedError(f"is damaged ({name} has changed)")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _arrays(state: LearnerState) -> dict[str, jax.Array]:
    """Flat and by name, so that a checkpoint does not depend on how Flax or Optax nest their containers."""
    return named_leaves((state.params, state.optimizer))


def _shapes(arrays: Mapping[str, jax.Array]) -> dict[str, str]:
    return {name: f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" for name, leaf in arrays.items()}
