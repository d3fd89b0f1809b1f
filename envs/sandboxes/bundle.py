"""Packs the supervisor into the one file that a host runs: a zip that any python3 >= 3.8 executes."""

from __future__ import annotations

import functools
import io
import zipfile
from importlib import resources

_PACKAGE = "palaestra.envs.sandboxes.supervisor"
_START = f"import sys\n\nfrom {_PACKAGE}.main import main\n\nmain(sys.argv[1:])\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)


@functools.cache
def supervisor_zip() -> bytes:
    """The archive's bytes; the same sources give the same bytes."""
    files = {"__main__.py": _START}
    folders = _PACKAGE.split(".")
    for depth in range(1, len(folders)):
        files["/".join([*folders[:depth], "__init__.py"])] = ""
    for source in sorted(resources.files(_PACKAGE).iterdir(), key=lambda entry: entry.name):
        if source.name.endswith(".py"):
            files["/".join([*folders, source.name])] = source.read_text("utf-8")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), text)
    return buffer.getvalue()
