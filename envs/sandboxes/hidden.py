"""Which folders of the machine's own Python a cell must not see: third-party packages, and above all ours.

Tasks bring their expected values in files of a package. Where that is installed for the interpreter that cells run,
an agent could import it and read them.
"""

from __future__ import annotations

import itertools
import os
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import palaestra

_NAMES = ("site-packages", "dist-packages")


def hidden_folders(bound: Sequence[Path]) -> list[Path]:
    """Real folders inside the bound trees, none inside another, that hold packages beside the standard library."""
    trees = {Path(os.path.realpath(tree)) for tree in bound}
    needed = {Path(os.path.realpath(sysconfig.get_path("stdlib"))), *trees}
    own = own_sources(Path(palaestra.__file__).parent, needed)
    return outermost_inside([*installed_packages(trees), *own], trees)


def installed_packages(trees: Iterable[Path]) -> Iterator[Path]:
    """Where this interpreter and its virtual environment, and any python3 in the trees, look for packages."""
    known = [*sys.path, *site.getsitepackages(), site.getusersitepackages()]
    bases: tuple[dict[str, str], ...] = ({}, {"base": sys.base_prefix, "platbase": sys.base_exec_prefix})
    for scheme, names, kind in itertools.product(sysconfig.get_scheme_names(), bases, ("purelib", "platlib")):
        known.append(sysconfig.get_path(kind, scheme, names))
    yield from (path for path in map(Path, known) if path.name in _NAMES)
    for tree, local, name in itertools.product(trees, (".", "local"), _NAMES):
        yield from (tree / local).glob(f"lib*/python3*/{name}")
        yield from (tree / local).glob(f"python3*/{name}")  # where the tree is itself a lib folder


def own_sources(package: Path, needed: Iterable[Path]) -> list[Path]:
    """The folder that holds our package (``site-packages``, a checkout); the package alone where others need that
    folder. In a checkout, parts of the package are links to folders outside it."""
    real = Path(os.path.realpath(package))
    folders = {real, *(Path(os.path.realpath(part)) for part in package.iterdir() if part.is_dir())}
    holder = real.parent
    return sorted(folders if any(path.is_relative_to(holder) for path in needed) else {holder, *folders})


def outermost_inside(candidates: Iterable[Path], trees: Iterable[Path]) -> list[Path]:
    """The candidates that exist inside a tree, as real paths, without those that lie inside another one."""
    chosen: list[Path] = []
    for folder in sorted({Path(os.path.realpath(candidate)) for candidate in candidates if candidate.is_dir()}):
        inside = any(tree in folder.parents for tree in trees)
        if inside and not any(outer in folder.parents for outer in chosen):
            chosen.append(folder)
    return chosen
