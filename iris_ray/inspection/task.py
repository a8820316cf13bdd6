"""In a task: listen for requests of traces, also in a program that the task's process has started."""

from iris_ray.inspection.jax_traces import answer_trace_requests
from iris_ray.model.job_info import JobInfo


def listen_in_program(_: JobInfo) -> None:
    """Listen in a process of a task that runs JAX, unless it does so already."""
    answer_trace_requests()
