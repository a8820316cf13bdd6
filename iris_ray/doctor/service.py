"""The service ``doctor``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "doctor",
    commands={
        "cluster doctor": Command(
            "iris_ray.doctor.cli:doctor",
            "Check this machine, the cluster and each of its TPU hosts; say what to do.",
            "Every day",
        ),
        "job bug-report": Command(
            "iris_ray.doctor.bug_report:bug_report", "One file about a job, to read and then to send.", "Inside a job"
        ),
    },
)
