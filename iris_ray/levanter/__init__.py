"""For users of Levanter: the functions of ``levanter.infra.ray_tpu`` with its signatures, and `run` for tasks.

May import: `client`, `checkpoint`, `task`, `model`, `errors`. Imports neither Levanter nor JAX until a function needs
them. Start with `ray_tpu.py` and `training.py`. docs/coming-from-levanter.md is the page for users.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
