"""What ``iris-ray doctor`` looks at: each check is a function from facts to findings."""

import platform
import random
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import iris_ray
from iris_ray.cli.host_look import METADATA_TIMEOUT_S, metadata_answers, metadata_host
from iris_ray.cli.tables import counted
from iris_ray.model.workers import TPU, TPU_NAME, Worker, string_attribute
from iris_ray.state.events import WorkerRegisteredEvent
from iris_ray.state.groups import Group

if TYPE_CHECKING:
    from iris_ray.actors.controller.node_table import NodeTable

CHECKED_RAY = "2.60"
"""The Ray whose private APIs iris_ray was checked on."""
TASK_PORTS = range(20_000, 32_768)
"""Where the tasks of a gang listen for each other."""
_PORTS_TRIED = 40


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    INFO = "info"
    WARNING = "WARNING"
    ERROR = "ERROR"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do about it."""

    level: Level
    check: str
    found: str
    advice: str | None = None


# -- this machine ------------------------------------------------------------------------------------------------------


def check_versions() -> Finding:
    install = f"pip install 'ray[default]=={CHECKED_RAY}.*'"
    try:
        ray = version("ray")
    except PackageNotFoundError:
        return Finding(Level.ERROR, "versions", "Ray is not installed here", install)
    found = f"iris_ray {iris_ray.__version__}, Ray {ray}, Python {platform.python_version()}"
    if ray.split(".")[:2] == CHECKED_RAY.split("."):
        return Finding(Level.OK, "versions", found)
    found += f"; this iris_ray was checked on Ray {CHECKED_RAY}"
    return Finding(Level.WARNING, "versions", found, f"{install} here and in the cluster's image, or another iris_ray")


def check_user(environ: Mapping[str, str], user: str) -> Finding:
    if environ.get("IRIS_USER"):
        return Finding(Level.OK, "user", f"{user}, from IRIS_USER")
    if user in ("root", "ray", "0"):
        advice = "set IRIS_USER to your name: users share the cluster fairly, and all who are called the same are one"
        return Finding(Level.WARNING, "user", f"{user}, the account that everybody has", advice)
    return Finding(Level.OK, "user", f"{user}, the operating system's account")


def check_ports(ephemeral: tuple[int, int] | None) -> Finding:
    """Whether tasks on this machine could listen on their ports.

    Args:
        ephemeral: the range that the kernel takes ports of outgoing connections from, or None if it is not known.
    """
    name = f"ports {TASK_PORTS.start}-{TASK_PORTS.stop - 1}"
    tried = random.sample(TASK_PORTS, _PORTS_TRIED)
    usable = sum(map(_can_bind, tried))
    if not usable:
        advice = "tasks find no port to meet on: see what holds them (ss -ltn) or forbids them"
        return Finding(Level.ERROR, name, f"none of {_PORTS_TRIED} that were tried can be used on this machine", advice)
    if ephemeral and ephemeral[0] < TASK_PORTS.stop and ephemeral[1] >= TASK_PORTS.start:
        advice = f"sysctl net.ipv4.ip_local_port_range='{TASK_PORTS.stop} 60999' on every host"
        found = f"outgoing connections take ports {ephemeral[0]}-{ephemeral[1]}, also those of tasks that just start"
        return Finding(Level.WARNING, name, found, advice)
    return Finding(Level.OK, name, f"usable on this machine ({usable} of {_PORTS_TRIED} that were tried are free)")


def ephemeral_ports() -> tuple[int, int] | None:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return None
    return int(first), int(last)


def _can_bind(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def check_metadata(environ: Mapping[str, str]) -> Finding:
    """Whether Google's metadata server answers, within a second."""
    host = metadata_host(environ)
    if metadata_answers(environ):
        return Finding(Level.OK, "metadata server", f"{host} answers: this is Google Cloud")
    found = f"{host} does not answer within {METADATA_TIMEOUT_S:g} s"
    if environ.get("GCE_METADATA_HOST"):
        advice = "GCE_METADATA_HOST names it: unset that, or see to it that it answers"
        return Finding(Level.WARNING, "metadata server", found, advice)
    advice = "nothing to do outside Google Cloud; on a TPU VM or in GKE see to it that it can be reached"
    return Finding(Level.INFO, "metadata server", found, advice)


# -- the cluster -------------------------------------------------------------------------------------------------------


