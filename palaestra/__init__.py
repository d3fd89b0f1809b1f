"""Palaestra: train language-model agents by reinforcement on tasks that really execute.

Importing the package registers the environments, so that ``gymnasium.make("AgentCode-v0")`` works. It does not
import jax; that happens where a model is used.
"""

from palaestra import envs

__version__ = "0.1.0.dev0"

__all__ = ["__version__", "envs"]
