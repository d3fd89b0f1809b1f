"""Environments: what an agent acts in. Importing this registers them with Gymnasium."""

from __future__ import annotations

import gymnasium

AGENT_CODE = "AgentCode-v0"

if AGENT_CODE not in gymnasium.registry:
    gymnasium.register(
        id=AGENT_CODE,
        entry_point="palaestra.envs.agent_env:AgentEnv",
        vector_entry_point="palaestra.envs.vector_env:AgentVectorEnv",
        nondeterministic=False,
    )

__all__ = ["AGENT_CODE"]
