"""The public API outside a task: the ``run_on_pod`` family, and `IrisClient` with its job handles.

May import: `actors`, `task`, the pure core; `testing` for ``IrisClient.local``.
Start with `run_on_pod.py` and `client.py`; `submission.py` checks a request and hands it to a pool.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
