"""What there is on a cluster, read again and again, and how it grows with the number of jobs."""

import contextlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import psutil
import ray
from ray._private import state as ray_state
from ray.experimental import internal_kv
from ray.util.placement_group import placement_group_table

from iris_ray.logs.files import logs_directory
from iris_ray.state.job_table import FINISHED_JOBS_KEPT

MB = 1e6
HOLDER: Final = "Holder"
"""The class of a plain actor that has an actor on each host, if the cluster has one."""
OUR_ACTORS: Final = ("Controller", "SlicePoolManager", "SliceActor", "TPUHostActor")
OF_A_CALLER: Final = OUR_ACTORS[1:]
"""These live in their caller's Ray job, and are measured against its jobs."""
NAMESPACES: Final = {"": None, "fun": b"fun", "iris_ray": b"iris_ray", "job": b"job", "cluster": b"cluster"}
"""Where Ray and iris_ray keep keys in the GCS. ``None`` has the packages of runtime environments."""
_ANONYMOUS = re.compile(rb"^Anonymous: +(\d+) kB", re.MULTILINE)
_PRE = re.compile("^[^:/]*")
WARM_UP: Final = 0.3
"""Which part of the jobs that a process has seen is left out, at its beginning."""
LEAST_WARM_UP: Final = {
    "GCS": 2 * FINISHED_JOBS_KEPT,
    "Controller": 5 * FINISHED_JOBS_KEPT,
    **dict.fromkeys(OF_A_CALLER, 1000),
}
"""The least number of jobs that is left out at the beginning of a process. The GCS and the Controller have the records
of a thousand finished jobs. In the others, the memory allocator's free blocks grow until then: see docs/design/soak.md.
"""
LEAST_POINTS: Final = 8
"""The least number of points of a process that give a slope."""
LEAST_JOBS: Final = 500
"""The number of jobs that one process must have seen, after its warm-up, before its slope is judged."""
LEAST_RISE: Final = 4.0
"""The rise in all, in units, from which a slope is judged: Ray's pools of threads grow by a few, each with descriptors.
"""
SIGMAS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Thing:
    """What is measured: ``("GCS", "MB")``, ``("keys iris_ray/job", "")``.

    Attributes:
        name: of the kind of process, of a group of keys, of a place of files.
        unit: of the number.
    """

    name: str
    unit: str


@dataclass(frozen=True, slots=True)
class Point:
    """One look at one thing.

    Attributes:
        jobs: how many jobs had been done.
        value: what was read.
    """

    jobs: float
    value: float


