"""The slices of a job that train by themselves and average what they have learned, round by round (`join`)."""

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from iris_ray.actors.protocol.task_files import TaskFiles
from iris_ray.errors import InvalidRequestError
from iris_ray.fair_limits import BACKLOG
from iris_ray.framing import ConnectionLost
from iris_ray.model.checks import Holds, Seconds, Whole, require
from iris_ray.model.job_info import JobInfo
from iris_ray.model.membership import Membership
from iris_ray.model.options import EACH_SLICE
from iris_ray.outer.member import Member, Result, Seen, Who, kinds_of
from iris_ray.outer.wire import ArrayConnection, Header, Leaves
from iris_ray.task.job_info import get_job_info

DEADLINE_S = 60.0
LOOK_S = 0.02
"""The interval between two checks of which slices run, and between two tries to join."""
ANSWER_S = 5.0
"""How long an answer may take that does not depend on other slices."""
TOLD_S = 2.0
"""The time that the runtime may take to report a lost slice, after the end of its connection."""

Tree = Any
"""Arrays in any structure that JAX knows."""


def join(
    state: Tree, update: Callable[[Tree, Tree], Tree], *, deadline: float = DEADLINE_S, rounds_done: int = 0
) -> "Group":
    """Join the other slices of this job, each of which trains by itself. Call it when this slice is ready to train.

    For jobs with ``failure_domain="slice"``. If no slice makes rounds yet, the slice that has run for the longest time
    begins alone, with its ``state``; until it joins, the others wait. Every other slice, and one that comes back, gets
    the state of those that make rounds, at the end of a round. Compile before you join, because they wait for it from
    the next round on. Outside a task, this process is a group of its own.

    Args:
        state: the state before the first round, the same on all slices: arrays in any structure that JAX knows.
        update: ``update(state, mean)`` returns the state after a round from the state before it and the average of the
            contributions. Every slice calls it, so its result must not depend on the slice. It gets NumPy arrays.
        deadline: how long a round waits for a slice that runs and does not contribute; seconds. If the slice that leads
            the round does not answer, the others wait one and a half times as long.
        rounds_done: the number of rounds that led to ``state``, if you have read it from a checkpoint.

    Raises:
        InvalidRequestError: the job's failure domain is not the slice, an argument makes no sense, or the state of the
            other slices has another structure.

    Example::

        with iris_ray.outer.join(params, lambda params, mean: apply(params, mean)) as group:
            while group.round < 100 and not group.is_over:
                trained = train_some_steps(group.state)
                group.advance(difference(trained, group.state))
    """
    require("update", update, Holds(callable, "a function of the state and the average"))
    require("deadline", deadline, Seconds(above=True))
    require("rounds_done", rounds_done, Whole())
    info = get_job_info()
    if info is not None and info.failure_domain != EACH_SLICE:
        raise InvalidRequestError(
            f"iris_ray.outer is for jobs with failure_domain={EACH_SLICE!r}, whose slices train by themselves; the"
            f" slices of {info.job_id} are one JAX program, which averages by itself"
        )
    group = Group(info, state, update, deadline, rounds_done)
    group._join()
    return group


