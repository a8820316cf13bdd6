"""The CPU time that each kind of process takes to import what it needs, without starting Ray.

    python benchmarks/starts.py                          # half a minute
    python benchmarks/starts.py --before /tmp/before     # each in turn with that checkout's iris_ray, and the ratio

A cluster's first run waits for the Controller, a pool, and an actor and a zygote for each host; the next attempt after
the loss of a pool waits for all but the Controller. The zygote is a real one, up to its first fork.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

from versions import HERE

PARTS = """
from iris_ray.actors.protocol.services import imported, installed_services
for service in installed_services():
    if service.{part} is not None:
        imported(service.{part})
"""
WORKER = "import ray._private.workers.default_worker"
PROCESSES = {
    "a worker of Ray": WORKER,
    "a caller": "import iris_ray\niris_ray.run_on_pod, iris_ray.IrisClient",
    "a pool": f"{WORKER}\nimport iris_ray.actors.pool.slice_pool_manager{PARTS.format(part='pool')}",
    "a host": f"{WORKER}\nimport iris_ray.actors.host.host_actor{PARTS.format(part='host')}",
    "the Controller": f"{WORKER}\nimport iris_ray.actors.controller.controller{PARTS.format(part='controller')}",
}


def importing(code: str, checkout: Path) -> float:
    """Return the seconds of CPU of a process that runs this code."""
    print_times = "\nimport os\nprint(sum(os.times()[:2]), flush=True)\nos._exit(0)"
    run = subprocess.run(
        [sys.executable, "-c", code + print_times],
        cwd=checkout,
        env=environment(checkout),
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(run.stdout.split()[-1])


def zygote(checkout: Path) -> float:
    """Return the seconds of CPU of a zygote that can fork."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with mine:
        with theirs:
            script = checkout / "iris_ray" / "actors" / "host" / "zygote.py"
            command = [sys.executable, str(script), str(theirs.fileno())]
            subprocess.run(command, env=environment(checkout), pass_fds=[theirs.fileno()], check=True)
        pid = json.loads(mine.recv(1 << 17))["pid"]
        mine.send(json.dumps({"path": [str(checkout), *sys.path], "preload": []}).encode())
        assert "ready" in json.loads(mine.recv(1 << 17))
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def environment(checkout: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(checkout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout, whose iris_ray is measured in turn")
    given = parser.parse_args()
    checkouts = [*([given.before.resolve()] if given.before else []), HERE]
    for name in [*PROCESSES, "a zygote"]:
        found: list[list[float]] = [[] for _ in checkouts]
        for sample in range(given.samples + 1):
            for checkout, samples in zip(checkouts, found, strict=True):
                seconds = importing(PROCESSES[name], checkout) if name in PROCESSES else zygote(checkout)
                if sample:  # the first one may compile
                    samples.append(seconds)
        middles = [statistics.median(samples) for samples in found]
        ratio = statistics.median(now / before for before, now in zip(*found, strict=True)) if given.before else None
        cells = [f"{middle:.2f} s" for middle in middles] + ([f"{ratio:.2f}"] if ratio is not None else [])
        print(f"{name:16} {'  '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
