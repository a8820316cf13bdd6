"""The history in the Controller: it writes rows in a thread, and answers statements. No job and no dispatch waits.

Every `LOOK_S` it looks at the jobs that have changed, and hands rows to a thread. Rows that can't be written wait in a
queue of bounded length. Beyond it they are lost, with a warning.
"""

import asyncio
import contextlib
import logging
import math
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import iris_ray
from iris_ray.actors.calls.background import BackgroundTasks
from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.controller.progress_board import with_latest
from iris_ray.actors.controller.services import Controller, ControllerPart, Happening, PlainValue, Published
from iris_ray.actors.protocol.messages import AttemptOrder
from iris_ray.actors.protocol.status import JobFacts
from iris_ray.errors import HistoryUnavailableError
from iris_ray.fair_limits import Turns
from iris_ray.history.calls import HistoryCalls, HistoryRows, Value
from iris_ray.history.event_rows import EventRows
from iris_ray.history.history_file import NAME, Bounds, HistoryFile, is_passing
from iris_ray.history.reading import MOST_SECONDS, read_history
from iris_ray.history.rows import EventRow, JobStory, Record, curve_point, is_kept, job_story, sample, stage
from iris_ray.history.settings import HISTORY, HISTORY_DAYS, HISTORY_MB, HISTORY_PARQUET
from iris_ray.model.cluster_settings import OFF, ON

logger = logging.getLogger(__name__)

LOOK_S = 2.0
SAMPLE_S = 60.0
POINTS = 500
"""A job's curves get a point a minute; later, one whenever the job's age has grown by 1 / `POINTS`."""
REFRESH_S = 3600.0
"""The rows of jobs that run are written anew at this interval, and what is old is deleted."""
TURN_S = 0.02
"""The event loop makes rows for this time, in seconds, before it turns to other work."""
MOST_WAITING = 20_000
"""The limit for jobs, attempts and events that wait to be written. Beyond it the oldest are lost."""
AT_ONCE = 2000
"""The limit for the records of one transaction."""
SAY_S = 60.0
"""The shortest time between two warnings."""
COPY_S = 3600.0
"""The copy in Parquet files is brought up to date at this interval; a copy may take as long."""
FRESH_S = 2.0
"""How long a statement waits until recent changes are written."""
AT_A_TIME = 2
"""The limit for statements that run at a time, each in a process of its own."""
PATIENCE_S = MOST_SECONDS + 3.0
"""How long a statement waits for its turn, which is longer than two others may run. Then it is refused, so a crowd of
slow ones is not waited for one by one."""


