"""Checkpoints of JAX programs in the memory of their hosts: `MemoryCheckpointer`; and `mirror`, for Orbax's managers.

A service. May import: everything. The public names import JAX when they are used. Start with `memory.py` and
`steps.py`; `boxes.py` has the ranges of indices of which steps are put together, and knows neither JAX nor files.
docs/checkpoints.md is the page for users.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
