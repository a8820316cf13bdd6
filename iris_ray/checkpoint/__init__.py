"""Checkpoints of JAX programs in the memory of their hosts: `MemoryCheckpointer`, and `mirror` for Orbax's own.

May import: `task`, `actors.protocol`, `model`, `errors`. Imports JAX. Start with `memory.py` and `steps.py`; `boxes.py`
has the ranges of indices of which steps are put together, and knows neither JAX nor files. docs/checkpoints.md is the
page for users.
"""

from iris_ray.checkpoint.memory import MemoryCheckpointer
from iris_ray.checkpoint.mirror import mirror

__all__ = ["MemoryCheckpointer", "mirror"]
