"""`run_docker_on_pod`: run a program in a container on every host of one or several TPU slices, all or none."""

import functools
from collections.abc import Mapping, Sequence
from typing import Unpack, cast

from iris_ray.actors.protocol.messages import RunRequest
from iris_ray.client.job_request import make_pod_request
from iris_ray.client.remote_options import plain_variables, require_env_travels
from iris_ray.client.run_on_pod import run_request
from iris_ray.client.run_options import local_mode, require_valid, takes, without_mode
from iris_ray.docker.core import ContainerSpec
from iris_ray.docker.host import run_in_container
from iris_ray.errors import InvalidRequestError
from iris_ray.model.options import DockerOptions, DockerRequestOptions


@takes()
def run_docker_on_pod(
    image_id: str,
    command: Sequence[str],
    *,
    tpu_type: str,
    num_slices: int | Sequence[int] = 1,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    container_options: Sequence[str] = (),
    **options: Unpack[DockerOptions],
) -> None:
    """Run a program in a container on every host of TPU slices and wait until all have ended.

    One container per host, all or none, by docker if it answers on the host, otherwise by podman;
    ``IRIS_RAY_CONTAINER_ENGINE`` on the host names another command. The container is privileged, has the host's
    network, and ends with its task, however that ends. If a host is lost, another slice replaces its own, and
    the gang restarts in new containers.

    Args:
        image_id: the image, such as ``"gcr.io/project/train:v7"``. Hosts that lack it pull it first.
        command: the program and its arguments; no shell reads them. Empty: the image's own program.
        tpu_type, num_slices: as for `run_on_pod`.
        env: environment variables of the program. It also gets the ``IRIS_*`` and ``MEGASCALE_*`` variables of a
            task. Values arrive as they are, newlines included. They are in no log and on no command line, except those
            of variables that would affect the engine's client, such as ``PATH``, ``HOME``, ``LD_…`` and
            ``DOCKER_HOST``. The engine shows all: give API keys as ``secrets``, which must be files here
            (``as_file=True``).
        name: the job's name; None: the last part of the image's name, without its tag.
        container_options: further options of ``docker run``, such as ``["--volume=/data:/data"]``. Those with which
            iris_ray would lose control of the container are refused, such as ``--name``, ``--rm`` and ``--detach``.
        options: those of docs/options.md, such as ``spares=1``; ``help(run_docker_on_pod)`` explains each.

    Raises:
        InvalidRequestError: a bad argument; nothing was acquired.
        TypeError: there is no such option; the message names a similar one, or all.
        NoClusterError: Ray is not initialised and there is no cluster to connect to.
        ContainerEngineError: neither docker nor podman answers on a host.
        TaskCrashedError: the program failed more often than allowed; the message has its exit code. It is a
            `TaskOutOfMemoryError` if the kernel killed it because memory was used up.
        LimitReachedError, NotPermittedError, JobUnschedulableError, LaunchesFailedError, PreemptedTooManyTimesError,
            JobCancelledError, ControllerUnavailableError: as for `run_on_pod`.

    Example::

        key = Secret.from_store("WANDB_API_KEY", as_file=True)
        command = ["sh", "-c", 'WANDB_API_KEY="$(cat "$WANDB_API_KEY")" exec python train.py']
        run_docker_on_pod("gcr.io/project/train", command, tpu_type="v4-32", secrets={"WANDB_API_KEY": key})
    """
    request = make_docker_request(
        image_id,
        command,
        tpu_type=tpu_type,
        num_slices=num_slices,
        env=env,
        name=name,
        container_options=container_options,
        **cast(DockerRequestOptions, without_mode(options)),
    )
    run_request(request, local_mode(options["mode"], options["simulate"]))


@takes()
def make_docker_request(
    image_id: str,
    command: Sequence[str],
    *,
    tpu_type: str,
    num_slices: int | Sequence[int] = 1,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    container_options: Sequence[str] = (),
    **options: Unpack[DockerRequestOptions],
) -> RunRequest:
    """Check everything that can be checked without a cluster; arguments and errors as for `run_docker_on_pod`."""
    require_valid({"secrets": options["secrets"]})
    secrets = options["secrets"] or {}
    for variable, secret in secrets.items():
        if not secret.as_file:
            raise InvalidRequestError(
                f"{variable} would be a variable of the container, and `docker inspect` shows those to everybody who"
                f' may use the engine on a host; make it a file: secrets={{"{variable}": Secret(…, as_file=True)}}. The'
                f" variable then has the file's path, and a program that wants the text itself starts by sh:"
                f' {variable}="$(cat "${variable}")" exec …'
            )
    variables = plain_variables(env) if isinstance(env, Mapping) else env  # mappings of other classes may not travel
    spec = ContainerSpec(image_id, command, {} if variables is None else variables, container_options, tuple(secrets))
    for variable in secrets.keys() & spec.env.keys():
        raise InvalidRequestError(f"{variable} is in secrets and in env; give it once")
    require_env_travels(spec.env)
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError(f"name is {name!r}; give a str, or None for the image's own name")
    return make_pod_request(
        functools.partial(run_in_container, spec),
        tpu_type,
        num_slices,
        name=name or image_id.rpartition("/")[2].partition(":")[0].partition("@")[0],
        **options,
    )
