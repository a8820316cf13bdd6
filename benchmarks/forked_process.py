"""Tries whether a task may be a fork of a zygote: each experiment with real processes, real Ray and the real libtpu.

    python benchmarks/forked_process.py libtpu     # needs libtpu, and root or user namespaces for a /tmp of its own
    python benchmarks/forked_process.py pythons /path/to/python3.12 …
    python benchmarks/forked_process.py joins --joins 1000
    python benchmarks/forked_process.py memory     # fills 2 GB of this machine, again and again
    python benchmarks/forked_process.py ends       # needs root: `ray stop` runs in a namespace of its own
    python benchmarks/forked_process.py failures
    python benchmarks/forked_process.py speed --forks 200
    python benchmarks/forked_process.py crowd --tasks 1000

What came of it is in docs/design/forked-tasks.md. The functions whose first argument is `say` run in forked children.
"""

import argparse
import asyncio
import base64
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from zygote import Zygote, ZygoteError, devices, settle, start_without_the_unfit, threads

Say = Callable[..., None]
PRELOAD = ("numpy", "ray", "iris_ray", "jax", "forked_process")
HERE = Path(__file__).parent
GB = 1 << 30


def main() -> None:
    experiments: dict[str, Callable[[argparse.Namespace], None]] = {
        "libtpu": try_libtpu,
        "pythons": try_pythons,
        "joins": try_joins,
        "memory": try_memory,
        "ends": try_ends,
        "failures": try_failures,
        "speed": try_speed,
        "crowd": try_crowd,
    }
    if sys.argv[1:2] == ["look"]:  # in the process of `try_pythons`
        print(json.dumps(look(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=experiments)
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    parser.add_argument("--joins", type=int, default=1000)
    parser.add_argument("--joins-s", type=float, default=600.0, help="the time after which joins end")
    parser.add_argument("--forks", type=int, default=200)
    parser.add_argument("--tasks", type=int, default=1000, help="those of `crowd`")
    parser.add_argument("--only", nargs="*", help="only these modules of `pythons` or cases of `memory`")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE), os.environ.get("PYTHONPATH", "")])
    experiments[arguments.experiment](arguments)


def row(*cells: object) -> None:
    print("|", " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells), "|", flush=True)


def ms_between(began: float, ended: float) -> float:
    return (ended - began) * 1000


def percentile(samples: Sequence[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(share * len(samples)))]


def wait_until_gone(pids: Sequence[int], timeout_s: float = 30.0) -> dict[int, float | None]:
    """Return after how many seconds each process was gone; None if it lives on. Zombies count as gone."""
    began, gone = time.monotonic(), dict[int, float | None]()
    while len(gone) < len(pids) and time.monotonic() < began + timeout_s:
        gone |= {pid: time.monotonic() - began for pid in pids if pid not in gone and not runs(pid)}
        time.sleep(0.005)
    return {pid: gone.get(pid) for pid in pids}


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# -- 1. the real libtpu ------------------------------------------------------------------------------------------------

HOST = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v4-8", "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0"}  # fmt: skip
OWN_TMP = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /tmp && exec "$@"')


def take_chips(say: Say, library: str, stay: bool) -> None:
    """Initialise libtpu by JAX's own plugin interface, and tell how that went and what it did to signal handlers."""
    from jaxlib import xla_client

    client: Any = xla_client
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _our_handler)
    before, began = handlers_in_kernel(), time.monotonic()
    problem = None
    try:
        client.load_pjrt_plugin_dynamically("tpu", library)
        client.initialize_pjrt_plugin("tpu")
    except Exception as error:
        problem = str(error).splitlines()[0]
    say(
        problem=problem,
        seconds=round(time.monotonic() - began, 2),
        ours=all(signal.getsignal(number) is _our_handler for number in (signal.SIGTERM, signal.SIGINT)),
        caught_anew=sorted(handlers_in_kernel() - before),
        threads=sorted(set(threads())),
        lock=[line for line in Path("/proc/locks").read_text().splitlines() if f" {os.getpid()} " in line],
    )
    if stay:
        time.sleep(600)


def _our_handler(number: int, _: object) -> None:
    os._exit(100 + number)


