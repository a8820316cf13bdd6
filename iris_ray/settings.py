"""Every environment variable that a user may set: its name, place, meaning and type.

No other module knows the name of such a variable. A variable is read when it is needed, not when a module is imported.
Settings of a whole cluster are not variables; see `model/cluster_settings.py`.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Variable(Generic[Value]):
    """One environment variable.

    Attributes:
        name: its name.
        where: the processes in whose environment it is set.
        meaning: its meaning, for docs/environment.md.
        parse: converts its text to its value.
    """

    name: str
    where: str
    meaning: str
    parse: Callable[[str], Value]

    def read(self, environ: Mapping[str, str] | None = None) -> Value | None:
        """Return its value; None if it is not set, or empty.

        Args:
            environ: has the variable; None: this process's environment.
        """
        text = (os.environ if environ is None else environ).get(self.name)
        return self.parse(text) if text else None


USER = Variable(
    "IRIS_USER", "driver, command line", "your name, for fair share; default: the name of your account", str
)  # the Controller checks names
TEAM = Variable(
    "IRIS_TEAM", "driver, command line", "the [team](teams.md) of your jobs, unless a job names another one", str
)  # the Controller knows the teams
NOTIFY = Variable(
    "IRIS_NOTIFY",
    "driver, command line",
    "destinations of [notifications](notifications.md) about your jobs, unless a job has its own; separated by spaces",
    str,
)  # the Controller checks it
PRIORITY = Variable(
    "IRIS_PRIORITY",
    "driver, command line",
    "the [priority band](sharing-a-cluster.md) of your jobs, unless a job names another one",
    str,
)  # the client knows the bands
PRIORITY_REASON = Variable(
    "IRIS_PRIORITY_REASON",
    "driver, command line",
    "why your jobs are in the [band](sharing-a-cluster.md) `system`, unless a job says so itself",
    str,
)  # the client checks it
MODE = Variable(
    "IRIS_RAY_MODE",
    "driver, command line",
    "`simple`, `validate` or `simulate`: jobs run [on this machine](without-tpus.md)",
    str,
)  # `local/mode.py` knows the modes and checks it
DASHBOARD_TOKEN = Variable(
    "IRIS_RAY_DASHBOARD_TOKEN",
    "where `iris-ray cluster dashboard` runs",
    "the token that readers on other machines need: see [the dashboard](dashboard.md#from-your-laptop)",
    str,
)
CODE = Variable(
    "IRIS_RAY_CODE",
    "command line",
    "0: `iris-ray run` and `submit` [don't send your checkout](running.md#how-your-code-reaches-the-hosts), except to"
    " the URL of a dashboard",
    lambda text: text != "0",
)
DEBUG = Variable("IRIS_DEBUG", "command line", "1: print tracebacks of unexpected errors", lambda text: text != "0")
HOST_DIR = Variable(
    "IRIS_RAY_HOST_DIR",
    "host, before `ray start`",
    "the directory for iris_ray's files; default: `iris_ray-<uid>` in Ray's directory, `/tmp/ray`",
    Path,
)
LOG_ARCHIVE = Variable(
    "IRIS_RAY_LOG_ARCHIVE",
    "hosts and head, before `ray start`",
    "a directory that all of them share, such as a mounted bucket, where [logs](logs.md#archive) outlive their hosts",
    Path,
)
CONTAINER_ENGINE = Variable(
    "IRIS_RAY_CONTAINER_ENGINE",
    "host, before `ray start`",
    "the command that runs [containers](docker.md); default: docker, otherwise podman",
    str,
)

GCS_BOUNDS: Mapping[str, int] = {
    "RAY_maximum_gcs_destroyed_actor_cached_count": 1000,
    "RAY_maximum_gcs_dead_worker_cached_count": 1000,
    "RAY_task_events_max_num_task_in_gcs": 1000,
    "RAY_task_events_max_dropped_task_attempts_tracked_per_job_in_gcs": 1000,
}
"""Ray's variables that bound what its GCS remembers of dead actors, dead workers and tasks, and good values for them.
Ray's default is 100,000 of each, and each pool and TPUHostActor is an actor with a worker of its own, as is the
SliceActor of a slice of more than two hosts. The GCS also keeps the ids of tasks that it has forgotten, by default a
million for each Ray job. To Ray, each call of an actor is a task: 160,000 calls of one actor cost 13 MB, and 4 MB with
this bound. They are set on the head before `ray start`."""

VARIABLES: tuple[Variable[Any], ...] = tuple(one for one in globals().values() if isinstance(one, Variable))

SENT_VARIABLES = "IRIS_RAY_SENT_VARIABLES"
"""Names of this process's variables that came from a file on a laptop, and of this variable; separated by commas."""

TEST_METADATA_HOST = "IRIS_RAY_TEST_METADATA_HOST"
"""For tests and `SimulatedCluster` only: HOST:PORT of a metadata server that iris_ray asks in place of Google's. If
Google's own variable, ``GCE_METADATA_HOST``, named it, Google's client libraries would also ask it for credentials."""
TEST_CLOUD_TPU_ENDPOINT = "IRIS_RAY_TEST_CLOUD_TPU_ENDPOINT"
"""For tests only: HOST:PORT of an emulator of the Cloud TPU API, on loopback: the traffic is not encrypted."""
TEST_COMPUTE_ENDPOINT = "IRIS_RAY_TEST_COMPUTE_ENDPOINT"
"""For tests only: HOST:PORT of an emulator of the Compute Engine API, on loopback: the traffic is not encrypted."""
TEST_HOST_SILENCE_S = "IRIS_RAY_TEST_HOST_SILENCE_S"
"""For tests only: another default of the option ``host_silence``; their machines are busy with something else."""
