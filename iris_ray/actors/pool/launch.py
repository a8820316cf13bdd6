"""Launching an attempt: get every host ready to start its task at once, and plan the launch of each process."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from iris_ray.actors.pool.attempt_place import AttemptContext, AttemptPlace
from iris_ray.actors.pool.reserved_slices import ReservedSlices, in_words, is_broken
from iris_ray.actors.pool.services import UNFIT_S, PoolParts
from iris_ray.actors.protocol.answers import NotReserved, OtherVersion, SetupFailed, Unfit, Unreachable
from iris_ray.actors.protocol.messages import RunRequest, SliceReady, TaskLaunch
from iris_ray.model.job_info import JobInfo
from iris_ray.model.job_spec import JobSpec
from iris_ray.model.lifecycle import task_id
from iris_ray.model.multislice import MultisliceInfo
from iris_ray.model.options import EACH_SLICE
from iris_ray.model.outcomes import Fault, TaskKey
from iris_ray.model.topology import default_topology, get_tpu_config
from iris_ray.model.tpu_processes import LIBTPU_PORT, TpuProcess
from iris_ray.model.workers import GPU
from iris_ray.settings import PRIORITY, PRIORITY_REASON, TEAM, USER

Launches = Mapping[str, list[TaskLaunch]]
"""The launches of a gang, once all of its hosts are ready: by slice name, and then by process of the slice."""


@dataclass(frozen=True, slots=True)
class BrokenSlices:
    """The slices that did not get ready.

    Attributes:
        names: the slices.
        silent: slices with a host that may be gone.
        unfit: why a host can't take a task, by node id.
        blamed: hosts that answer and are at fault, by node id: why, and the kind of fault.
    """

    names: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)
    blamed: Mapping[str, tuple[str, Fault]] = field(default_factory=dict)


class LaunchFailed(Exception):
    """No task of the attempt started. The subclasses are the reasons that make a difference::

    LaunchFailed            some host did not get ready, or the attempt was asked to end
    ├─ MovedBeforeStart     the attempt had notice to move before it began
    ├─ SecretNotReadable    the job can't have a secret of the cluster's store; no host is at fault
    ├─ ChipsInUse           other tasks of iris_ray hold all missing chips, so the gang only has to wait
    ├─ OtherVersions        the iris_ray on the hosts does not work with this one
    │  └─ NoVersionFits     nor does it on any other hosts that the job could get
    └─ SetupImpossible      no host could set up the environment of the user's request
    """

    def __init__(self, reason: str, broken: BrokenSlices = BrokenSlices()) -> None:
        super().__init__(reason)
        self.broken = broken


class MovedBeforeStart(LaunchFailed):
    """The attempt had notice to move before it began."""


class SecretNotReadable(LaunchFailed):
    """A secret is missing in the cluster's store, is for others, or can't be read."""


class ChipsInUse(LaunchFailed):
    """Other tasks of iris_ray hold all missing chips."""


class SetupImpossible(LaunchFailed):
    """No host could set up the environment of the user's request.

    Attributes:
        is_certain: whether several hosts have failed, so that no other host need be tried.
    """

    def __init__(self, reason: str, broken: BrokenSlices, is_certain: bool) -> None:
        super().__init__(reason, broken)
        self.is_certain = is_certain


class OtherVersions(LaunchFailed):
    """The iris_ray on hosts does not work with this one. That of other hosts may.

    Attributes:
        misfits: why it does not, by the node id of the host.
    """

    def __init__(self, reason: str, broken: BrokenSlices, misfits: Mapping[str, str]) -> None:
        super().__init__(reason, broken)
        self.misfits = misfits


class NoVersionFits(OtherVersions):
    """The iris_ray on none of the hosts that the job could get works with this one."""


async def prepare_launch(context: AttemptContext, services: PoolParts, suspected: Mapping[str, str]) -> Launches:
    """Hold the slices, and wait until every host can start its task at once, or the attempt is asked to stop.

    Services test hosts meanwhile that are suspected, by node id with the reason.

    Raises:
        LaunchFailed: some host did not get ready, or the attempt was asked to stop.
    """
    place, slices, request, stop = context.place, context.slices, context.request, context.stop
    slices.scale_multislice(place.order, request.process, request.keep_warm)
    ready = asyncio.ensure_future(slices.all_ready(place.names, request.host_silence))
    are_ready = asyncio.Event()
    tests = asyncio.ensure_future(services.unfit(context, suspected, are_ready))
    first: set[asyncio.Future[Any]] = {ready, stop.reason}
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if stop.asked:
            raise (LaunchFailed if stop.moved_for is None else MovedBeforeStart)(stop.reason.result())
        answers = ready.result()
        if not any(map(is_broken, answers.values())):
            are_ready.set()
            await asyncio.wait({tests}, timeout=UNFIT_S)
            answers |= tests.result() if tests.done() else {}
    finally:
        ready.cancel()
        tests.cancel()
    broken = {name: reply for name, reply in answers.items() if is_broken(reply)}
    if broken:
        works = len(broken) < len(answers) or slices.has_worked(request.process)
        raise _failed_launch(place, broken, works)
    first_slice: SliceReady = answers[place.names[0]]
    slices.used_ports.extend(first_slice.ports[0])
    ports = {name: answers[name].ports for name in place.names}
    addresses = tuple(address for name in place.names for address in answers[name].file_services)
    return launch_plan(request, place, ports, addresses)


def _failed_launch(place: AttemptPlace, replies: Mapping[str, Any], has_worked: bool) -> LaunchFailed:
    """Return the error for these slices.

    Args:
        place: all hosts of the attempt.
        replies: the answers of the slices that can't be used, by name.
        has_worked: whether any host could set up the request's environment. Then the request is not at fault.
    """
    setups = {name: reply for name, reply in replies.items() if isinstance(reply, SetupFailed)}
    hosts_of = dict(zip(place.names, place.order.slices, strict=True))
    at_fault = {name: [hosts_of[name][i].node_id for i in setup.hosts] for name, setup in setups.items()}
    unsuited = {name: setup for name, setup in setups.items() if isinstance(setup, OtherVersion)}
    failed = {name: setup for name, setup in setups.items() if name not in unsuited}
    works = has_worked or any(setup.works_elsewhere for setup in setups.values())
    unfit = [reply for reply in replies.values() if isinstance(reply, Unfit)]
    blamed = {reply.node_id: (reply.why, Fault.HOST) for reply in unfit if not reply.ours}
    if works:  # hosts of another version are right for others, and not blamed
        blamed |= {node: (setup.reason, Fault.NO_START) for name, setup in failed.items() for node in at_fault[name]}
    known = (NotReserved, Unfit, SetupFailed)
    silent = (n for n, a in replies.items() if isinstance(a, Unreachable) and not isinstance(a, known))
    suspects = {reply.node_id: reply.why for reply in unfit}
    reason, broken = in_words(replies), BrokenSlices(tuple(replies), tuple(silent), suspects, blamed)
    if len(unsuited) == len(replies):
        misfits = {node: setup.reason for name, setup in unsuited.items() for node in at_fault[name]}
        return OtherVersions(reason, broken, misfits)
    if failed and not works:
        return SetupImpossible(reason, broken, is_certain=sum(map(len, (at_fault[name] for name in failed))) > 1)
    if len(unfit) == len(replies) and all(reply.ours for reply in unfit):
        return ChipsInUse(reason, broken)
    return LaunchFailed(reason, broken)


async def silent_hosts(place: AttemptPlace, slices: ReservedSlices, names: tuple[str, ...]) -> dict[str, str]:
    """Return why hosts of these slices do not answer, by node id."""
    silent: dict[str, str] = {}
    for hosts in place.order.slices:
        name = hosts[0].slice_name
        if name in names and name in slices:
            reasons = await slices.ask_hosts(name)
            silent |= {host.node_id: why.reason for host in hosts if (why := reasons[host.host_index]) is not None}
    return silent


Ports = Mapping[str, Sequence[tuple[int, ...]]]
"""Free ports, by slice name and then process of the slice: four of each process, for MEGASCALE, its debug port, JAX's
coordinator, and libtpu. If hosts have one process each, only those of the first process are needed."""


MOST_ADDRESS_CHARS = 100_000
"""The addresses of a gang's hosts travel in a variable of each task, and Linux allows 128 KiB for one."""


