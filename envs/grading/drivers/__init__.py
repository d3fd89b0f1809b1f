"""The small trusted programs that run inside a cell beside the agent's code, and how they are sent there.

Each driver is an ordinary module here, typed and linted like the rest. ``source`` strips what a cell doesn't need
(docstrings, annotations, imports of Palaestra) and joins a driver with the codec, so that one self-contained program
for any Python ≥ 3.8 goes through ``Python(code)`` and nothing of Palaestra has to be installed in the cell.
"""

from __future__ import annotations

import ast
import functools
from importlib import resources

RESULT_FD = 3
"""Where a driver writes what it found; never stdout, which belongs to the program."""


_STANDARD_LIBRARY_ONLY = """\
import sys
sys.path[:] = [path for path in sys.path if path.startswith("/") and not f"{path}/".startswith("/workspace/")]
"""
"""Before a driver imports anything: a file of the agent's by the name of one of its modules would run in its place."""


@functools.cache
def source(*modules: str) -> str:
    """One program out of modules of this folder, e.g. ``source("encode", "function_cases")``.

    It begins by taking the agent's folders off ``sys.path``; a driver puts back what the agent's code needs.
    """
    folder = resources.files("palaestra.envs.grading.drivers")
    trees = [_Strip().visit(ast.parse(folder.joinpath(f"{name}.py").read_text(encoding="utf-8"))) for name in modules]
    defined = [node.name for tree in trees for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    if len(set(defined)) != len(defined):
        raise ValueError(f"the modules {modules} define a name twice; joined, one would hide the other: {defined}")
    return "\n".join([_STANDARD_LIBRARY_ONLY, *map(ast.unparse, trees)])


class _Strip(ast.NodeTransformer):
    """Drop docstrings, annotations, and imports that only matter outside a cell."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        module = node.module or ""
        return None if module == "__future__" or module.startswith(("palaestra", "typing")) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str) else node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value, lineno=node.lineno), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.returns = None
        node.body = node.body or [ast.Pass()]
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node
