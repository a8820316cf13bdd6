"""The checks of ``iris-ray doctor`` on every TPU host that Ray is not draining, all hosts at once."""

import contextlib
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iris_ray.cli.printing import Finding, Level, counted, one_line
from iris_ray.doctor import host_look
from iris_ray.model.workers import TPU
from iris_ray.settings import GCS_BOUNDS

if TYPE_CHECKING:
    from iris_ray.actors.controller.node_table import NodeTable

LOOK_TIMEOUT_S = 30.0
"""How long all hosts together may take to start a process and look around."""
LOCKED_BYTES = 64 << 30
"""The limit that Google's documentation for v5e on Vertex AI asks for (ulimit -l 68719476736)."""
GENEROUS = 10
"""A bound of the GCS may be larger than ours by this factor."""
_NAMED = 4
_INSTALL = "install the same in the cluster's image and here"
_JAX = "jax"


@dataclass(frozen=True, slots=True)
class Host:
    """A TPU host of the cluster.

    Attributes:
        name: for people: ``v4-16-0 host 1 (10.0.0.2)``.
        node_id: Ray's node id.
        type: the TPU type that its label names, or "".
    """

    name: str
    node_id: str
    type: str = ""


Answer = Mapping[str, Any] | str
"""What `host_look.look_around` returned, or why there is no answer."""


def tpu_hosts(table: "NodeTable") -> list[Host]:
    """Return the hosts to check: all that have chips and are not draining."""
    from iris_ray.actors.controller.node_table import POD_TYPE_LABEL, SLICE_NAME_LABEL, WORKER_ID_LABEL

    found = []
    for node in table.nodes:
        if node["Alive"] and node.get("Resources", {}).get(TPU) and node["NodeID"] not in table.draining:
            labels, address = node.get("Labels", {}), node["NodeManagerAddress"]
            parts = (labels.get(SLICE_NAME_LABEL, ""), f"host {labels.get(WORKER_ID_LABEL, '?')}", f"({address})")
            found.append(Host(" ".join(filter(None, parts)), node["NodeID"], labels.get(POD_TYPE_LABEL, "")))
    return sorted(found, key=lambda host: host.name)


def claimed_nodes(table: "NodeTable") -> set[str]:
    """Return the ids of the nodes with chips that are claimed from Ray."""
    return {
        node["NodeID"]
        for node in table.nodes
        if table.available.get(node["NodeID"], {}).get(TPU, 0.0) < node.get("Resources", {}).get(TPU, 0.0)
    }


