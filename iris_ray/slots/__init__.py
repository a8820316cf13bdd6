"""Slots: models that stay loaded on devices, placed by their memory, and evicted when other models need it.

`core/` decides and is pure, `actors/` are the processes, `client/` is the public API, `front/` serves over HTTP, and
`cli.py` is ``iris-ray slots``. Start with `core/slot.py` and `core/fleet.py`. May import: everything.
`__init__.pyi` lists the public names; each is imported when it is first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
