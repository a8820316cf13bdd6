"""What the history costs: the size of its file, how fast it is written, and how fast it answers.

    python benchmarks/history.py                    # 10,000 jobs and a year of samples; about half a minute
    python benchmarks/history.py --jobs 100000

Each job had two attempts, since it crashed once, and six kinds of time. Each hour has 40 rows of users. Writing happens
in the history's own thread; the event loop only makes the rows.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from figures import row
from iris_ray.actors.protocol.status import Heard, JobFacts
from iris_ray.history.history_file import HOUR_S, NAME, Bounds, HistoryFile
from iris_ray.history.questions import Question, Wanted, jobs_question, report_questions, users_question
from iris_ray.history.reading import read_history
from iris_ray.history.rows import JobStory, Sample, UserSample, job_story
from iris_ray.model.constraints import AttributeValue
from iris_ray.model.goodput import Marks
from iris_ray.model.job_spec import CoschedulingConfig, JobSpec
from iris_ray.model.lifecycle import AttemptId, TaskState
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.state import ControllerState
from iris_ray.state.events import (
    AttemptEndConfirmedEvent,
    AttemptMarkedEvent,
    GangAssignedEvent,
    JobSubmittedEvent,
    TaskStateChangedEvent,
    TimePassedEvent,
    WorkerRegisteredEvent,
)

DAY_S = 86400
HOSTS = ("a-0", "a-1", "a-2", "a-3")


def typical(state: ControllerState) -> Callable[[], JobStory]:
    """Return what makes the rows of a job on a v4-32 that crashed once."""
    for number, node_id in enumerate(HOSTS):
        facts: dict[str, str | int] = {TPU_NAME: "a", TPU_WORKER_ID: number, TPU_TOPOLOGY: "v4-32", TPU_VM_COUNT: 4}
        attributes = {name: AttributeValue(value) for name, value in facts.items()}
        state.handle_event(WorkerRegisteredEvent(node_id, "10.0.0.1", attributes, {"TPU": 4.0}))
    spec = JobSpec(job_id="train-1a2b3c4d", owner="pool", user="ann", device="v4-32", replicas=4,
                   coscheduling=CoschedulingConfig(), resources={"TPU": 4.0}, max_retries_failure=1)  # fmt: skip
    state.handle_event(JobSubmittedEvent(spec, 0.0))
    for number in (1, 2):
        attempt, began = AttemptId(spec.job_id, number), 1000.0 * number
        state.handle_event(TimePassedEvent(began))
        state.handle_event(GangAssignedEvent(spec.job_id, ("a",), (HOSTS,)))
        state.handle_event(TimePassedEvent(began + 5.0))
        for index in range(4):
            state.handle_event(TaskStateChangedEvent(attempt, index, TaskState.RUNNING))
        steps = tuple((step, 30.0 + 2.0 * step) for step in range(0, 200, 20))
        state.handle_event(AttemptMarkedEvent(attempt, Marks(steps, {"tpu_init": 8.0}, {"checkpoint_save": 5.0})))
        state.handle_event(TimePassedEvent(began + 500.0))
        if number == 1:
            error = "slice 0 (v4-32-7) worker 3: the task process crashed with signal 11 (SIGSEGV), exit code 139"
            state.handle_event(TaskStateChangedEvent(attempt, 3, TaskState.FAILED, error, 139))
        else:
            for index in range(4):
                state.handle_event(TaskStateChangedEvent(attempt, index, TaskState.SUCCEEDED))
        state.handle_event(AttemptEndConfirmedEvent(attempt))
    job = state.jobs[spec.job_id]
    heard = Heard(0, 2, 2000.0, None, 199, "loss=2.31", Marks(), (), None)
    of = JobFacts(job, state, lambda at: at, heard)
    return lambda: job_story(of, job.times, 2000.0)


def samples(until: float, days: int) -> Iterator[Sample]:
    for at in range(int(until - days * DAY_S), int(until), HOUR_S):
        users = tuple(UserSample("v4-32", "batch", f"user-{n}", "", 16.0 * n, 1.0, 32.0) for n in range(40))
        yield Sample(at, {"v4-32": 12_000.0, "v5litepod-16": 4_000.0}, users)


def write(file: HistoryFile, jobs: list[JobStory]) -> None:
    for begin in range(0, len(jobs), 2000):
        file.write(jobs[begin : begin + 2000])


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=10_000)
    count, now = parser.parse_args().jobs, time.time()
    make = typical(ControllerState())
    story = make()
    making_s = min(timed(make)[0] for _ in range(200))
    jobs = [
        replace(
            story, job={**story.job, "job_id": f"train-{n:08x}", "user": f"user-{n % 40}", "ended_at": now - 60.0 * n}
        )
        for n in range(count)
    ]
    with tempfile.TemporaryDirectory() as directory:
        file = HistoryFile(Path(directory, NAME), Bounds(400, 1 << 20))
        writing_s, _ = timed(lambda: write(file, jobs))
        size = file.path.stat().st_size
        row("rows of a job, in the event loop", f"{1e6 * making_s:.0f} µs")
        row(f"writing {count:,} jobs, in the thread", f"{writing_s:.2f} s, {1e6 * writing_s / count:.0f} µs each")
        row("size of a job", f"{size / count:.0f} bytes; of all {size / 2**20:.1f} MB")
        file.write(list(samples(now, 365)))
        row("a year of samples, 40 rows an hour", f"{(file.path.stat().st_size - size) / 2**20:.1f} MB more")
        by_user = report_questions(now - 30 * DAY_S, now, "2000-01-01", "2999-01-01", "user", now)
        questions: dict[str, list[Question]] = {
            "iris-ray history, the newest 50": [jobs_question(Wanted(), now, 50)],
            "iris-ray report": by_user,
            "the chart of 90 days by user": [users_question(now - 90 * DAY_S, now, DAY_S, "user")],
        }
        for name, asked in questions.items():
            took = sum(timed(partial(read_history, file.path, *one, 100_000))[0] for one in asked)
            row(name, f"{1000 * took:.0f} ms")


if __name__ == "__main__":
    main()