def ask_hosts(hosts: Sequence[Host], timeout_s: float = LOOK_TIMEOUT_S) -> dict[Host, Answer]:
    """Run `host_look.look_around` on every host, side by side.

    Args:
        hosts: hosts of the cluster that this process is connected to.
        timeout_s: how many seconds to wait for all of them.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def answer(ref: Any) -> Answer:
        try:
            found: Answer = ray.get(ref)
            return found
        except RayTaskError as error:
            return f"{type(error.cause).__name__}: {one_line(error.cause)}"
        except RayError as error:
            return f"{type(error).__name__}: {one_line(str(error).strip().partition(chr(10))[0])}"

    with _by_value():
        look = ray.remote(num_cpus=0, max_retries=0)(host_look.look_around)
        refs = {
            look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(host.node_id, soft=False)).remote(): host
            for host in hosts
        }
    ready = set(ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
    return {
        host: answer(ref) if ref in ready else f"no answer within {timeout_s:g} s"
        for ref, host in refs.items()
    }  # fmt: skip


@contextlib.contextmanager
def _by_value() -> Iterator[None]:
    """Have the modules of `host_look` travel by value: a node with another iris_ray, or without one, answers too."""
    from ray import cloudpickle

    travelling = [sys.modules[name] for name in host_look.TRAVELS]
    for module in travelling:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in travelling:
            cloudpickle.unregister_pickle_by_value(module)


def ask_head(timeout_s: float = LOOK_TIMEOUT_S) -> dict[str, str | None] | None:
    """Return the variables of `GCS_BOUNDS` in the environment of the cluster's GCS; None if the head can't tell."""
    import ray
    from ray.exceptions import RayError

    from iris_ray.actors.calls.ray_internals import logs_directory
    from iris_ray.actors.controller.bootstrap import ON_HEAD

    with _by_value():
        look = ray.remote(host_look.gcs_variables).options(max_retries=0, **ON_HEAD)
        try:
            asked = look.remote(list(GCS_BOUNDS), logs_directory().parent.name)
            found: dict[str, str | None] | None = ray.get(asked, timeout=timeout_s)
        except RayError:
            return None
    return found


def check_gcs(variables: Mapping[str, str | None] | None) -> Finding:
    """Check that the GCS forgets dead actors, workers and tasks early enough.

    Args:
        variables: what `ask_head` returned.
    """
    check = "memory of Ray's GCS"
    if variables is None:
        return Finding(Level.INFO, check, "the environment of the GCS can't be read on the head")
    unbounded = [
        f"{name}={bound}"
        for name, bound in GCS_BOUNDS.items()
        if not (value := variables.get(name) or "").isdecimal() or int(value) > GENEROUS * bound
    ]
    if not unbounded:
        return Finding(Level.OK, check, "bounded: it forgets old actors, workers and tasks")
    found = "it remembers up to 100,000 dead actors, workers and tasks each, and a million ids of forgotten tasks"
    advice = f"set these on the head before `ray start`, see docs/operating.md: {' '.join(unbounded)}"
    return Finding(Level.WARNING, check, found, advice)


def check_answers(
    answers: Mapping[Host, Answer], claimed: set[str], here: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Check the answers of all hosts.

    Args:
        answers: by host.
        claimed: ids of the nodes with chips that are claimed from Ray, so that a process may hold them.
        here: this machine's versions.
    """
    if not answers:
        return
    silent = {host: answer for host, answer in answers.items() if isinstance(answer, str)}
    looks = {host: answer for host, answer in answers.items() if not isinstance(answer, str)}
    for host, why in silent.items():
        advice = "log in there and find the cause (uptime, dmesg, Ray's logs); keep jobs away: iris-ray host drain"
        yield Finding(Level.WARNING, "silent host", f"{host.name}: {why}", advice)
    if not silent:
        yield Finding(Level.OK, "silent hosts", f"none; all {counted(len(looks), 'TPU host')} answered")
    if looks:
        yield from _chips(looks, claimed)
        yield from _disks(looks)
        yield from _locked_memory(looks)
        yield _metadata(looks)
        yield from _versions(looks, here)


def _chips(looks: Mapping[Host, Mapping[str, Any]], claimed: set[str]) -> Iterator[Finding]:
    idle = {host: look for host, look in looks.items() if host.node_id not in claimed}
    held = {host: look["holders"] for host, look in idle.items() if look["holders"]}
    for host, holders in held.items():
        advice = "if they are no longer needed, end them there (kill PID): libtpu allows one process at a time"
        found = f"{host.name}: {', '.join(holders)}, but no Ray task or actor has claimed chips there"
        yield Finding(Level.WARNING, "chips held", found, advice)
    for host, look in looks.items():
        if look["foreign_lock"]:
            found = f"{host.name}: libtpu's lock file belongs to {look['foreign_lock']}, and Ray's user can't open it"
            yield Finding(
                Level.WARNING, "lock file", found, "if no process holds it, remove it there, as its owner or root"
            )
    hidden = [host for host, look in idle.items() if look["hidden"] and not look["holders"]]
    if hidden:
        found = f"processes of other users can't be inspected on {named(hidden, looks)}"
        yield Finding(Level.INFO, "chips held", found, "in doubt, look there as root: fuser -v /dev/accel* /dev/vfio/*")
    elif not held:
        busy = f", {counted(len(looks) - len(idle), 'host')} with claimed ones left aside" if looks != idle else ""
        yield Finding(Level.OK, "chips held", f"by no process without a claim{busy}")


