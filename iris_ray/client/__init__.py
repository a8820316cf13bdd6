"""The public API outside a task: the ``run_on_pod`` family, and `IrisClient` with its job handles.

May import: `actors`, `history`, `task`, `terminal`, `processes`, the pure core; `testing` for ``IrisClient.local``.
Start with `run_on_pod.py` and `client.py`: both make a request (`job_request.py`; the table of options is
`model/options.py`) and hand it to a pool (`caller_pool.py`), which may outlive its caller. `modes/` runs a request on
this machine instead. `ray_jobs.py` sends a whole script to a cluster, by Ray's job API; `dashboard_client.py` makes the
calls of an `IrisClient` in this way. `tunnel/` has streams in both directions through the same port.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
