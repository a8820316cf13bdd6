"""One incarnation of a gang, from its order to its verdict.

A fixed sequence: hold the slices → have every host ready → start every task → wait → gather evidence → stop everybody
→ judge. It knows nothing of budgets and does not talk about its end to the Controller; `GangRun` does.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from ray.exceptions import RuntimeEnvSetupError

from iris_ray.actors.controller_client import ControllerClient
from iris_ray.actors.messages import AttemptOrder, RunRequest, TaskLaunch
from iris_ray.actors.resource_pool import Unreachable
from iris_ray.actors.slice_pool import SlicePool
from iris_ray.errors import TaskSetupError
from iris_ray.job_info import JobInfo
from iris_ray.multislice import MultisliceInfo
from iris_ray.outcomes import EndKind, HostEvidence, TaskEnd, TaskKey
from iris_ray.retry import Verdict, judge_gang

RESERVE_TIMEOUT_S = 10.0
"""How long Ray may take to reserve chips that the Controller believes to be free."""
REFILL_DELAY_S = 4.0
"""A gang that has run so long gets its next standbys; before, they would only compete with it."""
STOP_TIMEOUT_S = 20.0

Ends = dict[TaskKey, TaskEnd | None]


class LaunchFailed(Exception):
    """The attempt could not be started whole; no user code ran.

    Attributes:
        broken: the slices that are at fault.
        suspicious: those among them of which a host may be gone.
        by_request: what the user asked for is at fault.
    """

    def __init__(
        self,
        reason: str,
        broken: tuple[str, ...] = (),
        suspicious: tuple[str, ...] = (),
        by_request: bool = False,
    ) -> None:
        super().__init__(reason)
        self.broken = broken
        self.suspicious = suspicious
        self.by_request = by_request


class Attempt:
    """Runs one order.

    Attributes:
        number: the attempt's number.
        names: the slices' names by slice id.
        lost: slices that are no good any more, known after the verdict.
        suspects: hosts that did not answer, by node id, and why they count as lost.
        tidy: its slices are idle again; they may already be somebody else's.
        over: set when no process of it is left and its end has been reported.
    """

    def __init__(
        self, slices: SlicePool, controller: ControllerClient, request: RunRequest, order: AttemptOrder
    ) -> None:
        self.number = order.attempt
        self.names = tuple(hosts[0].slice_name for hosts in order.slices)
        self.lost: tuple[str, ...] = ()
        self.suspects: dict[str, str] = {}
        self.tidy = False
        self.over = asyncio.Event()
        self._ends: Ends = {}
        self._slices = slices
        self._controller = controller
        self._request = request
        self._order = order
        self._stop_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def on_slices(self) -> bool:
        return self._order.on_slices

    @property
    def where(self) -> str:
        """Its place, in words."""
        if not self.on_slices:
            return self._order.slices[0][0].address
        return f"{', '.join(self.names)} ({self.num_tasks} host{'s' if self.num_tasks > 1 else ''})"

    @property
    def leaving(self) -> tuple[str, ...]:
        """What is given back at once: slices that are no good any more, and the place on a host that others share."""
        return self.lost if self.on_slices else self.names

    @property
    def num_tasks(self) -> int:
        return self._order.hosts_per_slice * len(self.names)

    def index_of(self, key: TaskKey) -> int:
        return self._order.first_task + key.slice_id * self._order.hosts_per_slice + key.worker_id

    def place_in_words(self, key: TaskKey) -> str:
        if not self.on_slices:
            return f"task {self._order.first_task} on {self.where}"
        return f"slice {key.slice_id} ({self.names[key.slice_id]}) worker {key.worker_id}"

    def never_started(self, key: TaskKey) -> bool:
        """Whether this task's process had ended before any user code ran in it."""
        end = self._ends.get(key)
        return end is not None and end.kind is EndKind.NEVER_STARTED

    async def silent_hosts(self, names: tuple[str, ...]) -> dict[str, str]:
        """Node ids of these slices' hosts that do not answer, and why they count as lost."""
        silent: dict[str, str] = {}
        for hosts in self._order.slices:
            name = hosts[0].slice_name
            if name in names and name in self._slices:
                reasons = await self._slices.ask_hosts(name)
                silent |= {host.node_id: why for host in hosts if (why := reasons[host.worker_id]) is not None}
        return silent

    def stop(self, reason: str) -> None:
        """Have it end soon; wait for `over` to know that it has."""
        if not self._stop_reason.done():
            self._stop_reason.set_result(reason)

    async def prepare(self) -> dict[str, list[TaskLaunch]]:
        """Get every host to the point where its task starts at once; what to launch, by slice name.

        Raises:
            LaunchFailed: some host did not get there, or somebody wants the attempt to stop.
        """
        self._slices.scale_multislice(self._order, self._request.process, self._request.keep_warm)
        ready = asyncio.ensure_future(self._all_ready())
        refusal = asyncio.ensure_future(self._refusal())
        first: set[asyncio.Future[Any]] = {ready, refusal, self._stop_reason}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self._stop_reason.done():
                raise LaunchFailed(self._stop_reason.result())
            if refusal.done():
                raise refusal.result()
            answers = ready.result()
        finally:
            ready.cancel()
            refusal.cancel()
        broken = {n: a for n, a in answers.items() if isinstance(a, (Unreachable, BaseException))}
        if broken:
            reasons = "; ".join(a.reason if isinstance(a, Unreachable) else str(a) or repr(a) for a in broken.values())
            by_request = any(isinstance(a, (RuntimeEnvSetupError, TaskSetupError)) for a in broken.values())
            suspicious = tuple(name for name, a in broken.items() if isinstance(a, Unreachable))
            raise LaunchFailed(reasons, tuple(broken), suspicious, by_request)
        return self._launches(answers[self.names[0]])

    async def run(self, launches: Mapping[str, list[TaskLaunch]]) -> Verdict:
        """Start every task and wait for the gang's end. After success, `stop_all` ends its processes."""
        slices = self._slices
        calls: dict[asyncio.Future[Any], int] = {
            asyncio.ensure_future(slices.ask(name, "run_remote_fn", launches[name], timeout_s=None)): slice_id
            for slice_id, name in enumerate(self.names)
        }
        for call in calls:
            call.add_done_callback(
                lambda done: done.cancelled() or done.exception()
            )  # nobody asks once we are cancelled
        slices.use_standbys(self.names)
        refill = asyncio.get_running_loop().call_later(
            REFILL_DELAY_S, slices.renew_standbys, self.names, self._request.process
        )
        try:
            ends = await self._until_end(calls)
        finally:
            refill.cancel()
        if all(returned(end) for end in ends.values()):
            return judge_gang(ends, dict.fromkeys(ends, HostEvidence()))

        evidence = await self._gather_evidence()
        # The slice is the unit of failure: one host lost or about to go, and it is worthless.
        bad = {key.slice_id for key, host in evidence.items() if host.lost or host.draining}
        self.lost = tuple(self.names[slice_id] for slice_id in sorted(bad))
        reason = self._stop_reason.result() if self._stop_reason.done() else "another task of the gang ended"
        self._ends = ends | await self.stop_all(reason)
        return judge_gang(self._ends, evidence)

    async def stop_all(self, reason: str | None) -> Ends:
        """End all tasks and wait until their processes are gone; how each one ended, as far as its host can say.

        Args:
            reason: why; None after success, to let exit handlers of user code run.
        """
        names = [name for name in self.names if name in self._slices]
        replies = await asyncio.gather(
            *(
                self._slices.ask(name, "stop", self._order.job_id, self.number, reason, timeout_s=STOP_TIMEOUT_S)
                for name in names
            ),
            return_exceptions=True,
        )
        ends: Ends = {}
        for name, reply in zip(names, replies, strict=True):
            if isinstance(reply, (Unreachable, BaseException)) or None in reply.values():
                self.lost = tuple(sorted({*self.lost, name}))  # what is not known to be clean is not used again
            if not isinstance(reply, (Unreachable, BaseException)):
                slice_id = self.names.index(name)
                ends |= {TaskKey(slice_id, worker): end for worker, end in reply.items() if end is not None}
        return ends

    # -- its parts -------------------------------------------------------------------------------------------------

    async def _all_ready(self) -> dict[str, Any]:
        """The ports that each slice's host 0 holds once every host could start at once, or why a slice can't."""
        waits = (asyncio.shield(self._slices[name].ready) for name in self.names)
        return dict(zip(self.names, await asyncio.gather(*waits, return_exceptions=True), strict=True))

    async def _refusal(self) -> LaunchFailed:
        """Returns if Ray has not reserved the slices in time: somebody outside iris_ray was faster."""
        await asyncio.sleep(RESERVE_TIMEOUT_S)
        held = [self._slices[name] for name in self.names]
        waiting = await asyncio.to_thread(lambda: [one.name for one in held if not one.is_reserved()])
        if not waiting:
            await asyncio.Event().wait()  # reserved; the rest is a matter of starting processes
        return LaunchFailed(
            f"Ray did not reserve {', '.join(waiting)} within {RESERVE_TIMEOUT_S:g} s: its resources are in use outside"
            " iris_ray, or its hosts are going away",
            tuple(waiting),
        )

    def _launches(self, ports: tuple[int, ...]) -> dict[str, list[TaskLaunch]]:
        """What each host gets, with addresses for this attempt alone."""
        request, slices, job_id = self._request, self._order.slices, self._order.job_id
        spec = request.spec
        self._slices.used_ports.extend(ports)
        megascale_port, debug_port, coordinator_port = ports
        coordinator = slices[0][0].address
        launches: dict[str, list[TaskLaunch]] = {}
        for slice_id, hosts in enumerate(slices):
            multislice = MultisliceInfo(coordinator, slice_id, len(slices), megascale_port, debug_port)
            launches[self.names[slice_id]] = slice_launches = []
            for host in hosts:
                key = TaskKey(slice_id, host.worker_id)
                index = self.index_of(key)
                info = JobInfo(
                    job_id=job_id,
                    task_id=f"{job_id}/task-{index}",
                    task_index=index,
                    num_tasks=self.num_tasks if spec.coscheduling else spec.replicas,
                    attempt=self.number,
                    slice_id=slice_id,
                    num_slices=len(slices),
                    slice_name=host.slice_name if self.on_slices else "",
                    worker_id=host.worker_id,
                    coordinator_address=f"{coordinator}:{coordinator_port}",
                )
                place = f"slice={slice_id} worker={host.worker_id}" if spec.coscheduling else f"task={index}"
                label = f"{spec.name} {place}"
                slice_launches.append(
                    TaskLaunch(request.function, request.env, info, multislice, spec.resources.get("CPU"), label)
                )
        return launches

    async def _until_end(self, calls: Mapping["asyncio.Future[Any]", int]) -> Ends:
        """Wait until all tasks have returned, one has not, or somebody wants the attempt to stop."""
        workers = range(self._order.hosts_per_slice)
        ends: Ends = {TaskKey(slice_id, w): None for slice_id in calls.values() for w in workers}
        pending: set[asyncio.Future[Any]] = {*calls, self._stop_reason}
        while len(pending) > 1 and not self._stop_reason.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            replies = {calls[call]: call.result() for call in done if call is not self._stop_reason}
            for slice_id, reply in replies.items():
                if not isinstance(reply, Unreachable):
                    ends |= {TaskKey(slice_id, worker): end for worker, end in reply.items()}
            if not all(returned(ends[TaskKey(slice_id, w)]) for slice_id in replies for w in workers):
                break
        return ends

    async def _gather_evidence(self) -> dict[TaskKey, HostEvidence]:
        """Ask every host whether it is there, and the Controller what it has heard about them."""
        slices = self._order.slices
        node_ids = [host.node_id for hosts in slices for host in hosts]
        word, *replies = await asyncio.gather(
            self._controller.ask_once("evidence", node_ids),
            *(self._slices.ask(name, "healthy") for name in self.names),
        )
        heard: dict[str, HostEvidence] = {} if isinstance(word, Unreachable) else word
        evidence = {}
        for slice_id, (hosts, reply) in enumerate(zip(slices, replies, strict=True)):
            alone = isinstance(reply, Unreachable)  # its SliceActor is gone; the hosts may be there
            silent = await self._slices.ask_hosts(self.names[slice_id]) if alone else reply
            for host in hosts:
                said = heard.get(host.node_id, HostEvidence())
                lost = said.lost or silent[host.worker_id]
                if lost:
                    self.suspects[host.node_id] = lost
                elif alone and host.worker_id == 0:
                    lost = reply.reason
                evidence[TaskKey(slice_id, host.worker_id)] = HostEvidence(lost, said.draining)
        return evidence


def returned(end: TaskEnd | None) -> bool:
    return end is not None and end.kind is EndKind.RETURNED
