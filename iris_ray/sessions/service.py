"""The service ``sessions``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "sessions",
    in_task="iris_ray.sessions.surroundings:keep_surroundings",
    commands={
        "job exec": Command(
            "iris_ray.sessions.cli:exec_",
            "Run a command on a task's host, or on all hosts of a job.",
            "Inside a job",
        ),
        "job shell": Command("iris_ray.sessions.cli:shell", "Open a terminal on a task's host.", "Inside a job"),
        "job cp": Command(
            "iris_ray.sessions.cp:cp", "Copy files to or from a task's host, whole or not at all.", "Inside a job"
        ),
        "job port-forward": Command(
            "iris_ray.sessions.cli:port_forward", "Forward a port of this machine to a task's host.", "Inside a job"
        ),
    },
)
