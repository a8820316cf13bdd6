"""The checks of ``iris-ray doctor`` on the cluster: labels, slices, chips in use, Controller."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import iris_ray
from iris_ray.actors.calls.service_parts import LONG_STEP_S
from iris_ray.actors.protocol.status import WorkerStatus
from iris_ray.actors.protocol.version import in_words as versions_in_words
from iris_ray.cli.printing import Finding, Level, counted, duration
from iris_ray.dashboard.slices import SliceView, host_name, slices_of
from iris_ray.model.constraints import TAINT_PREFIX
from iris_ray.model.workers import TPU_NAME
from iris_ray.state import ControllerState
from iris_ray.state.quarantine import QUARANTINE

if TYPE_CHECKING:
    from iris_ray.actors.controller.node_table import NodeTable

DAY_S = 86_400.0


def check_hosts(table: "NodeTable", reserved: Mapping[str, float]) -> Iterator[Finding]:
    """Check the TPU hosts, their labels, and the slices that they form.

    Args:
        table: a snapshot of Ray's tables.
        reserved: how many chips of each node iris_ray has reserved, by node id.
    """
    from iris_ray.actors.controller.node_table import SLICE_NAME_LABEL, registration
    from iris_ray.actors.controller.own_slices import OwnSlices
    from iris_ray.actors.controller.views import worker_status

    hosts: list[WorkerStatus] = []
    refused: list[str] = []
    unlabelled: list[str] = []
    own_slices, state = OwnSlices(), ControllerState()
    for node in table.nodes:
        if not node["Alive"]:
            continue
        event = registration(node, table, ours=reserved.get(node["NodeID"], 0.0))
        if isinstance(event, str):
            (refused if SLICE_NAME_LABEL in node.get("Labels", {}) else unlabelled).append(event)
        elif TPU_NAME in event.attributes:
            worker = own_slices.named(event)
            state.handle_event(worker)
            hosts.append(worker_status(state.workers[worker.node_id], state, 0.0))
    slices = slices_of(hosts)
    foreign = [f"{host.slice_name}: {host.foreign}" for host in hosts if host.foreign]
    yield _labels_found(slices)
    for reason in refused:
        advice = "correct the node's labels (ray start --labels=...): Ray sets them by itself on a TPU VM"
        yield Finding(Level.ERROR, "refused host", reason, advice)
    for reason in unlabelled:
        advice = f"start it with --labels={SLICE_NAME_LABEL}=...,ray.io/tpu-worker-id=...,ray.io/tpu-pod-type=..."
        yield Finding(Level.WARNING, "unlabelled host", reason, advice)
    yield from _slices_found(slices)
    for chips in foreign:
        advice = "wait for the processes that use them, or end them: iris_ray gives the slice to no job until then"
        yield Finding(Level.WARNING, "chips in use", chips, advice)
    if slices and not foreign:
        yield Finding(Level.OK, "chips in use", "none outside iris_ray")


def _labels_found(slices: Sequence[SliceView]) -> Finding:
    if not slices:
        advice = "start Ray on TPU VMs and join them; to try without: iris-ray demo"
        return Finding(Level.WARNING, "TPU hosts", "none that can be used", advice)
    types = Counter(str(view.type) for view in slices)
    named = ", ".join(f"{count} × {name}" for name, count in sorted(types.items()))
    hosts = sum(len(view.hosts) for view in slices)
    return Finding(Level.OK, "TPU hosts", f"{counted(hosts, 'host')} with labels: {named}")


def _slices_found(slices: Sequence[SliceView]) -> Iterator[Finding]:
    complete = 0
    for view in slices:
        if view.defect:
            advice = "start the missing host's node again, or replace the slice; no job uses it until then"
            yield Finding(Level.WARNING, "incomplete slice", f"{view.slice}: {view.defect}", advice)
        else:
            complete += 1
        for taint in dict.fromkeys(
            name for host in view.hosts for name in host.attributes if name.startswith(TAINT_PREFIX)
        ):
            yield Finding(Level.INFO, "tainted slice", f"{view.slice}: {taint}", "an operator has set this label")
        for host in view.hosts:
            if host.draining:
                found = f"{view.slice}: {host_name(host)}: {host.draining}"
                yield Finding(Level.INFO, "draining host", found, "it will end soon; no new job starts there")
    if slices:
        level = Level.OK if complete == len(slices) else Level.INFO
        yield Finding(level, "slices", f"{complete} of {len(slices)} are complete")


def check_quarantine(workers: Iterable[WorkerStatus]) -> Iterator[Finding]:
    """Name the hosts that no job gets, because tasks or launches have failed there again and again."""
    for worker in workers:
        if (reason := worker.attributes.get(f"{TAINT_PREFIX}{QUARANTINE}")) is not None:
            place = f"{worker.slice_name} host {worker.host_index}" if worker.slice_name else f"host {worker.address}"
            advice = (
                f"find the cause there; to use it again at once: iris-ray host undrain {worker.node_id} {QUARANTINE}"
            )
            yield Finding(Level.WARNING, "quarantined host", f"{place}: {reason}", advice)


def check_about(about: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield what is wrong by the Controller's own account, ``about``. A Controller of another version may say less."""
    now, services = time.time(), about.get("services", {})
    for aside in about.get("set_aside", ()):
        began = "" if aside.since is None else f", {duration(now - aside.since)} ago"
        ends = "" if aside.until is None else f", tried again in {duration(max(0.0, aside.until - now))}"
        yield Finding(Level.WARNING, "set aside", f"{aside.name}{began}{ends}: {aside.why}")
    demand = services.get("capacity", {})
    if "way" in demand:
        check, found = "missing slices", f"they are asked for by {demand['way']}"
        if demand["problem"] is None:
            yield Finding(Level.OK, check, found)
        else:
            found += f", which miscounts slices on KubeRay: {demand['problem']}"
            advice = "let the account of the head's pod read and patch its RayCluster; the Controller looks again"
            yield Finding(Level.WARNING, check, found, advice)
    for at, jump in about.get("clock_jumps", ())[-1:]:
        if now - at < DAY_S:
            found = f"the wall clock of the Controller's machine jumped by {jump:+.0f} s, {duration(now - at)} ago"
            advice = "jobs are not affected, but times in lists jump too: keep the clocks of all machines in step"
            yield Finding(Level.WARNING, "clock", found, advice)
    for one in about.get("service_health", ()):
        if one.trouble is not None:
            found = f"{one.service} is failing ({counted(one.failures, 'failure')}): {one.trouble}"
            advice = "jobs continue without it; the Controller keeps restarting it"
            yield Finding(Level.WARNING, "service", found, advice)
        if one.longest_step_s > LONG_STEP_S:
            found = f"{one.service} has blocked the Controller for {one.longest_step_s:.2f} s"
            yield Finding(Level.INFO, "service", found)
    cleaning = services.get("cleaning", {})
    if "files" in cleaning:
        found = f"{counted(cleaning['files'], 'old file')} with {cleaning['bytes'] >> 20} MB in all were removed from"
        found += f" hosts and head since {duration(now - cleaning['since'])}"
        if cleaning["trouble"] is None:
            yield Finding(Level.OK, "cleaning", found)
        else:
            advice = "remove them there, as their owner or root"
            yield Finding(
                Level.WARNING, "cleaning", f"{found}; some files can't be removed: {cleaning['trouble']}", advice
            )
    history = services.get("history", {})
    if trouble := history.get("trouble"):
        found = f"{history['path']}: {trouble}; {history['lost']} records are lost"
        advice = (
            "jobs are not affected; free its disk, or choose another: iris-ray cluster settings set history=DIRECTORY"
        )
        yield Finding(Level.WARNING, "history", found, advice)
    notify = services.get("notify", {})
    if waiting := notify.get("waiting"):
        advice = "see why: iris-ray job notifications ls"
        yield Finding(Level.INFO, "notifications", f"{counted(waiting, 'notification')} not sent yet", advice)
    if trouble := notify.get("trouble"):
        advice = "jobs are not affected; if its disk is full, free some room there"
        yield Finding(Level.WARNING, "notifications", f"the head can't store waiting notifications: {trouble}", advice)


