"""Checkpoints of JAX programs in the memory of their hosts: `MemoryCheckpointer`.

May import: `task`, `actors.protocol`, `model`, `errors`. Imports JAX; nothing else of iris_ray imports this package but
the packages for users of Levanter. Start with `memory.py`; `boxes.py`, `shares.py`, `parts.py`, `store.py` and `search.py`
know no JAX. docs/checkpoints.md is the page for users.
"""

from iris_ray.checkpoint.memory import MemoryCheckpointer

__all__ = ["MemoryCheckpointer"]
