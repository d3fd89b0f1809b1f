"""The wheel and the sdist hold the real folders behind the links, and an installed copy steps an environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("envs", "rollout", "learners")

ONE_EPISODE = """
import sys
import gymnasium as gym
import palaestra
env = gym.make("AgentCode-v0", backend="auto")
observation, info = env.reset(seed=0)
task = env.unwrapped.tasks.get(info["task_id"])
blocks = [f"```python path={path}\\n{text}\\n```" for path, text in task.reference.items()]
*_, terminated, truncated, info = env.step("\\n".join(blocks) + "\\n<submit/>")
env.close()
assert info["verdict"].passed and terminated, info
assert "jax" not in sys.modules and palaestra.__file__.startswith(sys.prefix), palaestra.__file__
print("one episode:", info["reward"])
"""


def _run(*argv: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(a) for a in argv], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{argv}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel built from that sdist (so that the sdist is known to be complete)."""
    source = tmp_path_factory.mktemp("source") / "palaestra"
    _run("git", "clone", "--quiet", "--no-hardlinks", ROOT, source, cwd=ROOT)
    _run(sys.executable, "-m", "build", "--no-isolation", source, cwd=source)
    (sdist,) = (source / "dist").glob("*.tar.gz")
    (wheel,) = (source / "dist").glob("*.whl")
    return sdist, wheel


def test_the_links_are_relative_and_point_at_the_folders_beside_the_package() -> None:
    for part in PARTS:
        assert os.readlink(ROOT / "palaestra" / part) == f"../{part}"


def test_wheel_and_sdist_hold_every_module_as_a_real_file_under_one_package(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    tracked = _run("git", "ls-files", *PARTS, "palaestra", cwd=ROOT).split()
    modules = {name if name.startswith("palaestra/") else f"palaestra/{name}" for name in tracked if "." in name}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        files = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
        assert not [member.name for member in archive if member.issym()]
    assert modules <= in_wheel, sorted(modules - in_wheel)[:10]
    assert modules <= files, sorted(modules - files)[:10]
    assert {name.split("/")[0] for name in in_wheel if ".dist-info" not in name} == {"palaestra"}


@pytest.mark.timeout(900)
def test_the_wheel_in_a_new_environment_runs_one_episode_with_its_declared_dependencies_alone(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    _, wheel = distributions
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    _run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    assert "one episode: 1.0" in _run(python, "-c", ONE_EPISODE, cwd=tmp_path)