def check_controllers_code(about: Mapping[str, Any], installed: Mapping[str, Any] | None) -> Finding:
    """Check that the Controller runs what is installed on the head.

    Args:
        about: the Controller's account of itself.
        installed: the versions of the iris_ray on the head; None if there is none.
    """
    check = "Controller's code"
    runs = f"it runs iris_ray {about['version']} from {about['package']}"
    if installed is None:
        advice = "install iris_ray on the head, so that no job brings it; then: iris-ray cluster controller upgrade"
        return Finding(Level.WARNING, check, f"{runs}, which a job has brought: none is installed on the head", advice)
    if installed["version"] != about["version"]:
        advice = (
            "iris-ray cluster controller upgrade; until then, a Controller that crashes comes back with the new code"
        )
        return Finding(Level.WARNING, check, f"{runs}, and on the head is {versions_in_words(installed)}", advice)
    return Finding(Level.OK, check, f"{runs}, as it is installed on the head")


def check_controller(about: Mapping[str, Any] | None, in_words: str, hosts: int) -> Finding:
    """Check the Controller.

    Args:
        about: the Controller's account of itself; None if none runs.
        in_words: the account for people.
        hosts: how many hosts it sees.
    """
    if about is None:
        advice = "nothing to do: the first job starts it, and so does: iris-ray cluster controller start"
        return Finding(Level.INFO, "Controller", "none runs", advice)
    if about["version"] != iris_ray.__version__:
        found = f"{in_words}; this is iris_ray {iris_ray.__version__}, and the two understand each other"
        advice = "install the same version everywhere, then: iris-ray cluster controller upgrade; running jobs continue"
        return Finding(Level.INFO, "Controller", found, advice)
    return Finding(Level.OK, "Controller", f"{in_words}; sees {counted(hosts, 'host')}")
