"""For users of Marin: a client of Fray, Marin's interface to jobs and actors, that runs them with iris_ray.

May import: `client`, `task`, `actors.calls`, `actors.protocol`, `model`, `errors`. Imports Fray (``marin-fray``) only
when a function needs it. Start with `client.py`. docs/coming-from-marin.md is the page for users.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
