"""Levanter's way to run a program in containers from a laptop: Ray's job API sends a config to a cluster."""

import json
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from iris_ray.client.run_options import takes
from iris_ray.errors import InvalidRequestError
from iris_ray.model.options import DockerOptions, default_of

if TYPE_CHECKING:
    from iris_ray.remote.ray_jobs import RayJobConfig

FILE = "run_docker_on_pod.json"


@takes()
def run_docker_on_pod(
    image_id: str,
    command: Sequence[str],
    *,
    tpu_type: str,
    num_slices: int | Sequence[int] = 1,
    env: Mapping[str, str] | None = None,
    name: str | None = None,
    retries: int | None = None,
    container_options: Sequence[str] = (),
    **options: Unpack[DockerOptions],
) -> None:
    """`iris_ray.run_docker_on_pod`, which also takes Levanter's name of ``max_retries_failure``: ``retries``."""
    from iris_ray.docker.client import run_docker_on_pod as run

    if retries is not None:
        options["max_retries_failure"] = retries
    run(
        image_id,
        command,
        tpu_type=tpu_type,
        num_slices=num_slices,
        env=env,
        name=name,
        container_options=container_options,
        **options,
    )


@dataclass(frozen=True, slots=True)
class RunDockerOnPodConfig:
    """A program to run in containers on TPU slices, with the fields and defaults of Levanter's.

    Args:
        command: the program and its arguments, as a list, or as one str in a shell's syntax.
        tpu_type: such as ``"v4-32"``.
        env: environment variables of the program.
        retries: further attempts after the program has failed.
        node_count: the number of slices.

    Raises:
        InvalidRequestError: a field can't work as written.
    """

    image_id: str
    command: Sequence[str] | str
    tpu_type: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    name: str = "levanter"
    retries: int = default_of("max_retries_failure")
    node_count: int = 1

    def __post_init__(self) -> None:
        from iris_ray.docker.client import make_docker_request

        make_docker_request(self.image_id, self.arguments, **self.options)
        object.__setattr__(self, "env", dict(self.env))  # another mapping may not be picklable

    @property
    def arguments(self) -> Sequence[str]:
        """The program and its arguments."""
        if not isinstance(self.command, str):
            return self.command
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise InvalidRequestError(f"command is {self.command!r}, which no shell could read: {error}") from None

    @property
    def options(self) -> dict[str, Any]:
        """The other arguments of `run_docker_on_pod`."""
        return {
            "tpu_type": self.tpu_type,
            "num_slices": self.node_count,
            "env": self.env,
            "name": self.name,
            "max_retries_failure": self.retries,
        }


def submit_tpu_job_on_ray(
    config: "RunDockerOnPodConfig | RayJobConfig", ray_address: str, run_id: str | None = None
) -> str:
    """`iris_ray.submit_tpu_job_on_ray`, which also takes Levanter's config.

    Such a config travels as a file, not as variables, which Ray's dashboard would show.
    """
    from iris_ray.remote.ray_jobs import RayJobConfig
    from iris_ray.remote.ray_jobs import submit_tpu_job_on_ray as submit

    if not isinstance(config, RunDockerOnPodConfig):
        return submit(config, ray_address, run_id)
    with tempfile.TemporaryDirectory(prefix="iris-ray-") as folder:
        (Path(folder) / FILE).write_text(json.dumps(asdict(config)))
        command = ["python", "-m", __name__, FILE]
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"run_docker_{config.name}")[
            :100
        ]  # the characters and length of Ray's ids
        return submit(RayJobConfig(command, folder), ray_address, run_id or name)


def main(path: Path) -> None:
    """Run the job of a config file, as the command of a Ray job on the cluster."""
    from iris_ray.docker.client import run_docker_on_pod as run

    config = RunDockerOnPodConfig(**json.loads(path.read_text()))
    run(config.image_id, config.arguments, **config.options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