def _disks(looks: Mapping[Host, Mapping[str, Any]]) -> Iterator[Finding]:
    check = "disks of hosts"
    full = {host: look["disks"] for host, look in looks.items() if look["disks"]}
    for host, troubles in full.items():
        advice = "make room there, or replace the disk; until then launches on this host fail, and jobs go elsewhere"
        yield Finding(Level.WARNING, check, f"{host.name}: {'; '.join(troubles)}", advice)
    if not full:
        yield Finding(Level.OK, check, "there is room on all")


def _locked_memory(looks: Mapping[Host, Mapping[str, Any]]) -> Iterator[Finding]:
    """Yield a finding if libtpu may lock too little memory on hosts of v5litepod, the type that needs much."""
    limits = {host: look["lockable"] for host, look in looks.items() if host.type.startswith("v5litepod-")}
    short = [host for host, limit in limits.items() if limit is not None and limit < LOCKED_BYTES]
    if short:
        least = min(limits[host] for host in short)
        found = f"only {least >> 10} kB may be locked on {named(short, looks)}, and v5litepod takes up to 64 GiB"
        advice = "raise it before `ray start`: ulimit -l unlimited; on GKE see docs/gke-operating.md"
        yield Finding(Level.WARNING, "locked memory", found, advice)
    elif limits:
        yield Finding(Level.OK, "locked memory", f"enough on {counted(len(limits), 'host')} of v5litepod")


def _metadata(looks: Mapping[Host, Mapping[str, Any]]) -> Finding:
    check = "metadata server of hosts"
    without = [host for host, look in looks.items() if look["metadata"] == "nothing"]
    without_notices = [host for host, look in looks.items() if look["metadata"] == "no preemptions"]
    if not without and without_notices:
        found = f"announces no preemptions on {named(without_notices, looks)}"
        return Finding(Level.INFO, check, found, host_look.NO_NOTICES)
    if not without:
        return Finding(Level.OK, check, f"answers on {counted(len(looks), 'host')}")
    if len(without) == len(looks):
        advice = "nothing to do outside Google Cloud; on TPU VMs or in GKE make sure that it can be reached"
        return Finding(Level.INFO, check, f"answers on none of {counted(len(looks), 'host')}", advice)
    advice = "preemptions would come without notice there: see what blocks the server (firewall, network policy, proxy)"
    return Finding(Level.WARNING, check, f"does not answer on {named(without, looks)}", advice)


def _versions(looks: Mapping[Host, Mapping[str, Any]], here: Mapping[str, str | None]) -> Iterator[Finding]:
    check, same = "versions on hosts", []
    for package in here:
        by_version: defaultdict[str | None, list[Host]] = defaultdict(list)
        for host, look in looks.items():
            by_version[look["versions"].get(package)].append(host)
        usual = Counter({found: len(hosts) for found, hosts in by_version.items()}).most_common(1)[0][0]
        wanted = usual if package == _JAX else here[package]  # many drivers have no JAX, or another one
        others = {found: hosts for found, hosts in by_version.items() if found != wanted}
        for found, hosts in others.items():
            against = f"{wanted or 'none'} {'on the others' if package == _JAX else 'here'}"
            yield Finding(
                Level.WARNING, check, f"{package} {found or 'is missing'} on {named(hosts, looks)}, {against}", _INSTALL
            )
        if not others and wanted:
            same.append(f"{package} {wanted}")
    if same:
        yield Finding(Level.OK, check, f"the same on all: {', '.join(same)}")


def named(some: Sequence[Host], of: Collection[Host]) -> str:
    """Return the names of a few hosts, and how many more there are."""
    if len(some) == len(of) > 1:
        return f"all {len(of)} hosts"
    more = len(some) - _NAMED
    return ", ".join(host.name for host in some[:_NAMED]) + (f" and {more} more" if more > 0 else "")
