"""The table in docs/failures.md says what the code does: every row is played, and no row is without a story."""

import asyncio
import re
from collections.abc import Callable

import pytest

from iris_ray.actors.pool.attempt import AT_ONCE_S, RUNNING_DELAY_S
from iris_ray.actors.pool.attempt_end import FAULTS
from iris_ray.actors.pool.attempt_place import StopRequest
from iris_ray.actors.protocol.messages import HOST_SILENCE_S
from iris_ray.model.jobs import MOST_FAILED_LAUNCHES, Job
from iris_ray.model.lifecycle import JobState, TaskState
from iris_ray.model.notices import Notice, NoticeKind
from iris_ray.model.outcomes import (
    DID_NOT_RUN,
    EndKind,
    HostEvidence,
    ProviderState,
    ProviderWord,
    TaskEnd,
    TaskKey,
    TpuFailed,
    TpuResult,
    TpuRunError,
)
from iris_ray.model.verdict import judge_gang
from iris_ray.state.attempt_ends import MOST_LAUNCHES_BEFORE_A_RUN, QUICK_ENDS_ARE_FAILURES, QUICK_S
from iris_ray.state.events import JobCancelledEvent, PoolRestartedEvent, TaskDispatchFailedEvent
from tests.docs.pages import REPOSITORY
from tests.support.worlds import World, charged

TEXT = (REPOSITORY / "docs" / "failures.md").read_text()
TABLE = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for line in TEXT.partition("|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
]
KEY, PEER = TaskKey(0, 0), TaskKey(0, 1)
PREEMPTION, FAILURE, NOTHING = "a preemption", "a failure", "nothing, but a pause"
GONE, NOTICED = "it died", "it had notice"
Row = tuple[str, str]


def name(result: TpuResult) -> str:
    return result.kind.value if isinstance(result, TpuRunError) else type(result).__name__


def judged(
    kind: EndKind | None,
    host: HostEvidence,
    cause: tuple[TaskKey, TpuResult] | None = None,
    was_told: bool = False,
) -> Row:
    """A task ends like that, and its peer is stopped."""
    peer = TaskEnd(EndKind.STOPPED, 4.0, error="the gang is over")
    end = None if kind is None else TaskEnd(kind, 5.0, b"", error="what happened")
    verdict = judge_gang({KEY: end, PEER: peer}, {KEY: host, PEER: HostEvidence()}, cause, was_told)
    assert verdict.cause == KEY
    return name(verdict.result), PREEMPTION if verdict.charged_as is TaskState.WORKER_FAILED else FAILURE


def moved(kind: NoticeKind) -> TpuResult:
    async def asked() -> TpuResult:
        stop = StopRequest()
        stop.move(Notice(kind, "it is to move", 9.0), "all its tasks have saved")
        assert stop.cause is not None
        return stop.cause[1]

    return asyncio.run(asked())


def did_not_run(*kinds: EndKind) -> Row:
    assert set(kinds) <= DID_NOT_RUN
    assert set(kinds) <= FAULTS.keys()
    (called,) = {judged(kind, HostEvidence())[0] for kind in kinds}
    return called, paused(lambda world, job: world.do(failed_launch(world, job)))


def two_slices() -> World:
    world = World()
    for slice_name in "ab":
        world.add_slice(slice_name)
    return world


def failed_launch(world: World, job: Job) -> TaskDispatchFailedEvent:
    return TaskDispatchFailedEvent(job.current_attempt(job.gang), "no", world.now)


def paused(end: Callable[[World, Job], object]) -> str:
    """Whether a gang that has not begun to run is charged nothing for such an end, and pauses."""
    world = two_slices()
    job = world.submit()
    world.schedule()
    end(world, job)
    assert (charged(job), job.state, job.gang.not_before > world.now) == ((0, 0), JobState.PENDING, True)
    return NOTHING


def pool_dies(returned: bool) -> Row:
    world = two_slices()
    job = world.start_tasks(replicas=2, max_retries_preemption=1)
    if returned:
        world.report(job, TaskState.SUCCEEDED, 0)
    world.do(PoolRestartedEvent("pool-a"))
    assert job.gangs[0].preemptions == 1
    return TpuFailed.__name__, PREEMPTION


def launches_of_a_new_job() -> Row:
    world = two_slices()
    job = world.submit()
    for _ in range(MOST_LAUNCHES_BEFORE_A_RUN):
        assert job.state is JobState.PENDING
        world.now = max(world.now, job.gang.not_before)
        world.schedule()
        world.do(failed_launch(world, job))
        world.confirm(job)
    assert job.state is JobState.UNSCHEDULABLE
    return "LaunchesFailedError", "the job ends"