def handlers_in_kernel() -> set[str]:
    """Return the names of the signals for which this process has a handler, set by Python or by native code."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt"))
    caught = int(line.split()[1], 16)
    return {
        signal.Signals(n).name if n in set(signal.Signals) else str(n) for n in range(1, 65) if caught >> (n - 1) & 1
    }


def try_libtpu(_: argparse.Namespace) -> None:
    library = str(Path(importlib.import_module("libtpu").__file__ or "").with_name("libtpu.so"))
    with tempfile.TemporaryDirectory() as directory:
        launcher = (*OWN_TMP, directory)

        def fresh(stay: bool) -> tuple[subprocess.Popen[str], dict[str, Any]]:
            say = "lambda **said: print(json.dumps(said), flush=True)"
            code = f"import json, forked_process as f; f.take_chips({say}, {library!r}, {stay})"
            command = [*launcher, sys.executable, "-c", code]
            process = subprocess.Popen(command, env=os.environ | HOST, stdout=subprocess.PIPE, text=True)
            assert process.stdout is not None
            return process, json.loads(process.stdout.readline())

        row(
            "process", "libtpu says", "our handlers stay", "new handlers in the kernel", "threads", "lock in the kernel"
        )

        def tell(what: str, said: dict[str, Any]) -> None:
            row(what, said.get("error") or said["problem"] or f"initialised in {said['seconds']} s", said.get("ours"),
                said.get("caught_anew"), said.get("threads"), said.get("lock"))  # fmt: skip

        with Zygote(PRELOAD, launcher=launcher, environ=HOST) as zygote:

            def child(stay: bool = True) -> tuple[Any, dict[str, Any]]:
                made = zygote.fork("forked_process:take_chips", library=library, stay=stay)
                return made, made.hear()

            first, said = child()
            tell("first child", said)
            for what in ("second child", "third child"):
                tell(f"{what} beside it", child(stay=False)[1])
            other, said = fresh(stay=False)
            tell("fresh process beside it", said)
            other.wait(30)
            os.kill(first.pid, signal.SIGTERM)
            row("first child after SIGTERM", f"exit code {zygote.code(first)} (our handler: {100 + signal.SIGTERM})")
            after, said = child()
            tell("next child after its end", said)
            after.end()
            row("SIGKILL → next child's code", f"{zygote.code(after)}")
            again, said = child()
            tell("child after a SIGKILL", said)
            again.end()
            zygote.code(again)
            worked, began = 0, time.monotonic()
            for _number in range(10):
                one, said = child()
                worked += said.get("problem", "") is None
                one.end()
                zygote.code(one)
            row(
                "ten children, one after the other",
                f"{worked} initialised",
                f"{ms_between(began, time.monotonic()):.0f} ms",
            )
            process, said = fresh(stay=True)
            tell("fresh process", said)
            tell("child beside a fresh process", child(stay=False)[1])
            process.kill()
            process.wait(30)
        text = f"import forked_process as f\nf.take_chips(lambda **_: None, {library!r}, False)\n"
        made_module(directory, "took_chips", text)
        on_path = {"PYTHONPATH": os.pathsep.join(["/tmp", os.environ["PYTHONPATH"]])}
        try:
            with Zygote(["took_chips"], launcher=launcher, environ=HOST | on_path):
                row("zygote that initialised libtpu", "was not refused")
        except ZygoteError as error:
            row("zygote that initialised libtpu", f"refused: {error}")


def made_module(directory: str, name: str, text: str) -> str:
    """Write a module. Return a PYTHONPATH that has it."""
    Path(directory, f"{name}.py").write_text(text)
    return os.pathsep.join([directory, os.environ.get("PYTHONPATH", "")])


# -- 2. versions of Python, and modules --------------------------------------------------------------------------------

MODULES = (
    "numpy", "ray", "iris_ray", "iris_ray.actors.host.task_process", "jax", "grpc", "google.cloud.tpu_v2", "aiohttp",
    "scipy.linalg", "pandas", "pyarrow", "pyarrow.dataset", "flax", "optax", "orbax.checkpoint", "matplotlib.pyplot",
    "sklearn", "levanter", "transformers", "wandb", "tensorstore", "datasets", "torch",
)  # fmt: skip


def look(module: str) -> dict[str, Any]:
    """Import a module in this process. Return what it leaves that no fork should inherit."""
    variables, of_environ, read = dict(os.environ), type(os.environ), set[str]()
    get = of_environ.__getitem__

    def recorded(self: Any, name: str) -> str:
        read.add(name)
        return get(self, name)

    of_environ.__getitem__ = recorded  # type: ignore[method-assign]
    try:
        began = time.monotonic()
        if module == "jax with a backend":
            importlib.import_module("jax").devices()
        else:
            importlib.import_module(module)
    except ImportError as error:
        return {"missing": str(error)}
    found = {"seconds": round(time.monotonic() - began, 2), "threads": threads(), "devices": devices()}
    changed = sorted(name for name, value in os.environ.items() if variables.get(name) != value)
    return found | {"says": settle(), "left": threads(), "read": sorted(read), "changed": changed}


def compute(say: Say) -> None:
    """Use numpy's and JAX's own threads, and tell which warnings there were."""
    import jax.numpy
    import numpy

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        square = numpy.ones((300, 300))
        total = float((square @ square).sum()) + float(jax.numpy.ones((300, 300)).sum())
    say(total=total, says=[str(one.message) for one in caught], at=time.monotonic())


def set_late(say: Say) -> None:
    """Set a variable that JAX reads when it is imported, which the zygote has done."""
    import jax

    os.environ["JAX_ENABLE_X64"] = "1"
    found, update = [str(jax.numpy.ones(1).dtype)], cast("Callable[..., None]", jax.config.update)
    update("jax_enable_x64", True)
    say(total=[*found, str(jax.numpy.ones(1).dtype)])


def set_threads(say: Say) -> None:
    """Have OpenBLAS, which has read its number of threads when it was loaded, use two; tell the numbers."""
    import numpy

    library = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line)
    openblas, square, found = ctypes.CDLL(library), numpy.ones((800, 800)), list[int]()
    for number in (None, 2):
        if number is not None:
            openblas.scipy_openblas_set_num_threads64_(number)
        square @ square
        found += [openblas.scipy_openblas_get_num_threads64_(), 1 + len(threads())]
    say(total=found)


def try_pythons(arguments: argparse.Namespace) -> None:
    for python in arguments.pythons:
        version = subprocess.run([python, "--version"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        row(version, "threads after the import", "after a first fork", "devices", "said at the fork",
            "variables read in Python", "variables changed")  # fmt: skip
        for module in arguments.only or (*MODULES, "jax with a backend"):
            command = [python, __file__, "look", module]
            environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environ)
            found = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {"missing": f"code {done.returncode}"}
            if "missing" not in found:
                row(module, found["threads"], found["left"], found["devices"], found["says"], len(found["read"]),
                    found["changed"])  # fmt: skip
        zygote, left_out = start_without_the_unfit(PRELOAD, python=python, environ={"JAX_PLATFORMS": "cpu",
                                                   "PYTHONWARNINGS": "error::DeprecationWarning:zygote"})  # fmt: skip
        with zygote:
            worked, says = 0, set[str]()
            for _ in range(20):
                child = zygote.fork("forked_process:compute")
                said = child.hear()
                worked += said.get("total") == 300**3 + 300**2
                says |= set(said.get("says", [said.get("error")]))
                zygote.code(child)
            late = zygote.fork("forked_process:set_late").hear()
        with Zygote(["numpy"], python=python, environ={"OMP_NUM_THREADS": "1"}) as zygote:
            blas = zygote.fork("forked_process:set_threads").hear()
        row(version, "OpenBLAS's number and threads with OMP_NUM_THREADS=1 in the zygote, and after a call", blas)
        row(version, "dtype after JAX_ENABLE_X64=1 in a child, and after jax.config.update", late)
        row(version, f"{worked} of 20 children of a zygote computed with numpy and JAX", f"left out: {left_out}", says)


# -- Ray, for the other experiments ------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_ray(**environ: str) -> Iterator[Any]:
    """Start a Ray of one node, with directories and ports of its own, and connect to it."""
    import ray

    from iris_ray.testing import SimulatedCluster

    before = dict(os.environ)
    os.environ.update(environ)
    try:
        with SimulatedCluster(connect=False, cpus_per_host=2, quiet=True) as cluster:
            ray.init(cluster.address, namespace="ours", log_to_driver=False, logging_level="ERROR")
            yield ray
            ray.shutdown()
    finally:
        os.environ.clear()
        os.environ.update(before)


def processes_of_ray() -> dict[str, int]:
    """Return the pids of the GCS and the raylet that this process has started, by name."""
    import psutil

    found = {process.name(): process.pid for process in psutil.Process().children(recursive=True)}
    return {name: pid for name, pid in found.items() if name in ("gcs_server", "raylet")}


def host_actor(ray: Any) -> Any:
    """Start an actor like TPUHostActor: with an event loop, and a zygote that it started."""
    import psutil

    class Host:
        async def start(self, preload: Sequence[str], ends_by: Sequence[str]) -> tuple[int, int]:
            self.zygote = Zygote(preload, ends_by=ends_by)
            return os.getpid(), self.zygote.pid

        async def fork(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
            child = self.zygote.fork(call, **arguments)
            self.children = [*getattr(self, "children", ()), child]
            return {"pid": child.pid, **child.hear()}

        async def code(self) -> int:
            return self.zygote.code(self.children[-1], 5)

        async def guard(self, threshold: float) -> None:
            """End the tasks, of which there is one here, once the machine's memory is nearly as full as Ray allows."""

            def look_again() -> None:
                while True:
                    if psutil.virtual_memory().percent / 100 > threshold:
                        for child in self.children:
                            with contextlib.suppress(ProcessLookupError):
                                os.kill(child.pid, signal.SIGKILL)
                    time.sleep(0.02)

            threading.Thread(target=look_again, daemon=True).start()

    return ray.remote(Host).options(num_cpus=0).remote()


