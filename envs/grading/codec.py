"""The typed value codec that host and driver share.

Values cross the border of a cell as text and arrive with exactly the type they had; the host never unpickles and
never runs code of the agent, not even an ``__eq__``. ``encode`` also runs inside cells; ``decode`` trusts nothing.
"""

from __future__ import annotations

from palaestra.envs.grading.drivers.decode import MalformedValue, decode
from palaestra.envs.grading.drivers.encode import MAX_DEPTH, MAX_NODES, UnsupportedValue, ValueTooLarge, encode

__all__ = ["MAX_DEPTH", "MAX_NODES", "MalformedValue", "UnsupportedValue", "ValueTooLarge", "decode", "encode"]