def launches_of_a_job_that_ran() -> Row:
    world = two_slices()
    job = world.start(max_retries_preemption=1)
    world.lose(f"{job.gang.groups[0]}-0")
    world.confirm(job)
    before = job.preemptions
    for _ in range(2 * MOST_LAUNCHES_BEFORE_A_RUN):
        world.now = max(world.now, job.gang.not_before, job.avoided_until)
        world.schedule()
        world.do(failed_launch(world, job))
        world.confirm(job)
    assert (job.state, job.preemptions) == (JobState.PENDING, before)
    return "–", NOTHING


def cancelled() -> Row:
    world = two_slices()
    job = world.start()
    world.do(JobCancelledEvent("job", "not wanted"))
    assert job.state is JobState.KILLED
    return "TpuCancelled", "the job ends"


def same(*rows: Row) -> Row:
    (row,) = set(rows)
    return row


ON_A_SOUND_HOST = HostEvidence()
PROVIDER = HostEvidence(GONE, provider=ProviderWord(ProviderState.PREEMPTED, "it was taken"))
STORIES: dict[str, Callable[[], Row]] = {
    "the host is gone, or its processes, and it had notice": lambda: judged(None, HostEvidence(GONE, NOTICED)),
    "the task's process ended by itself on a host": lambda: judged(EndKind.CRASHED, HostEvidence(draining=NOTICED)),
    "a host had notice, and the gang": lambda: judged(
        EndKind.STOPPED, ON_A_SOUND_HOST, (KEY, moved(NoticeKind.PREEMPTION)), True
    ),
    "the host is gone, or has not answered": lambda: same(
        judged(None, HostEvidence(GONE)), judged(EndKind.RETURNED, HostEvidence(GONE))
    ),
    "a process of iris_ray on the host": lambda: same(judged(None, HostEvidence("it is gone")), pool_dies(False)),
    "a single task had returned": lambda: pool_dies(True),
    "the host is gone without notice": lambda: judged(None, PROVIDER),
    "an exception, also a": lambda: same(*(judged(k, ON_A_SOUND_HOST) for k in (EndKind.RAISED, EndKind.EXITED))),
    "an `OSError`": lambda: judged(EndKind.DISK_ERROR, ON_A_SOUND_HOST),
    "a signal, an abort": lambda: judged(EndKind.CRASHED, ON_A_SOUND_HOST),
    "`MemoryError`": lambda: same(
        judged(EndKind.OUT_OF_MEMORY, ON_A_SOUND_HOST), judged(None, HostEvidence(out_of_memory="killed"))
    ),
    "a process died before any code": lambda: did_not_run(EndKind.NEVER_STARTED, EndKind.HOST_UNFIT),
    "the job's SlicePoolManager is gone before": lambda: (
        TpuFailed.__name__,
        paused(lambda world, _: world.do(PoolRestartedEvent("pool-a"))),
    ),
    "the gang moved to more slices": lambda: same(
        *((name(moved(kind)), "nothing") for kind in (NoticeKind.GROWTH, NoticeKind.EVICTION))
    ),
    "cancelled": cancelled,
    "19 launches in a row": launches_of_a_new_job,
    "any number of launches": launches_of_a_job_that_ran,
}
"""How each row begins, and what becomes of it: what it is called, and what it costs."""
ELSEWHERE = {
    "after a notice: an exit code": "tests/unit/model/test_verdict.py",
    "no task has called `heartbeat()` for `stall_timeout`": "tests/unit/actors/pool/test_attempt.py",
    "no task has called `heartbeat()` for much longer": "tests/unit/actors/pool/test_ends.py",
    "no host can set up": "tests/unit/actors/pool/test_ends.py",
    "[no host has a version": "tests/unit/actors/pool/test_versions.py",
    "a host is found lost within half a second": "tests/unit/actors/pool/test_ends.py",
}
"""Rows that other tests play."""


@pytest.mark.parametrize("begins", STORIES)
def test_row_says_what_the_code_does(begins: str) -> None:
    ((_, called, costs),) = [row for row in TABLE if row[0].startswith(begins)]
    found = STORIES[begins]()
    assert (called, costs.partition(";")[0]) == found


def test_every_row_has_a_story() -> None:
    known = (*STORIES, *ELSEWHERE)
    assert [row[0] for row in TABLE if not any(row[0].startswith(begins) for begins in known)] == []
    assert len(TABLE) == len(known)
    assert all((REPOSITORY / path).exists() for path in ELSEWHERE.values())


def test_numbers_on_the_page_are_those_of_the_code() -> None:
    assert (HOST_SILENCE_S, AT_ONCE_S, RUNNING_DELAY_S, QUICK_S, MOST_FAILED_LAUNCHES) == (5.0, 0.5, 0.1, 10.0, 10)
    words = re.sub(r"\s+", " ", TEXT)
    assert QUICK_ENDS_ARE_FAILURES == 5
    assert "If five attempts of a gang in a row have ended within 10 s" in words
    assert f"fewer than {MOST_LAUNCHES_BEFORE_A_RUN} in a row" in words
