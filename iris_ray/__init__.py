"""iris_ray: run a function on every host of TPU slices, all or none, through preemptions, on Ray.

`__init__.pyi` lists the public names. Each is imported when it is first used, so that the pure core needs no Ray, and
a task process imports no more than it must.
"""

import lazy_loader

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
