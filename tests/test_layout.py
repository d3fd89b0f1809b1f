"""The import rules of the house: one name for every module, and nothing heavy at import time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_no_part_is_importable_under_a_second_name() -> None:
    assert not {"envs", "rollout", "learners"} & set(sys.modules)


def test_importing_palaestra_registers_the_environments_and_imports_no_jax() -> None:
    program = (
        "import sys, gymnasium, palaestra; assert 'AgentCode-v0' in gymnasium.registry; "
        "print(sorted({'jax', 'flax', 'optax', 'orbax', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_library_code_reads_no_data_through_dunder_file() -> None:
    found = [
        str(path.relative_to(ROOT))
        for part in ("palaestra", "envs", "rollout", "learners")
        for path in (ROOT / part).rglob("*.py")
        if any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(ast.parse(path.read_text())))
    ]
    assert not found, f"use importlib.resources: {found}"