def launch_plan(
    request: RunRequest, place: AttemptPlace, ports: Ports, file_services: Sequence[str] = ()
) -> dict[str, list[TaskLaunch]]:
    """Return the launches by slice name and then process of the slice.

    Args:
        request: the job.
        place: where the attempt runs.
        ports: for this attempt alone.
        file_services: where the hosts serve files of the job, by slice and then host; empty if they don't.
    """
    addresses = _process_addresses(place, ports, request.spec.part is not None)
    if sum(map(len, file_services)) + len(file_services) > MOST_ADDRESS_CHARS:
        file_services = ()
    of_tasks = tuple(address for address in file_services for _ in range(place.order.processes_per_host))
    launches: dict[str, list[TaskLaunch]] = {name: [] for name in place.names}
    for key in place.tasks():
        launches[place.name(key)].append(_launch(request, place, key, ports, addresses, of_tasks))
    return launches


def _process_addresses(place: AttemptPlace, ports: Ports, on_parts: bool) -> dict[str, tuple[str, ...]]:
    """Return the address of libtpu in each process, by slice name.

    It is empty for whole slices with one process on each host, which libtpu finds by itself.
    """
    per_host = place.order.processes_per_host
    if per_host == 1:
        hosts_of = zip(place.names, place.order.slices, strict=True)
        by_name = {name: tuple(f"{host.address}:{LIBTPU_PORT}" for host in hosts) for name, hosts in hosts_of}
        return by_name if on_parts else {}
    found = {}
    for name, hosts in zip(place.names, place.order.slices, strict=True):
        each = (host.address for host in hosts for _ in range(per_host))
        found[name] = tuple(f"{address}:{own[3]}" for address, own in zip(each, ports[name], strict=True))
    return found


