"""The service of evidence on a host: keeps files about tasks that crash or hang, and samples of the chips' use."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from iris_ray.actors.calls.service_parts import RunningPart
from iris_ray.actors.host.redirect import StartedTask
from iris_ray.actors.host.services import DeadTask, Host, HostPart
from iris_ray.evidence.calls import EvidenceCalls
from iris_ray.evidence.dumps import prepare
from iris_ray.evidence.files import ChipSample, Place, keep_crash, keep_hang, look_at, place_of
from iris_ray.model.lifecycle import TaskAttemptId
from iris_ray.processes.subtree import descendants

SAMPLE_S, MOST_SAMPLES = 15.0, 240
"""The pause between two looks at the tasks and their chips, and how many samples are remembered: those of an hour."""


class EvidenceOnHost(HostPart):
    """See `EvidenceCalls`."""

    calls = (EvidenceCalls,)

    def __init__(self, host: Host, running: RunningPart[Any]) -> None:
        super().__init__(host, running)
        self._samples: deque[ChipSample] = deque(maxlen=MOST_SAMPLES)
        self._places: Mapping[int, Place] = {}
        self._clock = time.time() - time.monotonic()
        self._directory = os.readlink("/proc/self/cwd")

    async def run(self) -> None:
        """Look now and then, since neither libtpu nor a process that has ended can be asked about the past."""
        await self.in_thread(prepare, self.host.directory())
        while True:
            pids = [pid for pid, watch in self.host.watches.items() if watch.runs]
            if pids and self.host.devices is not None:
                self._places, sample = await self.in_thread(look_at, pids, time.time())
                self._samples.extend([] if sample is None else [sample])
            await asyncio.sleep(SAMPLE_S)

    async def keep_evidence(self, pid: int) -> None:
        files, samples = self.host.watches[pid].files, list(self._samples)
        task = StartedTask.read(files)
        if task is None:  # it has just ended
            return
        attempt = TaskAttemptId(task.job_id, task.task_index, task.attempt)
        pids = [pid, *await self.in_thread(descendants, pid)]
        began_at = self._now_called(files.started.stat().st_mtime)
        place = self._places.get(pid) or await self.in_thread(place_of, pid) or Place.of(os.environ)
        await self.in_thread(keep_hang, self.host.directory(), attempt, pids, began_at, place, samples)

    async def died(self, task: DeadTask) -> str:
        place = self._places.get(task.pid) or Place.of(os.environ | task.launch.env, self._directory)
        info = task.launch.info
        attempt = TaskAttemptId(info.job_id, info.task_index, info.attempt)
        began_at = self._now_called(task.began_at)
        return await self.in_thread(keep_crash, self.host.directory(), attempt, task.pids, began_at, place)

    def _now_called(self, at: float) -> float:
        """Return a time of the past by the clock as it is now, if that was set back meanwhile."""
        return at + min(0.0, time.time() - time.monotonic() - self._clock)
