"""Folders with packages that the trees of a cell would show, and what must stay visible."""

from __future__ import annotations

from pathlib import Path

from palaestra.envs.sandboxes.hidden import hidden_folders, installed_packages, outermost_inside, own_sources


def made(*folders: Path) -> list[Path]:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    return list(folders)


def test_packages_of_every_python_of_a_tree_are_found(tmp_path: Path) -> None:
    folders = made(
        tmp_path / "lib/python3/dist-packages",
        tmp_path / "lib64/python3.12/site-packages",
        tmp_path / "local/lib/python3.11/dist-packages",
        tmp_path / "local/lib/python3.13/site-packages",
    )
    assert set(folders) <= set(installed_packages([tmp_path]))


def test_only_folders_inside_a_tree_are_covered_and_each_once(tmp_path: Path) -> None:
    packages, inner, outside = made(
        tmp_path / "usr/site-packages", tmp_path / "usr/site-packages/palaestra", tmp_path / "home/site-packages"
    )
    link = tmp_path / "link"
    link.symlink_to(packages)
    candidates = [inner, link, packages, outside, tmp_path / "usr", tmp_path / "missing"]
    assert outermost_inside(candidates, [tmp_path / "usr"]) == [packages]


def test_an_installed_package_is_hidden_with_what_lies_beside_it(tmp_path: Path) -> None:
    package, _ = made(tmp_path / "site-packages/palaestra", tmp_path / "site-packages/palaestra/envs")
    assert package.parent in own_sources(package, [tmp_path / "lib"])


def test_a_package_beside_the_standard_library_is_hidden_alone_with_its_linked_parts(tmp_path: Path) -> None:
    library, package, envs = made(tmp_path / "lib/python3", tmp_path / "lib/palaestra", tmp_path / "checkout/envs")
    (package / "envs").symlink_to(envs)
    assert own_sources(package, [library]) == sorted([package, envs])


def test_this_checkout_is_hidden_from_a_tree_that_holds_it() -> None:
    root = Path(__file__).resolve().parents[3]
    assert root in hidden_folders([root.parent])