class Group:
    """This slice's part in the rounds; `join` makes it.

    Attributes:
        members: ids of the slices that contributed to the last round.
    """

    def __init__(
        self, info: JobInfo | None, state: Tree, update: Callable[[Tree, Tree], Tree], deadline: float, rounds: int
    ) -> None:
        leaves, self._structure = _flat(state, copy=True)
        self._info = info
        self._update = update
        self._deadline_s = deadline
        self._membership = _membership_of(info)
        self._member = Member((info.slice_id, info.attempt) if info else (0, 1), leaves, self._membership)
        self._member.round = self._member.state_round = rounds
        self._connections: dict[Who, ArrayConnection] = {}
        self.members: tuple[int, ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether slices of this job have returned, and no slice is left to join."""
        return self._member.is_over

    @property
    def state(self) -> Tree:
        """The state after the rounds so far, in NumPy arrays; the same on all slices. Don't write into it."""
        return jax.tree.unflatten(self._structure, self._member.state)

    @property
    def round(self) -> int:
        """How many rounds there have been, with those of ``rounds_done``."""
        return self._member.state_round

    def advance(self, contribution: Tree) -> Tree:
        """Average what the slices of this round contribute, update the state with it, and return the state.

        Every process of a slice calls this in every round; the contribution of its first one counts. The call returns
        once all running slices of the round have contributed, or the deadline is over; if `is_over`, at once. The
        runtime reports a lost slice at once, and nobody waits for a slice that comes back until it has joined. If this
        slice was left out of the round, the call returns the state of the others, without this contribution.

        Args:
            contribution: arrays of floating-point numbers in any structure that JAX knows, of the same types and shapes
                on all slices. The first process of the slice must have the whole of each array.

        Raises:
            InvalidRequestError: an array of it isn't of floating-point numbers, the slices contribute different arrays,
                or ``update`` has returned another structure, type or shape than it got.
        """
        leaves, structure = _flat(contribution)
        for leaf in leaves:
            if not np.issubdtype(leaf.dtype, np.inexact) and leaf.dtype.kind != "V":  # bfloat16 is of kind V
                raise InvalidRequestError(
                    f"a contribution has an array of type {leaf.dtype}; give floating-point numbers"
                )
        member = self._member
        stands = member.round, member.origin
        while (member.round, member.origin) == stands and not self.is_over:
            if not self._is_first:
                self._take_state_of_first_process()
            elif (leader := member.leader()) == member.me:
                result = member.lead(leaves, self._deadline_s, self._see)
                if result is not None:
                    self._accept(result, structure)
            else:
                self._contribute(leader, leaves, structure)
        return self.state

    def close(self) -> None:
        """Leave. Wait up to 10 s until the others have the result of the last round."""
        self._member.close()
        for connection in self._connections.values():
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _is_first(self) -> bool:
        return self._info is None or self._info.gang_rank == 0

    # -- joining -----------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        if self._info is None:
            self._member.found()
            return
        while not self._member.runs(self._member.me):  # the runtime tells it in a moment
            time.sleep(LOOK_S)
        if not self._is_first:
            self._take_state_of_first_process()
            return
        self._listen(self._info)
        while not self._member.joined and not self.is_over:
            self._try_to_join()

    def _listen(self, info: JobInfo) -> None:
        """Answer the other processes of this job, on the address of this host, and on no other interface."""
        host = info.coordinator_address.rpartition(":")[0]
        family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), 0), family=family, backlog=BACKLOG)
        serving = threading.Thread(target=self._member.serve, args=(listener, self._membership().token), daemon=True)
        serving.name = "iris_ray.outer"
        serving.start()
        from iris_ray.endpoints import task  # another service

        task.register_endpoint(_endpoint(info.slice_id), f"{host}:{listener.getsockname()[1]}")

    def _try_to_join(self) -> None:
        """Join the slices that make rounds. If there are none, the slice that has run for the longest time begins."""
        view, member = self._membership(), self._member
        others = [who for who in view.running.items() if who != member.me]
        answers = [answer for who in others if (answer := self._ask_who_is_there(who, view.epoch)) is not None]
        joined = next((answer for answer in answers if answer["joined"]), None)
        if joined is not None:
            roster = [(slice_id, attempt) for slice_id, attempt in joined["roster"]]
            member.following = True
            if (leader := next((who for who in roster if member.runs(who)), None)) is not None:
                given = self._ask(leader, {"kind": "join", "who": member.me})
                if given is not None:
                    self._take_over(*given)
            member.following = False
        elif any(one["following"] for one in answers):
            pass  # there may be rounds to join
        elif view.returned:
            member.is_over = True
        elif next(iter(view.running.items()), None) == member.me:
            member.found()
        if not member.joined:
            time.sleep(LOOK_S)

    def _ask_who_is_there(self, who: Who, epoch: int) -> Header | None:
        """Return whether a slice has joined, or is just joining, and its roster; None if it does not listen yet.

        One that does not answer counts as just joining.
        """
        if self._address_of(who) is None:
            return None
        answer = self._ask(who, {"kind": "who", "epoch": epoch}, seconds=ANSWER_S)
        return {"joined": False, "following": True} if answer is None else answer[0]  # it may be in a round

    # -- one round ---------------------------------------------------------------------------------------------------

    def _accept(self, result: Result, structure: Any) -> None:
        self.members = result.members
        self._member.accept(result)
        before = self._member.state
        after, tree = _flat(self._update(self.state, jax.tree.unflatten(structure, result.mean)), copy=True)
        if tree != self._structure or kinds_of(after) != kinds_of(before):
            raise InvalidRequestError(
                f"update has returned {tree} of {kinds_of(after)[:5]}, and the state before was {self._structure} of"
                f" {kinds_of(before)[:5]}; both must have the same structure, types and shapes"
            )
        self._member.set_state(after)

    def _contribute(self, leader: Who, leaves: Leaves, structure: Any) -> None:
        """Contribute to the round that another slice leads. Return when it is over, or another slice must lead."""
        member, since = self._member, time.monotonic()
        what = {"kind": "contribute", "who": member.me, "round": member.round, "origin": member.origin}
        answer = self._ask(leader, what, leaves, 1.5 * self._deadline_s)
        if answer is None:
            while member.runs(leader) and time.monotonic() < since + TOLD_S:
                time.sleep(LOOK_S)
            if member.runs(leader):  # it hangs, or leaves: the next one leads
                member.late.add(leader)
        elif answer[0]["kind"] == "result":
            self._accept(Result.of(*answer), structure)
        else:
            self._take_over(*answer)

    def _see(self, who: Who) -> Seen:
        """Take the state of another slice if this round is over for it. Return what it answers."""
        question = {"kind": "newer", "round": self._member.round, "who": self._member.me}
        answer = self._ask(who, question, seconds=ANSWER_S)
        if answer is None:
            return Seen.NOTHING
        if answer[0]["kind"] != "state":
            return Seen.LEFT if answer[0]["left"] else Seen.NOTHING
        self._take_over(*answer)
        return Seen.NEWER

    def _take_state_of_first_process(self) -> None:
        """Take the next state that the first process of this slice gives."""
        first = self._member.me
        try:
            if first not in self._connections:
                self._connection(first).send_message({"kind": "follow"})
            header, leaves = self._connections[first].receive_message()
        except ConnectionLost:
            self._forget(first)
            time.sleep(LOOK_S)  # it does not listen yet; or it has ended, and this process is about to be ended, too
        else:
            self._member.is_over = header["is_over"]
            self._take_over(header, leaves)

    def _take_over(self, header: Header, leaves: Leaves) -> None:
        if kinds_of(leaves) != kinds_of(self._member.state):
            raise InvalidRequestError(
                f"the state of the other slices has {kinds_of(leaves)[:5]}, and this one has"
                f" {kinds_of(self._member.state)[:5]}; all must begin with the same structure, types and shapes"
            )
        self._member.take_over(header, leaves)
        self.members = tuple(header["members"])

    # -- connections -------------------------------------------------------------------------------------------------

    def _ask(
        self, who: Who, question: Header, leaves: Sequence[np.ndarray] = (), seconds: float = math.inf
    ) -> tuple[Header, Leaves] | None:
        """Return a slice's answer; None if it does not listen, is lost or is late."""
        try:
            connection = self._connection(who)
            connection.send_message(question, leaves, lambda: self._member.runs(who))
            return connection.receive_message(lambda: self._member.runs(who), seconds)
        except ConnectionLost:
            self._forget(who)
            return None

    def _address_of(self, who: Who) -> str | None:
        from iris_ray.endpoints import task

        assert self._info is not None
        return task.endpoint_of_attempt(_endpoint(who[0]), who[0] * self._info.gang_size, who[1])

    def _connection(self, who: Who) -> ArrayConnection:
        """Return the connection to the first process of a slice.

        Raises:
            ConnectionLost: it does not listen.
        """
        if who not in self._connections:
            if (address := self._address_of(who)) is None:
                raise ConnectionLost(f"slice {who[0]} does not listen yet")
            self._connections[who] = ArrayConnection.to(address, self._membership().token)
        return self._connections[who]

    def _forget(self, who: Who) -> None:
        if (connection := self._connections.pop(who, None)) is not None:
            connection.close()


def _endpoint(slice_id: int) -> str:
    return f"iris_ray.outer/{slice_id}"


def _flat(tree: Tree, copy: bool = False) -> tuple[Leaves, Any]:
    """Return the arrays of a tree on this host, and its structure."""
    leaves, structure = jax.tree.flatten(tree)
    return [np.array(leaf) if copy else np.asarray(leaf) for leaf in leaves], structure


def _membership_of(info: JobInfo | None) -> Callable[[], Membership]:
    """Return a function that returns which slices of this job run."""
    files = TaskFiles.of_this_task()
    if info is None or files is None:
        alone = Membership(1, {0: 1})
        return lambda: alone
    latest = [files.read_membership() or Membership(0)]

    def watch() -> None:
        while True:
            time.sleep(LOOK_S)
            if (found := files.read_membership()) is not None and found.epoch > latest[0].epoch:
                latest[0] = found

    threading.Thread(target=watch, name="iris_ray.outer looks who runs", daemon=True).start()
    return lambda: latest[0]
