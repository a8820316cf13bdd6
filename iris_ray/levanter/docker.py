"""Levanter's way to run a program in containers from a laptop: a config that goes to a cluster by Ray's job API."""

import json
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from iris_ray.client.ray_job_config import RayJobConfig
from iris_ray.client.ray_jobs import submit_tpu_job_on_ray as submit
from iris_ray.client.run_docker_on_pod import run_docker_on_pod
from iris_ray.errors import InvalidRequestError
from iris_ray.model.container import ContainerSpec
from iris_ray.model.job_spec import MAX_RETRIES_FAILURE
from iris_ray.model.multislice import parse_num_slices
from iris_ray.model.topology import get_tpu_config

FILE = "run_docker_on_pod.json"


@dataclass(frozen=True, slots=True)
class RunDockerOnPodConfig:
    """A program to run in containers on TPU slices, with the fields and defaults of Levanter's.

    Args:
        image_id: the image.
        command: the program and its arguments, as a list, or in one str as a shell would read it.
        tpu_type: such as ``"v4-32"``.
        env: environment variables of the program.
        name: what people call the job.
        retries: further attempts after the program has failed.
        node_count: how many slices.

    Raises:
        InvalidRequestError: something can't work as written.
    """

    image_id: str
    command: Sequence[str] | str
    tpu_type: str
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    name: str = "levanter"
    retries: int = MAX_RETRIES_FAILURE
    node_count: int = 1

    def __post_init__(self) -> None:
        ContainerSpec(self.image_id, self.arguments, self.env)
        get_tpu_config(self.tpu_type)
        parse_num_slices(self.node_count)

    @property
    def arguments(self) -> Sequence[str]:
        """The program and its arguments."""
        if not isinstance(self.command, str):
            return self.command
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise InvalidRequestError(f"command is {self.command!r}, which no shell could read: {error}") from None


def submit_tpu_job_on_ray(
    config: RunDockerOnPodConfig | RayJobConfig, ray_address: str, run_id: str | None = None
) -> str:
    """`iris_ray.submit_tpu_job_on_ray`, which also takes Levanter's config.

    Such a config travels as a file, not as variables, which Ray's dashboard would show.
    """
    if not isinstance(config, RunDockerOnPodConfig):
        return submit(config, ray_address, run_id)
    with tempfile.TemporaryDirectory(prefix="iris-ray-") as folder:
        (Path(folder) / FILE).write_text(json.dumps(asdict(config)))
        command = ["python", "-m", __name__, FILE]
        return submit(RayJobConfig(command, folder), ray_address, run_id or f"run_docker_{config.name}")


def main(path: Path) -> None:
    """Run what a config in a file asks for: the job's command on the cluster."""
    config = RunDockerOnPodConfig(**json.loads(path.read_text()))
    run_docker_on_pod(
        config.image_id,
        config.arguments,
        tpu_type=config.tpu_type,
        num_slices=config.node_count,
        env=config.env,
        name=config.name,
        retries=config.retries,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
