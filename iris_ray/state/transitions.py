"""The one function that moves a task from one state to another, by the table of legal moves."""

from iris_ray.errors import IllegalTransitionError
from iris_ray.model.ids import task_id
from iris_ray.model.jobs import Gang, Job, Task
from iris_ray.model.lifecycle import TRANSITIONS, TaskState

_TO_SUCCESS = (TaskState.PENDING, TaskState.ASSIGNED, TaskState.RUNNING, TaskState.SUCCEEDED)
WAY_TO_SUCCESS = {state: _TO_SUCCESS[i + 1 :] for i, state in enumerate(_TO_SUCCESS)}
"""The states that a task still passes through until it has succeeded."""


def new_tasks(job_id: str, count: int) -> list[Task]:
    """Return the tasks of a job, all pending."""
    return [Task(task_id(job_id, index), index) for index in range(count)]


def move(job: Job, gang: Gang, task: Task, new: TaskState, error: str | None = None) -> None:
    """Move a task, and keep the counts of its job and gang.

    Raises:
        IllegalTransitionError: the table does not hold this move.
    """
    if new not in TRANSITIONS[task.state]:
        raise IllegalTransitionError(f"{task.task_id} (attempt {gang.attempt}): {task.state.name} → {new.name}")
    job.counts[task.state] -= 1
    if not job.counts[task.state]:
        del job.counts[task.state]
    job.counts[new] += 1
    gang.succeeded += (new is TaskState.SUCCEEDED) - (task.state is TaskState.SUCCEEDED)
    task.state, task.error = new, error


def move_all(job: Job, gang: Gang, new: TaskState, error: str | None = None) -> None:
    """Move every task of a gang."""
    for task in gang.tasks:
        move(job, gang, task, new, error)
