"""Starts Ray's own processes as ``ray start`` would, without those that a simulated cluster does not need.

The only part of `iris_ray.testing` that touches Ray's private API; checked on Ray 2.60.0. Start with `head.py`.

It relies on these facts:

- ``ray._private.services`` builds each process's command line and runs it through its module-level function
  ``start_ray_process``; `launching.py` replaces that function while a node is started, so that every process gets a
  supervisor;
- a raylet finds its agents' ports in files of its session directory, named by ``get_port_filename``; it ends when its
  dashboard agent ends, and accepts one that does nothing (`launching.py`);
- the runtime_env agent's script binds the port given to it with ``socket.bind`` (see `testing/lazy_agent.py`);
- ``Node``, used for the head only, works through the methods that `head.py` overrides.
"""

import ray

if tuple(map(int, ray.__version__.split(".")[:2])) < (2, 60):
    raise ImportError(
        f"simulated TPU hosts need Ray 2.60, and this is Ray {ray.__version__}. iris_ray itself runs on clusters of Ray"
        " 2.49 to 2.60; to try it without TPUs, install ray==2.60.0 in an environment of its own"
    )