class HistoryInController(ControllerPart):
    """The history of one Controller. See `HistoryCalls`."""

    calls = (HistoryCalls,)

    def __init__(self, controller: Controller, running: RunningPart[Happening]) -> None:
        super().__init__(controller, running)
        self._state = controller.state
        self._progress = controller.progress
        self._clock = controller.clock
        self._event_rows = EventRows(controller.state)
        self._settings: int | None = None  # the version of the cluster's settings that it follows
        self._file: HistoryFile | None = None
        self._chosen: tuple[object, ...] | None = None
        self._is_open = False  # whether the jobs that were lost before this Controller are marked in the file
        self._begun = 0  # `HistoryFile.begun` at that time
        self._read: int | None = None  # the version of the jobs that the rows show
        self._stages: dict[str, tuple[object, ...]] = {}  # job id → the stage that its rows show
        self._curves: dict[str, float] = {}  # job id → when the next point of its curves is due
        self._waiting: deque[Record] = deque()
        self._weight = 0
        self._lost = 0
        self._trouble: str | None = None
        self._said_at = -math.inf
        self._sampled_at = self._refreshed_at = self._tidied_at = -math.inf
        self._looking = asyncio.Lock()
        self._background = BackgroundTasks()
        self._next: asyncio.Task[None] | None = None  # the next look, for which statements wait
        self._readers = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="reading the history")
        self._turns = Turns(AT_A_TIME)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copying the history")
        self._copy_to = OFF
        self._copying: asyncio.Task[None] | None = None
        self._copied_at: float | None = None  # the beginning of the last copy that is complete
        self._copy_due_at = -math.inf
        self._copy_trouble: str | None = None

    async def started(self) -> None:
        self._follow_settings()
        epoch = str(self.controller.epoch())
        if self.recorded_value() != epoch.encode():  # else an earlier part of this Controller has written the row
            what = f"Controller {epoch} of iris_ray {iris_ray.__version__} has begun"
            self._add(EventRow(self._clock.wall(self._clock.now()), "controller", epoch, None, what))

    async def happened(self, events: list[Happening]) -> None:
        self._follow_settings()
        now = self._clock.now()
        rows = self._event_rows.of([e for e in events if not isinstance(e, AttemptOrder)], self._clock.wall(now), now)
        if self._file is not None:
            for row in rows:
                self._add(row)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    def close(self) -> None:
        super().close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._copier.shutdown(wait=False, cancel_futures=True)

    def _follow_settings(self) -> None:
        """Write to the file that the cluster's settings name from now on."""
        settings = self._state.settings
        if settings.version == self._settings:
            return
        self._settings, value = settings.version, settings.value
        if (copy_to := value(HISTORY_PARQUET)) != self._copy_to:
            self._copy_to, self._copied_at, self._copy_due_at, self._copy_trouble = copy_to, None, -math.inf, None
        chosen = where, days, megabytes = value(HISTORY), value(HISTORY_DAYS), value(HISTORY_MB)
        if chosen != self._chosen:
            self._chosen = chosen
            try:
                directory = self.controller.directory() if where == ON else None if where == OFF else Path(where)
            except OSError as error:
                directory = None
                self._say(f"there is no history: {error}")
            self._file = None if directory is None else HistoryFile(directory / NAME, Bounds(days, megabytes))
            self._is_open = False
            self._write_all_anew()
        self._publish()

    def _publish(self) -> None:
        """Tell `about` where the file and its copy are, and what is wrong with them."""
        path = str(self._file.path) if self._file else None
        found: dict[str, PlainValue] = {"path": path, "trouble": self._trouble, "lost": self._lost}
        if self._copy_to != OFF:
            found |= {"parquet_to": self._copy_to, "parquet_as_of": self._copied_at}
            found["parquet_trouble"] = self._copy_trouble
        self.publish(Published(about=found))

    # -- rows --------------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Write the changes since the last look."""
        async with self._looking:
            self._next = None
            self._follow_settings()
            if (file := self._file) is None:  # a setting may name another one meanwhile
                return
            try:
                now = self._clock.now()
                if refreshes := now >= self._refreshed_at + REFRESH_S:
                    self._refreshed_at = now
                await self._collect(now, refreshes)
                if now >= self._sampled_at + SAMPLE_S:
                    self._sampled_at = now
                    self._add(sample(self._state, self._clock.wall(now)))
                    self._add_curves(now)
                await self._write(file)
                if self._trouble is None and now >= self._tidied_at + REFRESH_S:
                    self._tidied_at = now
                    await self.in_thread(file.tidy)
            except Exception as error:
                self._failed(error, 0)
            if self._copy_to != OFF and self._copying is None and now >= self._copy_due_at and file.path.exists():
                self._copy_due_at = now + COPY_S
                self._copying = self._background.start(self._copy(file.path, self._copy_to), "copying the history")
            self._publish()

    async def _collect(self, now: float, refreshes: bool) -> None:
        """Make rows of the changed jobs, and pause every `TURN_S`."""
        changes, jobs = self._state.job_changes, self._state.jobs
        changed = None if self._read is None else changes.since(self._read)
        self._read = changes.version
        running = (job_id for job_id in self._stages if refreshes)
        turn_ends = time.monotonic() + TURN_S
        for job_id in dict.fromkeys(chain(jobs if changed is None else changed, running)):
            if (job := jobs.get(job_id)) is None:
                self._stages.pop(job_id, None)
                continue
            try:
                if not is_kept(job):
                    continue
                found = stage(job)
                if self._stages.get(job_id) == found and (not refreshes or job.over is not None):
                    continue
                self._stages[job_id] = found
                heard = self._progress.of(job_id)
                facts = JobFacts(job, self._state, self._clock.wall, heard)
                self._add(job_story(facts, with_latest(job.times, heard), now))
            except Exception:
                logger.exception("the history can't hold %s; other jobs are not affected", job_id)
            if time.monotonic() > turn_ends:
                await asyncio.sleep(0)
                turn_ends = time.monotonic() + TURN_S

    def _add_curves(self, now: float) -> None:
        """Add points to the curves of running jobs, less often the older a job is."""
        for job_id in [job_id for job_id, due in self._curves.items() if job_id not in self._stages or due <= now]:
            del self._curves[job_id]
        for job_id in self._stages.keys() - self._curves.keys():
            job, heard = self._state.jobs.get(job_id), self._progress.of(job_id)
            if job is None or job.over is not None or heard is None:
                continue
            point = curve_point(JobFacts(job, self._state, self._clock.wall, heard), now)
            if point is not None:
                self._curves[job_id] = now + max(SAMPLE_S, (now - job.submitted_at) / POINTS) - 1.0
                self._add(point)

    def _add(self, record: Record) -> None:
        self._waiting.append(record)
        self._weight += _weight(record)
        self._lose_the_oldest()

    def _lose_the_oldest(self) -> None:
        before = self._lost
        while self._weight > MOST_WAITING:
            self._weight -= _weight(self._waiting.popleft())
            self._lost += 1
        if self._lost > before:
            self._say(f"the history is behind ({self._trouble or 'its disk is slow'})")

    # -- the file ----------------------------------------------------------------------------------------------------

    async def _write(self, file: HistoryFile) -> None:
        """Write the waiting records; keep them if the error may pass."""
        if not self._is_open:
            await self.in_thread(file.close_lost, list(self._state.jobs))
            self._is_open, self._begun = file is self._file, file.begun
        alone = 0  # of the next records: one of them can't be written
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(1 if alone > 0 else min(AT_ONCE, len(self._waiting)))]
            alone -= 1
            self._weight -= sum(map(_weight, batch))
            try:
                await self.in_thread(file.write, batch)
            except Exception as error:
                one_is_bad = len(batch) > 1 and not isinstance(error, HistoryUnavailableError)
                if (passes := is_passing(error)) or one_is_bad:
                    self._waiting.extendleft(reversed(batch))
                    self._weight += sum(map(_weight, batch))
                    alone = len(batch)
                if passes or not one_is_bad:
                    self._failed(error, 0 if passes else len(batch))
                if passes:
                    self._lose_the_oldest()
                    return
        self._trouble = None
        if self.recorded_value() != (epoch := str(self.controller.epoch()).encode()):
            self.record(epoch)
        if file.begun != self._begun:  # it was corrupt, or has been moved away
            self._begun = file.begun
            self._write_all_anew()

    async def _copy(self, path: Path, target: str) -> None:
        """Bring the copy in Parquet files up to date, in a process of the lowest priority."""
        began = time.time()
        words = ["nice", "-n", "19", sys.executable, "-m", "iris_ray.history.parquet", str(path), target]
        try:
            trouble = await asyncio.get_running_loop().run_in_executor(self._copier, _said_by, words)
            if target == self._copy_to:
                self._copy_trouble = trouble
                self._copied_at = began if trouble is None else self._copied_at
                if trouble is not None:
                    logger.warning("the history is not copied to %s: %s; no job is affected", target, trouble)
                self._publish()
        finally:
            self._copying = None

    def _write_all_anew(self) -> None:
        self._read = None
        self._stages.clear()

    def _failed(self, error: Exception, lost: int) -> None:
        self._lost += lost
        self._trouble = str(error) if isinstance(error, HistoryUnavailableError) else f"{type(error).__name__}: {error}"
        self._say(f"the history can't be written ({self._trouble})")

    def _say(self, what: str) -> None:
        """Log a problem with the numbers of waiting and lost records, at most once in `SAY_S`."""
        now = time.monotonic()
        if now >= self._said_at + SAY_S:
            self._said_at = now
            logger.warning("%s: %d records wait, %d are lost; no job is affected", what, len(self._waiting), self._lost)

    async def ask_history(self, sql: str, parameters: Mapping[str, Value], most_rows: int, user: str) -> HistoryRows:
        self._follow_settings()
        if (file := self._file) is None:
            raise HistoryUnavailableError(
                "this cluster keeps no history; an operator switches it on: iris-ray cluster settings set history=on"
            )
        self._next = self._next or self._background.start(self.look(), "looking for what the history lacks")
        await asyncio.wait([self._next], timeout=FRESH_S)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await stack.enter_async_context(self._turns.turn(user))
            except TimeoutError:
                raise HistoryUnavailableError(
                    f"other statements on the history have run for {PATIENCE_S:g} s; try again"
                ) from None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._readers, read_history, file.path, sql, parameters, most_rows)


def _said_by(words: list[str]) -> str | None:
    """Run a program. Return the last line that it prints if it fails, else None."""
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COPY_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return None if done.returncode == 0 else (done.stdout.strip().splitlines() or ["it was killed"])[-1]


def _weight(record: Record) -> int:
    return 1 + len(record.attempts) if isinstance(record, JobStory) else 1