# -- 3. joins ----------------------------------------------------------------------------------------------------------


def join(say: Say, address: str, pickled: str | None = None, first: bool = True, work: bool = False) -> None:
    """Join Ray as a driver, before or after unpickling an ObjectRef if one is given. Tell how that went."""
    import ray

    signal.signal(signal.SIGTERM, _our_handler)
    began, value, problem = time.monotonic(), None, None

    def unpickled() -> Any:
        return pickle.loads(base64.b64decode(pickled)) if pickled else None

    def connect() -> None:
        ray.init(address, namespace="ours", log_to_driver=False, logging_level="ERROR")

    try:
        ref = None if first else unpickled()
        connect()
        ref = unpickled() if first else ref
        value = None if ref is None else ray.get(ref, timeout=20)
        if work:
            value = ray.get(ray.remote(num_cpus=1)(lambda: "of a worker").remote(), timeout=60)
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    say(seconds=time.monotonic() - began, value=value, problem=problem, namespace=ray.get_runtime_context().namespace
        if ray.is_initialized() else None, sigterm_ours=signal.getsignal(signal.SIGTERM) is _our_handler)  # fmt: skip


def usage(pid: int) -> tuple[float, int, int]:
    """Return a process's resident memory in MB, its descriptors and its threads."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6, *(len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))  # type: ignore[return-value]


def try_joins(arguments: argparse.Namespace) -> None:
    with own_ray() as ray, Zygote(PRELOAD) as zygote:
        address = ray.get_runtime_context().gcs_address
        pickled = base64.b64encode(ray.cloudpickle.dumps(ray.put("a value"))).decode()

        def joined(**how: Any) -> dict[str, Any]:
            child = zygote.fork("forked_process:join", address=address, **how)
            said = child.hear()
            child.end()
            zygote.code(child)
            return said

        row("ObjectRef unpickled after the join", joined(pickled=pickled))
        row("ObjectRef unpickled before the join", joined(pickled=pickled, first=False))
        row("a remote task from the child", joined(work=True))
        watched = {**processes_of_ray(), "zygote": zygote.pid}
        jobs = ray._private.state.state.job_table

        def tell(number: int, times: list[float], failed: int) -> None:
            quantiles = [f"{1000 * percentile(times, share):.0f}" for share in (0.5, 0.99)] if times else ["", ""]
            found = {name: usage(pid) for name, pid in watched.items()}
            dead = sum(job["IsDead"] for job in jobs())
            row(number, *quantiles, failed, len(jobs()), dead,
                *(f"{size:.0f}, {files}, {count}" for size, files, count in found.values()))  # fmt: skip

        row(
            "joins",
            "p50 ms",
            "p99 ms",
            "failed",
            "jobs",
            "of them dead",
            *(f"{name}: MB, fds, threads" for name in watched),
        )
        began, times, failed = time.monotonic(), list[float](), 0
        tell(0, times, failed)
        for number in range(1, arguments.joins + 1):
            said = joined()
            failed += said.get("problem", "no answer") is not None
            times.append(said.get("seconds", 0.0))
            if number % 100 == 0 or (late := time.monotonic() - began > arguments.joins_s):
                tell(number, times, failed)
                times = []
                if number % 100 and late:
                    break
        time.sleep(3)
        tell(number, [], failed)


# -- 4. Ray's memory monitor -------------------------------------------------------------------------------------------

STEP, MOST = 32 << 20, 6 * GB


def eat(
    say: Say,
    oom_score: int | None = None,
    most_address_space: int | None = None,
    group: str | None = None,
    pause_s: float = 0.02,
) -> None:
    """Touch memory, 32 MB after the other. Exit with 77 if it is refused."""
    if oom_score is not None:
        Path("/proc/self/oom_score_adj").write_text(str(oom_score))
    if most_address_space:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + most_address_space, now + most_address_space))
    if group:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    say(score=Path("/proc/self/oom_score_adj").read_text().strip())
    _eat(pause_s)


def _eat(pause_s: float = 0.02) -> None:
    eaten: list[bytearray] = []
    with contextlib.suppress(MemoryError):
        while len(eaten) * STEP < MOST:
            eaten.append(bytearray(STEP))
            eaten[-1][:: resource.getpagesize()] = b"x" * (STEP // resource.getpagesize())
            time.sleep(pause_s)
        os._exit(0)
    os._exit(77)


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[str]:
    """Make a cgroup with a memory limit, of either version."""
    root = Path("/sys/fs/cgroup/memory") if Path("/sys/fs/cgroup/memory").is_dir() else Path("/sys/fs/cgroup")
    group = root / f"forked-process-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if (group / "memory.limit_in_bytes").exists() else "memory.max"
        (group / name).write_text(str(limit))
        yield str(group)
    finally:
        time.sleep(0.5)
        group.rmdir()


def try_memory(arguments: argparse.Namespace) -> None:
    import psutil

    legacy = {"RAY_worker_killing_policy_by_group": "1"}
    cases: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
        "a fork": ({}, {}),
        "with oom_score_adj 0": ({}, {"oom_score": 0}),
        "with RLIMIT_AS": ({}, {"most_address_space": GB}),
        "with a cgroup": ({}, {"group": True}),
        "with a guard in the host's actor": ({}, {"guard": True}),
        "with a guard, without pauses": ({}, {"guard": True, "pause_s": 0.0}),
        "an actor, as today": ({}, {"actor": True}),
        "a fork, policy by group": (legacy, {}),
        "with a guard, policy by group": (legacy, {"guard": True}),
    }
    row("hog", "its oom_score_adj", "who else was killed", "its end", "exit code")
    for what, (environ, how) in cases.items():
        if what in (arguments.only or cases):
            limit = psutil.virtual_memory().percent / 100 + 0.10
            threshold = {"RAY_memory_usage_threshold": f"{limit:.3f}", "RAY_memory_monitor_refresh_ms": "250"}
            with own_ray(**threshold, **environ) as ray:
                _memory_case(ray, what, limit, **how)


def _memory_case(ray: Any, what: str, limit: float, guard: bool = False, actor: bool = False, **how: Any) -> None:
    """Have a hog fill the memory beside an older actor, the host's actor with its zygote, and a newer actor."""

    class Innocent:
        def pid(self) -> int:
            return os.getpid()

        def eat(self) -> None:
            _eat()

    def innocent() -> Any:
        return ray.remote(Innocent).options(num_cpus=0).remote()

    with contextlib.ExitStack() as stack:
        older, pids = innocent(), dict[str, int]()
        pids["older actor"] = ray.get(older.pid.remote())
        host = host_actor(ray)
        pids["host's actor"], pids["zygote"] = ray.get(host.start.remote(["numpy", "ray"], BEST))
        newer = innocent()
        pids["newer actor"] = ray.get(newer.pid.remote())
        if how.get("group"):
            how["group"] = stack.enter_context(memory_group(GB))
        if actor:
            hog = innocent()
            pids["hog"] = ray.get(hog.pid.remote())
            score = Path(f"/proc/{pids['hog']}/oom_score_adj").read_text().strip()
            hog.eat.remote()
        else:
            said = ray.get(host.fork.remote("forked_process:eat", how))
            pids["hog"], score = said["pid"], said["score"]
            if guard:
                host.guard.remote(limit - 0.03)
        gone = wait_until_gone([pids["hog"]], 120)[pids["hog"]]
        time.sleep(2)
        code = "unknown"
        with contextlib.suppress(Exception):  # the actor may be dead
            code = ray.get(host.code.remote(), timeout=10)
        killed = [name for name, pid in pids.items() if name != "hog" and not runs(pid)]
        row(what, score, ", ".join(killed) or "nobody", "lives on" if gone is None else f"after {gone:.1f} s", code)


