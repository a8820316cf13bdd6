"""Slices that train by themselves and average what they have learned, under its public name.

A service. May import: everything.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
