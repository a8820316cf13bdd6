"""``python -m iris_ray.actors.controller.bootstrap ADDRESS``: start the cluster's Controller from a plain Ray driver.

A detached actor keeps its creator's Ray job and inherits its runtime environment. So a driver without secrets and
without a checkout creates it here. The actor stays when this driver ends.
"""

import sys
from pathlib import Path

import ray
from ray.exceptions import RayTaskError

import iris_ray
from iris_ray.actors.calls.names import CONTROLLER_NAME, NAMESPACE
from iris_ray.actors.controller.controller import Controller
from iris_ray.errors import IrisError


def main(address: str) -> None:
    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        runtime_env={"py_modules": [str(Path(iris_ray.__file__).parent)]},
    )
    controller = (
        ray.remote(Controller)
        .options(
            name=CONTROLLER_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},  # the head is not preemptible; TPU hosts are
            max_concurrency=10_000,
            max_restarts=-1,  # it goes on from its journal
        )
        .remote()
    )
    try:
        ray.get(controller.ping.remote())
    except RayTaskError as error:
        ray.kill(controller)  # it would refuse every call, and keep its name from a Controller that can start
        if isinstance(error.cause, IrisError):
            sys.exit(str(error.cause))  # the message says what to do; a traceback of our code would not help
        raise


if __name__ == "__main__":
    main(sys.argv[1])