# -- 5. how it ends with Ray -------------------------------------------------------------------------------------------

IN_NAMESPACE = (
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "sh",
    "-c",
    'mount --bind "$0" /tmp && exec "$@"',
)


def stay(say: Say, daemon: bool) -> None:
    """Wait for ever; with a daemon, which has left its session and its parent."""
    told, tell = os.pipe()
    if daemon and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(tell, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    say(daemon=int(os.read(told, 20)) if daemon else None)
    time.sleep(600)


HOSTS: list[Any] = []
BEST = ["pipe", "signal", "session", "detached"]
WAYS = (
    ["pipe"],
    ["pipe", "signal", "kill"],
    ["pipe", "signal", "session"],
    ["pipe", "signal", "session", "wake"],
    BEST,
)


def try_ends(_: argparse.Namespace) -> None:
    if "FORKED_PROCESS_NAMESPACE" not in os.environ:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:
            command = [*IN_NAMESPACE, directory, sys.executable, *sys.argv]
            subprocess.run(command, env={**os.environ, "FORKED_PROCESS_NAMESPACE": "1"}, check=True)
        return
    row("what ends", "zygote ends by", "seconds until gone: host's actor", "zygote", "its child", "that child's daemon")
    with own_ray() as ray:
        _ends(ray, "SIGKILL of the host's actor", lambda actor, _: os.kill(actor, signal.SIGKILL))
        _ends(ray, "the same, zygote stopped", _stop_zygote_and_kill_actor)
        _ends(ray, "SIGTERM of the host's actor", lambda actor, _: os.kill(actor, signal.SIGTERM))
        _ends(ray, "SIGKILL of the zygote", lambda _, zygote: os.kill(zygote, signal.SIGKILL))
    for what, act in {"SIGKILL of the raylet": _kill_raylet, "ray stop --force": _ray_stop}.items():
        with contextlib.suppress(Exception), own_ray() as ray:  # its shutdown fails when Ray is gone
            _ends(ray, what, act, once=True)


def _stop_zygote_and_kill_actor(actor: int, zygote: int) -> None:
    os.kill(zygote, signal.SIGSTOP)
    os.kill(actor, signal.SIGKILL)


def _kill_raylet(_: int, __: int) -> None:
    os.kill(processes_of_ray()["raylet"], signal.SIGKILL)


def _ray_stop(_: int, __: int) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "stop", "--force"]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def _ends(ray: Any, what: str, act: Callable[[int, int], object], once: bool = False) -> None:
    """Tell which processes are gone after an act on the pids of a host's actor and its zygote.

    Args:
        once: whether the act, on whichever host, ends them all.
    """
    watched: dict[str, list[int]] = {}
    for ends_by in WAYS:
        host = host_actor(ray)
        pids = list(ray.get(host.start.remote(["numpy", "ray"], ends_by)))
        said = ray.get(host.fork.remote("forked_process:stay", {"daemon": True}))
        watched["+".join(ends_by)] = [*pids, said["pid"], said["daemon"]]
        HOSTS.append(host)  # a handle out of scope would end the actor
    acts = list(watched.values())[:1] if once else list(watched.values())
    for pids in acts:
        act(*pids[:2])
    gone = wait_until_gone([pid for pids in watched.values() for pid in pids], 15)
    for ends_by_name, pids in watched.items():
        row(what, ends_by_name, *("never" if (after := gone[pid]) is None else f"{after:.2f}" for pid in pids))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


