"""Sandboxes: where everything an agent writes is run.

``open_pool`` gives a pool, the pool gives cells, a cell runs commands. ``protocol`` says what they promise.
"""

from palaestra.envs.sandboxes.backends import BackendName, open_pool
from palaestra.envs.sandboxes.protocol import (
    Argv,
    Command,
    ExecResult,
    Python,
    Sandbox,
    SandboxPool,
    SandboxSpec,
    Shell,
    Snapshot,
)

__all__ = [
    "Argv",
    "BackendName",
    "Command",
    "ExecResult",
    "Python",
    "Sandbox",
    "SandboxPool",
    "SandboxSpec",
    "Shell",
    "Snapshot",
    "open_pool",
]
