"""The history: jobs, events and samples are written, old rows go, and everything is read."""

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from iris_ray.errors import HistoryUnavailableError
from iris_ray.history import history_file
from iris_ray.history.history_file import Bounds, HistoryFile
from iris_ray.history.rows import EventRow, JobStory, Record, Sample, UserSample
from tests.proofs.every_operation.operations import Operations
from tests.proofs.every_operation.runs import Said, Scenario
from tests.support.histories import NOON, story
from tests.support.worlds import World

DAY_S = 86_400.0
connect = sqlite3.connect


def history() -> Scenario:
    return Scenario(
        "history",
        _prepare,
        _act,
        _judge,
        (OSError, sqlite3.Error, HistoryUnavailableError),
        {"each record is a transaction": _commit_each, "a full disk is taken for a corrupt file": _set_aside_always},
    )


def _file(place: Path) -> HistoryFile:
    return HistoryFile(place / "head" / history_file.NAME, Bounds(10, 100), lambda: NOON)


def _ended() -> JobStory:
    world = World("a")
    job = world.start(user="ann")
    world.now += 60.0
    world.finish(job)
    return story(world, job)


def steps() -> list[list[Record]]:
    """Return what is written, one writing after the other."""
    ended = _ended()
    users = (UserSample("v4-16", "batch", "ann", "", 8.0),)
    steps: list[list[Record]] = []
    for step, age_d in enumerate((30.0, 2.0, 0.0, 0.0)):
        at = NOON - age_d * DAY_S
        jobs = [replace(ended, job={**ended.job, "job_id": f"job-{step}-{n}", "ended_at": at}) for n in range(3)]
        event = EventRow(at + step, "host lost", f"a/{step}", None, "gone")
        steps.append([*jobs, event, Sample(at, {"v4-16": 16.0}, users)])
    return steps


def _prepare(place: Path) -> None:
    _file(place).write(steps()[0])


def _act(place: Path, said: Said, operations: Operations) -> None:
    file = _file(place)
    for step, records in enumerate(steps()):
        if step:
            said("writes", step)
            file.write(records)
            said("done", step)
        if step == 2:
            said("tidies", step)
            file.tidy()
            said("tidied", step)


def _judge(place: Path, said: list[list[Any]]) -> None:
    found = {(word, step) for word, step in said}
    path = place / "head" / history_file.NAME
    with closing(connect(path)) as db:
        jobs = [job_id for (job_id,) in db.execute("SELECT job_id FROM jobs")]
        subjects = [subject for (subject,) in db.execute("SELECT subject FROM events")]
        orphans = db.execute("SELECT count(*) FROM attempts WHERE job NOT IN (SELECT id FROM jobs)").fetchone()
    for step in range(4):
        there = {job_id for job_id in jobs if job_id.startswith(f"job-{step}-")}
        there |= {subject for subject in subjects if subject == f"a/{step}"}
        whole = {*(f"job-{step}-{number}" for number in range(3)), f"a/{step}"}
        begun, done = ("writes", step) in found or step == 0, ("done", step) in found or step == 0
        if step == 0 and ("tidies", 2) in found:
            assert there in (whole, set()) if ("tidied", 2) not in found else not there, (step, there)
        else:
            assert there == whole if done else there in (whole, set()) if begun else not there, (step, there, said)
    assert orphans == (0,)
    assert sorted(one.name for one in path.parent.iterdir() if one.name != f"{path.name}-journal") == [path.name]
    file = _file(place)
    for records in steps():
        file.write(records)
    file.tidy()
    with closing(connect(path)) as db:
        assert db.execute("SELECT count(*) FROM jobs").fetchone() == (9,)
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


# -- defects, put in on purpose ----------------------------------------------------------------------------------------


def _commit_each() -> None:
    write = HistoryFile._write

    def written(file: HistoryFile, db: sqlite3.Connection, records: list[Record]) -> None:
        for record in records:
            write(file, db, [record])
            db.commit()

    HistoryFile._write = written  # type: ignore[method-assign, assignment]


def _set_aside_always() -> None:
    history_file._code = lambda error: sqlite3.SQLITE_CORRUPT