# -- 6. the zygote's own failures --------------------------------------------------------------------------------------

UNFIT = {
    "starts_a_thread": "import threading, time\nthreading.Thread(target=time.sleep, args=[600], daemon=True).start()\n",
    "starts_a_native_thread": "import jax\njax.devices()\n",
    "opens_a_device": "file = open('/dev/fuse')\n",
    "exits": "import os\nos._exit(3)\n",
    "crashes": "import ctypes\nctypes.string_at(0)\n",
    "raises": "raise ImportError('no such library')\n",
    "never_returns": "import time\ntime.sleep(600)\n",
}


def try_failures(_: argparse.Namespace) -> None:
    row("failure", "seconds until the caller notices", "error message")

    def played(what: str, act: Callable[[Zygote], object]) -> None:
        with Zygote(["numpy", "ray"]) as zygote:
            zygote.code(zygote.fork("forked_process:first_line"))
            act(zygote)
            began = time.monotonic()
            try:
                zygote.fork("forked_process:first_line")
            except ZygoteError as error:
                row(what, time.monotonic() - began, error)

    played("SIGKILL, then a launch", lambda zygote: os.kill(zygote.pid, signal.SIGKILL))
    played("SIGSTOP, then a launch", lambda zygote: os.kill(zygote.pid, signal.SIGSTOP))
    with Zygote(["numpy", "ray"]) as zygote:
        child = zygote.fork("forked_process:stay", daemon=False)
        child.hear()
        began = time.monotonic()
        os.kill(zygote.pid, signal.SIGKILL)
        row("SIGKILL while a child runs", time.monotonic() - began, f"child: {child.hear() or 'its pipe has ended'}")
    with tempfile.TemporaryDirectory() as directory:
        for name, text in UNFIT.items():
            if name == "opens_a_device" and not Path("/dev/fuse").exists():
                continue
            began = time.monotonic()
            zygote, left_out = start_without_the_unfit(
                ["json", name],
                environ={"PYTHONPATH": made_module(directory, name, text), "JAX_PLATFORMS": "cpu"},
                import_limit_s=5.0 if name == "never_returns" else 120.0,
            )
            with zygote:
                row(f"preload {name}: zygote without it", time.monotonic() - began, left_out)


