"""The public API outside a task: the ``run_on_pod`` family, and `IrisClient` with its job handles.

May import: `actors`, `task`, `terminal`, `processes`, the pure core; `testing` for ``IrisClient.local``.
Start with `run_on_pod.py` and `client.py`: both make a request (`job_request.py`; the table of options is
`model/options.py`) and hand it to a pool (`caller_pool.py`), which may outlive its caller. `transport.py` is how an
`IrisClient` reaches its cluster: this process is connected to Ray, or a service that it knows by name has the cluster's
head act for it. Another such service runs a request on this machine (`local_mode` in `run_options.py`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
