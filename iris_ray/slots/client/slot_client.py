"""The public API of slots: register models, and have them answer requests."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import ActorDiedError, RayTaskError

from iris_ray.actors.calls.asking import Actor, Reference
from iris_ray.actors.calls.ray_internals import is_connected
from iris_ray.errors import InvalidSlotError, IrisError, NoClusterError
from iris_ray.model.checks import shown
from iris_ray.slots.actors.messages import Ask, ModelOrder, SlotHosts, SlotStatus, packed
from iris_ray.slots.actors.slot_manager import SlotManager
from iris_ray.slots.actors.streams import Arrived
from iris_ray.slots.client.hold_host import cancel_runners, submit_runners
from iris_ray.slots.client.lease import ClientKeeper
from iris_ray.slots.client.model_order import model_order
from iris_ray.slots.client.named_manager import find, make_or_find
from iris_ray.slots.client.served_command import ServedCommand
from iris_ray.slots.client.session import Session
from iris_ray.slots.client.streams import StreamFetcher
from iris_ray.slots.core.devices import DeviceKind
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy

T = TypeVar("T")


class SlotClient:
    """Serves models on some hosts of the cluster to which this process is connected.

    Args:
        hosts: the hosts to get. These and ``policy`` are ignored if a process of the same Ray job serves models under
            this name already.
        name: a name for the models. Other processes can use them: those of the same Ray job by the same name, all
            others by `connect`. None: no other process can.
        policy: limits and times; None: the defaults.

    Raises:
        InvalidSlotError: an argument makes no sense.
        NoClusterError: Ray is not initialised.
        SlotNameTakenError: another driver serves models under this name. A driver that is started again can have the
            name when its predecessor has ended.
        InvalidRequestError: no job could get such hosts.
        ControllerUnavailableError: the cluster's Controller could not be started or reached.

    Example:
        >>> with SlotClient([SlotHosts(memory=2**30)]) as client:
        ...     client.register(Echo, memory={1: 2**20})
        ...     client.submit("Echo", "hello").result()
    """

    def __init__(
        self, hosts: Sequence[SlotHosts] = (), *, name: str | None = None, policy: ServingPolicy | None = None
    ) -> None:
        if not isinstance(hosts, (list, tuple)) or not all(isinstance(each, SlotHosts) for each in hosts):
            raise InvalidSlotError(f"SlotClient: hosts is {shown(hosts)}; give a list, such as [SlotHosts(count=2)]")
        if not isinstance(policy, ServingPolicy | None):
            raise InvalidSlotError(f"SlotClient: policy is {shown(policy)}; give a ServingPolicy, or None")
        if not is_connected():
            raise NoClusterError("Ray is not initialised; call ray.init() first")
        kinds = {each.kind for each in hosts}
        self._kind = kinds.pop() if len(kinds) == 1 else None
        self._of_manager = policy or ServingPolicy(), tuple(hosts), name
        self._attach()

    def _attach(self, orders: Sequence[ModelOrder] = ()) -> None:
        """Make the SlotManager, or find the one of this name. Use it once it serves some models."""
        policy, hosts, name = self._of_manager
        manager, is_new, is_ours = make_or_find(policy, name)
        if is_new:
            try:
                jobs = submit_runners(manager, hosts, name)
            except BaseException:
                ray.kill(manager.handle)  # so the next try makes it anew
                raise
            ray.get(manager.call(SlotManager.start, hosts, jobs))
        else:
            self._kind = None
        _get(manager.call(SlotManager.change, orders, ()))
        self._use(manager, is_ours)

    def _use(self, manager: Actor[SlotManager], is_ours: bool) -> None:
        self._manager, self._is_ours, self._keeper = manager, is_ours, ClientKeeper(manager)
        self._streams = StreamFetcher(manager, self._keeper)

    @classmethod
    def connect(cls, name: str) -> Self:
        """Return a client of the models that another process serves under this name. Closing it ends nothing.

        Raises:
            NoClusterError: Ray is not initialised.
            UnknownNameError: no process serves models under this name.
        """
        if not is_connected():
            raise NoClusterError("Ray is not initialised; call ray.init() first")
        made = cls.__new__(cls)
        made._kind = None
        made._use(find(name), is_ours=False)
        return made

    def register(
        self,
        model: "type | ServedCommand",
        name: str | None = None,
        *,
        memory: Mapping[int, int | Sequence[int]] | None = None,
        arguments: Mapping[str, Any] | None = None,
        replicas: int = 0,
        prewarm: bool = False,
        **spec: Any,
    ) -> ModelSpec:
        """Serve a model. Returns at once; the model is loaded when a request, ``replicas`` or ``prewarm`` needs it.

        A name may be registered again. If its spec, class or arguments have changed, new requests go to new slots, and
        the old ones end after the requests that they have.

        Args:
            model: a class with ``__call__(payload)``, which may be a function, a coroutine or a generator of either
                kind, and perhaps ``load()``, ``unload()``, ``health()`` and a static ``memory_estimate()``; or a
                program, as a `ServedCommand`. A slot ends if ``health()`` raises, returns False or takes more than a
                minute three times in a row. It is called again ten seconds after each answer.
            name: the model's name in requests; None: the class's name. A program needs a name. A class may have several
                names, such as one for each adapter.
            memory: bytes on each device, by the number of devices; see `ModelSpec`. None: the result of the class's
                ``memory_estimate``, called with ``arguments``, or the memory of the `ServedCommand`.
            arguments: the arguments of the class, by name. A program has none.
            replicas: slots to keep even without requests.
            prewarm: whether each host, also each one to come, gets a slot if no other slot has to be evicted for it.
            spec: further fields of `ModelSpec`, such as ``concurrency``, ``load_s``, ``idle_s`` and ``group``.
                ``kind`` is by default that of the hosts, or ``DeviceKind.GPU`` if they are of several kinds. ``lora``
                only distinguishes slots; the class gets its adapter by ``arguments``.

        Raises:
            InvalidSlotError: the class can't serve, can't be pickled or does not take the arguments, its memory is not
                known, or a value can't work.
        """
        how: Any = {"memory": memory, "arguments": arguments, "replicas": replicas, "prewarm": prewarm}
        if "kind" not in spec:
            spec["kind"] = self._kind_of_hosts()
        order = model_order(model, name, **how, **spec)
        self._change([order])
        return order.spec

    def remove(self, name: str) -> None:
        """Stop serving a model. Requests that wait for it are refused, and running ones finish. Its sessions end.

        Raises:
            UnknownNameError: there is no such model.
        """
        _get(self._there().call(SlotManager.remove, name))

    def submit(self, model: str, payload: Any, *, request_id: str | None = None, **how: Any) -> "Future[Any]":
        """Ask a model. Returns a future of its answer; the pieces of a generator come as a list.

        Cancelling the future cancels the request.

        Args:
            model: its name.
            payload: the argument of its ``__call__``.
            request_id: an id for `cancel`; None: a new one.
            how: ``timeout_s``: seconds after which it is given up if it has not begun; None: it waits for as long as it
                takes. ``priority``: whether it goes before requests without priority. ``retriable``: whether it may run
                again if its slot is lost; True by default.

        The future raises the model's own exception (`RemoteUserError` if that can't be pickled), or SlotQueueFullError,
        RequestExpiredError, RequestLostError, ModelUnavailableError, UnknownNameError, JobCancelledError after
        `cancel`, or InvalidSlotError for a model that fits nowhere or an id that is in use.
        """
        opened: Future[Any] = Future()
        ask = self._ask(model, payload, request_id, how)
        self._keeper.add_request()
        arrived = self._manager.call(SlotManager.submit, ask).future()

        def end(done: "Future[Any]") -> None:
            self._keeper.remove_request()
            _open(done, opened)

        def give_up(asked: "Future[Any]") -> None:
            if asked.cancelled():
                self._keeper.cancel(ask.request_id)

        opened.add_done_callback(give_up)
        arrived.add_done_callback(end)
        return opened

    async def generate(self, model: str, payload: Any, *, request_id: str | None = None, **how: Any) -> Any:
        """Ask a model and wait for the answer. Cancelling this cancels the request. See `submit`."""
        ask = self._ask(model, payload, request_id, how)
        with self._keeper.request(ask.request_id):
            return (await self._manager.call(SlotManager.submit, ask)).open()

    def stream(
        self, model: str, payload: Any, *, request_id: str | None = None, **how: Any
    ) -> Generator[Any, None, None]:
        """Ask a model, and yield the pieces of its answer as they come. See `submit`.

        Stopping early cancels the request. The model waits for a caller that takes the pieces slowly.
        """
        ask, streams = self._ask(model, payload, request_id, how), self._streams
        arrived: SimpleQueue[Arrived] = SimpleQueue()
        with streams.stream(ask, arrived.put) as stream:
            while not stream.is_over:
                for piece in stream.read(arrived.get()):
                    yield piece.open()
                    streams.note_read(ask, stream)

    async def astream(
        self, model: str, payload: Any, *, request_id: str | None = None, **how: Any
    ) -> AsyncGenerator[Any, None]:
        """As `stream`, for an event loop. To stop early, call ``aclose()``: leaving the loop may only stop it later."""
        ask, streams = self._ask(model, payload, request_id, how), self._streams
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[Arrived]()

        def arrive(found: Arrived) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody reads
                loop.call_soon_threadsafe(arrived.put_nowait, found)

        with streams.stream(ask, arrive) as stream:
            while not stream.is_over:
                for piece in stream.read(await arrived.get()):
                    yield piece.open()
                    streams.note_read(ask, stream)

    def session(
        self, model: str, *, idle_s: float = 300.0, timeout_s: float | None = None, priority: bool = False
    ) -> Session:
        """Return a session to open: a seat on one slot of a model, for many calls that go directly to the slot.

        Args:
            model: its name.
            idle_s: seconds for which it keeps its seat without a call.
            timeout_s: seconds for which it waits for a seat.
            priority: whether it goes before requests and sessions without priority.

        Example:
            >>> with client.session("Echo") as session:
            ...     session.call("hello")
        """
        return Session(self._manager, self._keeper, model, idle_s=idle_s, timeout_s=timeout_s, priority=priority)

    def cancel(self, request_id: str) -> None:
        """Cancel a request: it leaves the queue, or is stopped on its slot if the model is a coroutine or generator.

        A function runs to its end, and so does any call on a slot of several hosts. The caller gets a
        `JobCancelledError` at once. Nothing happens if the request is over.
        """
        ray.get(self._there().call(SlotManager.cancel, request_id))

    def status(self) -> SlotStatus:
        """Return runners, slots and models."""
        return _get(self._there().call(SlotManager.status))

    def evict(self, slot_id: str) -> None:
        """Have a slot end after its running requests, or after `ServingPolicy.drain_s`.

        Requests that are cut off then run again if they may be repeated.

        Raises:
            UnknownNameError: there is no such slot.
        """
        _get(self._there().call(SlotManager.evict, slot_id))

    def prewarm(self, model: str) -> None:
        """Give each host, also each one to come, a slot of a model, if no other slot has to be evicted for it.

        Returns at once.

        Raises:
            UnknownNameError: there is no such model.
        """
        _get(self._there().call(SlotManager.prewarm, model))

    def close(self) -> None:
        """End the models for all clients, and give all hosts back. If another process made them, only detach."""
        if not (self._is_ours and self._keeper.is_connected):  # the models end with the connection
            return
        with suppress(ActorDiedError):  # it is closed already, or lost
            cancel_runners(ray.get(self._manager.call(SlotManager.close)))
            ray.kill(self._manager.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _kind_of_hosts(self) -> DeviceKind:
        """Return the kind of the hosts' devices; GPU if they are of several kinds, or there are no hosts."""
        return self._kind or _get(self._there().call(SlotManager.kind)) or DeviceKind.GPU

    def _there(self) -> Actor[SlotManager]:
        """Return the manager, if this process is still in its cluster; else raise NoClusterError."""
        self._keeper.require_connection()
        return self._manager

    def _change(self, orders: Sequence[ModelOrder], gone: Sequence[str] = ()) -> None:
        """Serve models from now on, and others no longer: all at once, or nothing. It may be repeated."""
        _get(self._there().call(SlotManager.change, orders, gone))

    def _when_lost(self, tell: Callable[[], None]) -> None:
        """Have a thread of Ray's call a function once the SlotManager is gone, or does not answer."""
        self._there().call(SlotManager.watch).future().add_done_callback(lambda _: tell())

    def _ask(self, model: str, payload: Any, request_id: str | None, how: Mapping[str, Any]) -> Ask:
        request_id = uuid.uuid4().hex if request_id is None else request_id
        return Ask(request_id, model, packed(payload).data, client_id=self._keeper.client_id, **how)


def _get(reference: Reference[T]) -> T:
    """Return the answer of the manager; raise our own errors without Ray's wrapper."""
    try:
        answer: T = ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, IrisError):
            raise error.cause from None
        raise
    return answer


def _open(done: "Future[Any]", opened: "Future[Any]") -> None:
    if not opened.set_running_or_notify_cancel():
        return
    try:
        opened.set_result(done.result().open())
    except Exception as error:
        opened.set_exception(error)