class Meter:
    """Looks at a cluster to which this process is connected.

    Args:
        host_directories: the directories of the simulated hosts.
        is_warm: whether the cluster has run so many jobs that its processes need no warm-up of `LEAST_WARM_UP`.
    """

    def __init__(self, host_directories: Sequence[Path], is_warm: bool = False) -> None:
        self._is_warm = is_warm
        self._session = Path(ray._private.worker._global_node.get_session_dir_path())
        self._hosts = list(host_directories)
        self._points: defaultdict[Thing, defaultdict[object, list[Point]]] = defaultdict(lambda: defaultdict(list))

    def look(self, jobs: int, jobs_by_caller: Mapping[str, int], drivers: Mapping[str, int]) -> None:
        """Read everything.

        Args:
            jobs: how many jobs were done on the cluster so far.
            jobs_by_caller: how many of them by which Ray job.
            drivers: the process of each Ray job's driver.
        """
        for ray_job, pid in drivers.items():
            self._process("driver", pid, jobs_by_caller.get(ray_job, 0))
        actors = [one for one in ray_state.actors(actor_state_name="ALIVE").values() if one["ActorClassName"]]
        for name, pid in self._rays_processes():
            self._process(name, pid, jobs)
        for actor in actors:
            if (name := actor["ActorClassName"]) in (*OUR_ACTORS, HOLDER):
                own = jobs_by_caller.get(actor["JobID"], 0) if name in OF_A_CALLER else jobs
                self._process(name, actor["Pid"], own)
        counts: Counter[str] = Counter(f"actors {one['ActorClassName']}" for one in actors)
        counts.update(f"placement groups {one['state']}" for one in placement_group_table().values())
        counts["Ray jobs"] = len(ray_state.jobs())
        counts["hosts lost"] = sum(not node["Alive"] for node in ray.nodes())
        counts.update(self._keys())
        for place, (number, size) in self._files().items():
            counts[f"files of {place}"] = number
            self._note(Thing(f"files of {place}", "MB"), None, jobs, size / MB)
        for name in {thing.name for thing in self._points if thing.unit == ""} | counts.keys():
            self._note(Thing(name, ""), None, jobs, counts[name])

    def slopes(self) -> dict[Thing, "Slope"]:
        """Return how much of each thing comes with 1,000 jobs, after the warm-up of each process."""
        found = {}
        for thing, series in self._points.items():
            least = 0 if self._is_warm else LEAST_WARM_UP.get(thing.name, 0)
            late = [[p for p in points if p.jobs >= _begin(points, least)] for points in series.values()]
            long = [points for points in late if len(points) >= LEAST_POINTS and points[-1].jobs > points[0].jobs]
            last = max(points[-1].value for points in series.values())
            found[thing] = replace(slope(long), last=last) if long else Slope(math.nan, math.nan, last, 0, 0.0)
        return found

    def _rays_processes(self) -> Iterator[tuple[str, int]]:
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or [""]
            if any(str(self._session) in part for part in command):
                name = Path(command[0]).name
                if name in ("gcs_server", "raylet"):
                    yield {"gcs_server": "GCS"}.get(name, name), process.pid
                elif any(part.endswith("log_monitor.py") for part in command):
                    yield "log monitor", process.pid

    def _process(self, name: str, pid: int, jobs: int) -> None:
        process = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            who = pid, psutil.Process(pid).create_time()
            anonymous = _ANONYMOUS.search((process / "smaps_rollup").read_bytes())
            descriptors, threads = len(os.listdir(process / "fd")), len(os.listdir(process / "task"))
            if anonymous is not None:
                self._note(Thing(name, "MB"), who, jobs, int(anonymous[1]) * 1024 / MB)
                self._note(Thing(name, "descriptors"), who, jobs, descriptors)
                self._note(Thing(name, "threads"), who, jobs, threads)

    def _files(self) -> dict[str, tuple[int, int]]:
        """Return how many files are in each place, and their bytes. Logs of tasks are kept for days, in bounds."""
        number, size = _files(self._hosts)
        logs = _files([logs_directory(host) for host in self._hosts])
        raylets = _files([host / "logs" for host in self._hosts])
        others = number - logs[0] - raylets[0], size - logs[1] - raylets[1]
        session = _files([self._session])
        return {"hosts": others, "tasks' logs": logs, "raylets' logs": raylets, "Ray's session": session}

    def _note(self, thing: Thing, who: object, jobs: float, value: float) -> None:
        self._points[thing][who].append(Point(jobs, value))

    @staticmethod
    def _keys() -> Counter[str]:
        found: Counter[str] = Counter()
        for name, namespace in NAMESPACES.items():
            for key in internal_kv._internal_kv_list(b"", namespace=namespace):
                if namespace is not None or key.startswith(b"gcs://"):  # without a namespace, Ray lists all keys
                    found[f"keys {name}/{_PRE.findall(key.decode(errors='replace'))[0]}"] += 1
        return found


def _begin(points: Sequence[Point], least: float) -> float:
    return points[0].jobs + max(least, WARM_UP * (points[-1].jobs - points[0].jobs))


def _files(roots: Sequence[Path]) -> tuple[int, int]:
    """Return how many files are in these directories, and the bytes that they take."""
    number = size = 0
    for root in roots:
        for parent, _, names in os.walk(root):
            for name in names:
                with contextlib.suppress(OSError):
                    size += os.lstat(os.path.join(parent, name)).st_blocks * 512
                    number += 1
    return number, size


@dataclass(frozen=True, slots=True)
class Slope:
    """How a thing grows.

    Attributes:
        value: per 1,000 jobs; NaN if no process has seen enough of them.
        error: the standard error of that.
        last: the newest value, of the largest if there are several.
        series: of how many processes.
        jobs: how many jobs the points of one process span, of the longest.
    """

    value: float
    error: float
    last: float
    series: int
    jobs: float

    def exceeds(self, limit: float) -> bool:
        """Whether it is surely more than so much per 1,000 jobs, and the rise is more than `LEAST_RISE`."""
        enough = self.jobs >= LEAST_JOBS and self.value * self.jobs > 1000 * LEAST_RISE
        return enough and self.value - SIGMAS * self.error > limit


def slope(series: Sequence[Sequence[Point]]) -> Slope:
    """Fit one slope to several processes, each with a level of its own. Two neighbouring points are not independent.

    The error is that of Newey and West, with Bartlett's weights over a quarter of each process's points.
    """
    centred = []
    for points in series:
        x, y = np.array([p.jobs for p in points]) / 1000, np.array([p.value for p in points])
        centred.append((x - x.mean(), y - y.mean()))
    spread = sum(float(x @ x) for x, _ in centred)
    value = sum(float(x @ y) for x, y in centred) / spread
    variance = 0.0
    for x, y in centred:
        moment = x * (y - value * x)
        lags = len(x) // 4
        variance += float(moment @ moment)
        variance += 2 * sum((1 - lag / (lags + 1)) * float(moment[lag:] @ moment[:-lag]) for lag in range(1, lags + 1))
    points_in_all = sum(len(x) for x, _ in centred)
    scale = points_in_all / max(1, points_in_all - len(centred) - 1)
    return Slope(
        value,
        math.sqrt(max(0.0, variance) * scale) / spread,
        max(points[-1].value for points in series),
        len(series),
        max(points[-1].jobs - points[0].jobs for points in series),
    )
