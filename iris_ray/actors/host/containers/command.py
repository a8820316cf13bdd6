"""The command line of a container, and the environment of the client that starts it. Pure.

No value of a user's variable is on the command line, where everybody on the host could read it. The client has the
variable in its own environment and is told the name only, so that values arrive with spaces, quotes and newlines as
they are. Variables that would change what the client itself does are the exception: they go by name and value.
"""

from collections.abc import Mapping
from pathlib import Path

from iris_ray.actors.wire.task_files import TOKEN_VARIABLE, TaskFiles
from iris_ray.model.container import ContainerSpec
from iris_ray.model.job_info import JobInfo
from iris_ray.model.multislice import MEGASCALE_PREFIX

LABEL = "iris-ray.container"
"""The label with a container's name. By it a container is found exactly; engines find names by patterns."""

_OF_THE_HOST = ("TPU_", MEGASCALE_PREFIX)
_OF_THE_HOST_TOO = ("JAX_PLATFORMS", "PJRT_DEVICE")
"""What a task's environment says about its chips and its slice."""

_CHANGES_THE_CLIENT = ("LD_", "XDG_", "CONTAINERS_", "STORAGE_")
_CHANGES_THE_CLIENT_TOO = frozenset(
    {
        *("PATH", "HOME", "TMPDIR", "NOTIFY_SOCKET", "REGISTRY_AUTH_FILE"),
        *("CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINER_SSHKEY"),
        *("DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "DOCKER_CERT_PATH", "DOCKER_TLS", "DOCKER_TLS_VERIFY"),
        *("DOCKER_API_VERSION", "DOCKER_CONTENT_TRUST", "DOCKER_CONTENT_TRUST_SERVER", "DOCKER_DEFAULT_PLATFORM"),
        *("GODEBUG", "GOGC", "GOMAXPROCS", "GOMEMLIMIT", "GOTRACEBACK"),
    }
)


def container_environment(environ: Mapping[str, str], spec: ContainerSpec, task: JobInfo) -> dict[str, str]:
    """Return the variables of the container.

    The user's win over what the host says about its chips. Variables that identify the task win over the user's, and
    so do the ``MEGASCALE_*`` variables of this attempt. On a single slice there are none, the user's included.

    Args:
        environ: the environment of the task's process.
        spec: what the user asks for.
        task: the task's place in its gang.
    """
    told = {name: v for name, v in environ.items() if name.startswith(_OF_THE_HOST) or name in _OF_THE_HOST_TOO}
    megascale = {name: value for name, value in told.items() if name.startswith(MEGASCALE_PREFIX)}
    user = {name: v for name, v in spec.env.items() if megascale or not name.startswith(MEGASCALE_PREFIX)}
    marks = {name: environ[name] for name in (TOKEN_VARIABLE, TaskFiles.VARIABLE) if name in environ}
    return {"PYTHONUNBUFFERED": "1"} | told | user | megascale | task.to_env() | marks


def run_arguments(name: str, spec: ContainerSpec, variables: Mapping[str, str], task: JobInfo) -> list[str]:
    """Return the arguments of the engine's client that run a container in the foreground.

    Args:
        name: the container's name.
        spec: what the user asks for. Its options come after ours, and so win over them.
        variables: the container's variables.
        task: the task's place in its gang.
    """
    ours = ["--privileged", "--net=host", "--ipc=host", f"--name={name}", f"--label={LABEL}={name}"]
    mounts = [f"--volume={path}:{path}" for path in _directories(variables, task)]
    env = [f"--env={n}={v}" if changes_the_client(n) else f"--env={n}" for n, v in sorted(variables.items())]
    return ["run", *ours, *mounts, *env, *spec.options, spec.image, *spec.command]


def client_environment(environ: Mapping[str, str], variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the client: its own, and the values of the variables that it is to pass on."""
    return dict(environ) | {name: value for name, value in variables.items() if not changes_the_client(name)}


def changes_the_client(name: str) -> bool:
    """Return whether a variable changes what the engine's client does, such as which daemon it talks to."""
    return name.startswith(_CHANGES_THE_CLIENT) or name in _CHANGES_THE_CLIENT_TOO


def _directories(variables: Mapping[str, str], task: JobInfo) -> list[str]:
    """Return the host's directories that the container sees: of the task's notices, and of its job."""
    prefix = variables.get(TaskFiles.VARIABLE)
    return [str(path) for path in (prefix and Path(prefix).parent, task.local_dir) if path]