# -- 7. speed and memory -----------------------------------------------------------------------------------------------


def first_line(say: Say) -> None:
    say(at=time.monotonic())


def idle(say: Say) -> None:
    """Collect garbage, which touches what is not frozen, tell the memory of this process, and wait."""
    gc.collect()
    say(at=time.monotonic())
    time.sleep(600)


def memory_of(pid: int) -> tuple[float, float]:
    """Return a process's proportional share of memory, and what is its own, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kb = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return kb["Pss:"] / 1e3, (kb["Private_Dirty:"] + kb["Private_Clean:"]) / 1e3


def try_speed(arguments: argparse.Namespace) -> None:
    say_time = "import time; print(time.monotonic(), flush=True)"
    with own_ray() as ray, Zygote(PRELOAD) as zygote:

        class Actor:
            def at(self) -> float:
                return time.monotonic()

        def forked() -> float:
            began = time.monotonic()
            child = zygote.fork("forked_process:first_line")
            at: float = child.hear()["at"]
            zygote.code(child)
            return ms_between(began, at)

        def fresh(imports: str) -> float:
            began = time.monotonic()
            command = [sys.executable, "-c", f"{imports}; {say_time}"]
            return ms_between(began, float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout))

        def actor() -> float:
            began = time.monotonic()
            made = ray.remote(Actor).options(num_cpus=0).remote()
            at = ray.get(made.at.remote())
            ray.kill(made)
            return ms_between(began, at)

        every = max(1, arguments.forks // 10)
        kinds = {
            "fork of the zygote": (forked, 1),
            "python -c": (lambda: fresh("pass"), every),
            f"python -c with {', '.join(PRELOAD[:-1])}": (lambda: fresh(f"import {', '.join(PRELOAD[:-1])}"), every),
            "Ray actor": (actor, every),
        }
        forked()
        before = usage(zygote.pid)
        times: dict[str, list[float]] = {what: [] for what in kinds}
        for number in range(arguments.forks):
            for what, (start, each) in kinds.items():
                if number % each == 0:
                    times[what].append(start())
        row("process", "runs", "p50 ms to its first line", "p99 ms", "forks' p50 into it")
        unit = statistics.median(times["fork of the zygote"])
        for what, found in times.items():
            p50 = statistics.median(found)
            row(what, len(found), f"{p50:.1f}", f"{percentile(found, 0.99):.1f}", f"{p50 / unit:.0f}")
        after = usage(zygote.pid)
        row("the zygote's MB (RSS), descriptors, threads", f"before {before}", f"after {arguments.forks} forks {after}")
        made = [ray.remote(Actor).options(num_cpus=0).remote() for _ in range(3)]
        ray.get([one.at.remote() for one in made])
        import psutil

        actors = [p.pid for p in psutil.Process().children(recursive=True) if p.name().startswith("ray::Actor")]
        row("idle process", "number", "PSS in MB", "of it its own")
        row("Ray actor", len(actors), *map(statistics.mean, zip(*map(memory_of, actors), strict=True)))
    for freeze in (True, False):
        with Zygote(PRELOAD, freeze=freeze) as zygote:
            children = [zygote.fork("forked_process:idle") for _ in range(8)]
            for child in children:
                child.hear()
            name = "gc.freeze" if freeze else "without gc.freeze"
            found_in = [memory_of(child.pid) for child in children]
            row(f"child, {name}", len(children), *map(statistics.mean, zip(*found_in, strict=True)))
            row(f"their zygote, {name}", 1, *memory_of(zygote.pid))


# -- 8. many tasks on one host -----------------------------------------------------------------------------------------


class Sleeper:
    """A `sleep` in place of a task's process; see `TaskRunner`. It needs no interpreter, so there can be thousands."""

    is_fork = True

    def __init__(self, token: str) -> None:
        from iris_ray.processes.tree import TOKEN_VARIABLE

        self._process = subprocess.Popen(["sleep", "3600"], env={**os.environ, TOKEN_VARIABLE: token})
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def exit_code(self) -> int | None:
        return self._process.wait()

    def close(self) -> None:
        self._process.wait()


