"""The service ``inspection``, as the kernel sees it."""

from typing import Final

from iris_ray.actors.protocol.services import Command, Service

SERVICE: Final = Service(
    "inspection",
    in_process="iris_ray.inspection.jax_traces:answer_trace_requests",
    in_jax="iris_ray.inspection.jax_traces:answer_in_program",
    commands={
        "job stacks": Command("iris_ray.inspection.cli:stacks", "The stack of each thread of a job's tasks."),
        "job profile": Command(
            "iris_ray.inspection.cli:profile", "Where the time of a task goes: a picture, or a trace for XProf."
        ),
        "job chips": Command(
            "iris_ray.inspection.cli:chips", "How much the chips of a job are used: duty cycle and memory."
        ),
    },
)