def _launch(
    request: RunRequest,
    place: AttemptPlace,
    key: TaskKey,
    ports: Ports,
    addresses: Mapping[str, tuple[str, ...]],
    file_services: tuple[str, ...],
) -> TaskLaunch:
    slices, spec = place.order.slices, request.spec
    host, index, per_host = place.host(key), place.rank(key), place.order.processes_per_host
    megascale_port, debug_port, coordinator_port, _ = ports[place.names[0]][0]
    own_port = None
    if per_host > 1:  # processes of one host can't listen at the same port
        own_port, debug_port, _, _ = ports[place.name(key)][place.process(key)]
    address = slices[0][0].address
    by_slice = spec.failure_domain == EACH_SLICE  # the gang is one of several slices of its job
    num_tasks = place.num_ranks * spec.num_gangs
    info = JobInfo(
        job_id=spec.job_id,
        task_id=task_id(spec.job_id, index),
        task_index=index,
        num_tasks=num_tasks,
        attempt=place.order.attempt.number,
        slice_id=place.order.attempt.gang if by_slice else key.slice_id,
        num_slices=spec.num_gangs if by_slice else len(slices),
        slice_name=host.slice_name if place.on_slices else "",
        worker_id=host.host_index,
        coordinator_address=f"{address}:{coordinator_port}" if by_slice or spec.num_gangs == 1 else "",
        local_index=key.local_index,
        processes_per_host=per_host,
        previous_task_index=place.previous_rank(key),
        failure_domain=spec.failure_domain,
        file_services=file_services if place.on_slices else (),
        group=",".join(f"{name}={job_id}" for name, job_id in spec.group.members) if spec.group else "",
        children=spec.children,
    )
    num_slices = len(slices) if place.on_slices else 1
    multislice = MultisliceInfo(address, key.slice_id, num_slices, megascale_port, debug_port, own_port)
    label = f"slice={info.slice_id} worker={key.host_index}" if place.on_slices else f"task={index}"
    if per_host > 1:
        label += f" process={key.local_index}"
    secrets = {name: one.value for name, one in request.secrets.items() if not one.as_file}
    return TaskLaunch(
        request.pickled_function,
        _for_its_jobs(spec) | request.env | secrets,
        info,
        multislice,
        spec.resources.get("CPU"),
        f"{spec.name} {label}",
        spec.resources.get(GPU, 0.0),
        _tpu_process(spec, place, key, addresses[place.name(key)]) if addresses and spec.device else None,
        request.files_token,
        {name: one.value for name, one in request.secrets.items() if one.as_file},
    )


def _for_its_jobs(spec: JobSpec) -> dict[str, str]:
    """Return the variables that give the jobs that a task submits the user, team and band of its own job."""
    values = {USER: spec.user, TEAM: spec.team, PRIORITY: spec.priority.name.lower()}
    values[PRIORITY_REASON] = spec.priority_reason or ""
    return {variable.name: value for variable, value in values.items() if value}


def _tpu_process(spec: JobSpec, place: AttemptPlace, key: TaskKey, addresses: tuple[str, ...]) -> TpuProcess:
    told = "".join(place.order.topologies[key.slice_id : key.slice_id + 1])
    config = get_tpu_config(spec.device or "")
    topology = spec.part or told or default_topology(config)
    part_of = config.accelerator_type if spec.part else ""
    return TpuProcess(addresses, place.process(key), place.order.processes_per_host, topology, part_of)