def try_crowd(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as host:
        os.environ["IRIS_RAY_HOST_DIR"] = host
        row("tasks", "ms until one task's end is confirmed, p50 of 9", "s for all others at once", "s for leftovers")
        row(arguments.tasks, *asyncio.run(_crowd(arguments.tasks, Path(host))))


async def _crowd(count: int, host: Path) -> tuple[float, float, float]:
    from iris_ray.actors.host.exit_status import WatchedProcess
    from iris_ray.actors.host.ledger import ProcessLedger
    from iris_ray.actors.host.output import OutputPump
    from iris_ray.actors.host.task_watch import TaskWatch
    from iris_ray.processes.identity import stat_of
    from iris_ray.processes.tree import ProcessTree

    def start(number: int) -> tuple[Sleeper, ProcessTree]:
        sleeper = Sleeper(f"crowd-{os.getpid()}-{number}")
        stat = stat_of(sleeper.pid)
        assert stat is not None
        return sleeper, ProcessTree(stat.identity, f"crowd-{os.getpid()}-{number}")

    async def seconds_to_end(ended: Sequence[tuple[Sleeper, TaskWatch]]) -> float:
        began = time.monotonic()
        for sleeper, _ in ended:
            sleeper.kill()
        await asyncio.gather(*(watch.how_it_ended() for _, watch in ended))
        await asyncio.gather(*(watch.end("the benchmark has ended") for _, watch in ended))
        return time.monotonic() - began

    ledger, tasks = ProcessLedger(host), list[tuple[Sleeper, TaskWatch]]()
    for number in range(count):
        sleeper, tree = start(number)
        output = OutputPump(host, sleeper.pid, "", lambda *_: None)
        tasks.append((sleeper, TaskWatch(cast(Any, sleeper), WatchedProcess(tree.root), tree, ledger, None, output)))
    single = [await seconds_to_end([tasks.pop()]) for _ in range(9)]
    together = await seconds_to_end(tasks)
    left = [start(number) for number in range(count)]
    for _, tree in left:
        ledger.record(tree)
    began = time.monotonic()
    assert await asyncio.to_thread(ledger.end_leftovers, 0.0) == []
    after_actor = time.monotonic() - began
    for sleeper, _ in left:
        sleeper.close()
    return statistics.median(single) * 1000, together, after_actor


if __name__ == "__main__":
    main()
