"""Lines of JSON, plain or gzipped, with errors that name the file and the line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from palaestra.envs.errors import TaskFormatError, UsageError

M = TypeVar("M", bound=BaseModel)


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line that is not blank. A file is gzipped if its name ends in ``.gz``.

    Raises ``UsageError`` if the file cannot be read and ``TaskFormatError`` if a line is not a JSON object.
    """
    if not path.is_file():
        raise UsageError(f"there is no task file {str(path)!r}; give the path of a .jsonl or .jsonl.gz file")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"the task file {str(path)!r} cannot be read: {error}") from None
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TaskFormatError(f"not JSON: {error}", file=str(path), line=number) from None
        if not isinstance(row, dict):
            found = type(row).__name__
            raise TaskFormatError(f"a task is a JSON object, this is a {found}", file=str(path), line=number)
        yield number, row


def validated(model: type[M], row: dict[str, Any], *, file: str, line: int) -> M:
    """The row as a model; ``TaskFormatError`` names the first field that is wrong."""
    try:
        return model.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or None
        more = f" (and {error.error_count() - 1} more problems)" if error.error_count() > 1 else ""
        problem = first["msg"].removeprefix("Value error, ")
        raise TaskFormatError(f"{problem}{more}", file=file, line=line, field=field) from None
