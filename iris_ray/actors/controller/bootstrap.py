"""``python -m iris_ray.actors.controller.bootstrap ADDRESS``: start the cluster's Controller from a plain Ray driver.

A detached actor keeps its creator's Ray job and inherits its runtime environment. So a driver without secrets and
without a checkout creates it here. The actor stays when this driver ends.

Every process starts the Controller with the iris_ray that is installed on the head. If none is, this process sends
its own, which may be that of a user's job.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayTaskError

import iris_ray
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.controller.controller import Controller
from iris_ray.actors.protocol.version import VERSIONS_DO_NOT_FIT, require_fit, versions_here
from iris_ray.errors import IrisError, VersionMismatchError

ON_HEAD: Mapping[str, Any] = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}
"""Ray's options for what runs on the head, which is not preemptible; TPU hosts are."""


def main(address: str) -> None:
    """Start the Controller, unless one runs.

    Raises:
        VersionMismatchError: the iris_ray that is installed on the head does not go with this one.
        IrisError: it can't start; the message says what to do.
    """
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    installed = installed_on_head()
    if installed is None:
        ray.shutdown()
        shipped = {"py_modules": [str(Path(iris_ray.__file__).parent)]}
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, runtime_env=shipped)
    else:
        who, advice = "the installation on the cluster's head", "install this machine's version on the head"
        require_fit(installed, versions_here(), who, advice)
    controller = (
        ray.remote(Controller)
        .options(
            name=CONTROLLER_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_concurrency=10_000,
            max_restarts=-1,  # it goes on from its journal
            **ON_HEAD,
        )
        .remote()
    )
    try:
        ray.get(controller.ping.remote())
    except RayTaskError as error:
        ray.kill(controller)  # it would refuse every call, and keep its name from a Controller that can start
        if isinstance(error.cause, IrisError):
            raise error.cause from None
        raise


def installed_on_head() -> dict[str, Any] | None:
    """Return the versions of the iris_ray that is installed on the head; None without one. This starts a process there.

    This process must be in the cluster, in a Ray job without a runtime environment of its own.
    """
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)  # the head may have another version, or none
    try:
        return ray.get(ray.remote(look_around).options(**ON_HEAD).remote())  # type: ignore[no-any-return]
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def look_around() -> dict[str, Any] | None:
    """Return the versions of the iris_ray that can be imported here; None without one."""
    try:
        import iris_ray as found
    except ImportError:
        return None
    try:
        from iris_ray.actors.protocol.version import versions_here
    except ImportError:  # from before there was such a function
        return {"protocol": 0, "version": found.__version__, "package": found.__path__[0]}
    return versions_here()


def exit_code(error: IrisError) -> int:
    """Return the exit code by which the starter of this process tells the errors apart."""
    return VERSIONS_DO_NOT_FIT if isinstance(error, VersionMismatchError) else 1


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except IrisError as failure:  # the message says what to do; a traceback of our code would not help
        print(failure, file=sys.stderr)
        sys.exit(exit_code(failure))
    os._exit(0)  # callers wait for this process to end, and leaving the Ray cluster in order takes a second