def check_hosts(table: "NodeTable", reserved: Mapping[str, float]) -> Iterator[Finding]:
    """TPU hosts, their labels, and the slices that they make up.

    Args:
        table: a reading of Ray's tables.
        reserved: how many chips of a node iris_ray has reserved, by node id.
    """
    from iris_ray.actors.controller.node_table import SLICE_NAME_LABEL, registration

    slices: dict[str, list[Worker]] = {}
    refused, unlabelled, foreign = [], [], []
    for node in table.nodes:
        if not node["Alive"]:
            continue
        event = registration(node, table, ours=reserved.get(node["NodeID"], 0.0))
        if isinstance(event, str):
            refused.append(event)
        elif event is None:
            if node.get("Resources", {}).get(TPU) and SLICE_NAME_LABEL not in node.get("Labels", {}):
                unlabelled.append(node["NodeManagerAddress"])
        elif TPU_NAME in event.attributes:
            worker = _worker(event)
            slices.setdefault(string_attribute(worker.attributes, TPU_NAME) or "", []).append(worker)
            if worker.foreign:
                foreign.append(f"{string_attribute(worker.attributes, TPU_NAME)}: {worker.foreign}")
    yield _labels_found(slices)
    for reason in refused:
        advice = "mend the node's labels (ray start --labels=...): Ray sets them by itself on a TPU VM"
        yield Finding(Level.ERROR, "refused host", reason, advice)
    for address in unlabelled:
        advice = f"start it with --labels={SLICE_NAME_LABEL}=...,ray.io/tpu-worker-id=...,ray.io/tpu-pod-type=..."
        yield Finding(Level.WARNING, "unlabelled host", f"{address} has TPU chips and no {SLICE_NAME_LABEL}", advice)
    yield from _slices_found(slices)
    for chips in foreign:
        advice = "wait for, or end, what uses them: iris_ray gives the slice to nobody until then"
        yield Finding(Level.WARNING, "chips in use", chips, advice)
    if slices and not foreign:
        yield Finding(Level.OK, "chips in use", "none outside iris_ray")


def _worker(event: WorkerRegisteredEvent) -> Worker:
    return Worker(event.node_id, event.address, event.attributes, event.resources, event.draining, event.foreign)


def _labels_found(slices: Mapping[str, list[Worker]]) -> Finding:
    if not slices:
        advice = "start Ray on TPU VMs and join them; to try without: iris-ray demo"
        return Finding(Level.WARNING, "TPU hosts", "none that can be used", advice)
    types = Counter(str(workers[0].attributes["tpu-topology"].value) for workers in slices.values())
    named = ", ".join(f"{count} × {name}" for name, count in sorted(types.items()))
    return Finding(Level.OK, "TPU hosts", f"{counted(sum(map(len, slices.values())), 'host')} with labels: {named}")


def _slices_found(slices: Mapping[str, list[Worker]]) -> Iterator[Finding]:
    complete = 0
    for name, workers in sorted(slices.items()):
        group = Group(name, workers, is_slice=True)
        if group.defect:
            advice = "start the missing host's node again, or replace the slice; jobs pass it by until then"
            yield Finding(Level.WARNING, "incomplete slice", f"{name}: {group.defect}", advice)
        else:
            complete += 1
        for taint in group.taints:
            yield Finding(Level.INFO, "tainted slice", f"{name}: {taint}", "an operator has labelled it so")
        for worker in workers:
            if worker.draining:
                found = f"{name}: {worker.name}: {worker.draining}"
                yield Finding(Level.INFO, "draining host", found, "it is about to go; nothing new starts there")
    if slices:
        level = Level.OK if complete == len(slices) else Level.INFO
        yield Finding(level, "slices", f"{complete} of {len(slices)} are complete")


def check_controller(about: Mapping[str, Any] | None, in_words: str, hosts: int) -> Finding:
    """Args:
    about: what the Controller says about itself; None if there is none.
    in_words: the same for people.
    hosts: how many hosts it sees.
    """
    if about is None:
        advice = "nothing to do: the first job starts it, and so does: iris-ray controller start"
        return Finding(Level.INFO, "Controller", "none runs", advice)
    if about["version"] != iris_ray.__version__:
        found = f"{in_words}; this is iris_ray {iris_ray.__version__}, and the two understand each other"
        advice = "install the same version everywhere, then: iris-ray controller upgrade; jobs that run go on"
        return Finding(Level.INFO, "Controller", found, advice)
    return Finding(Level.OK, "Controller", f"{in_words}; sees {counted(hosts, 'host')}")
