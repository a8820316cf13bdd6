"""Local SGD: each slice trains by itself, and after each round all slices average what they have learned.

For jobs with ``failure_domain="slice"``: a lost slice restarts alone and joins the others again. Call `join` in every
process, train some steps, and call `Group.advance` with the change. docs/local-sgd.md is the page for users.

A service. May import: everything.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
