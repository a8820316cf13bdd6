"""The service ``sessions``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "sessions",
    in_task="iris_ray.sessions.surroundings:keep_surroundings",
    commands={
        "job exec": Command(
            "iris_ray.sessions.cli:exec_",
            "Run a command beside a task, with its variables, on its host or all hosts.",
            "Inside a job",
        ),
        "job shell": Command("iris_ray.sessions.cli:shell", "A terminal beside a task, on its host.", "Inside a job"),
        "job port-forward": Command(
            "iris_ray.sessions.cli:port_forward", "Make a port on a task's host a port of this machine.", "Inside a job"
        ),
    },
)
