"""The rounds as one slice knows them, and its answers to the other slices: its first process listens for them.

The slices of a round have a *roster*: who has contributed to the round before, in the order in which they joined. The
first of them that still runs leads: it gathers the contributions, averages them, and sends the same result to all. Who
runs is told by the runtime (`Membership`). A slice that takes over from a lost leader asks the others first whether one
of them has the result of the round already. Once a slice has contributed to another leader, it takes no result from the
one before. A leader that was late makes no round without the slices that have left it for another. So all slices of a
round go on with the same state.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from iris_ray.errors import InvalidRequestError
from iris_ray.framing import ConnectionLost, Door
from iris_ray.model.membership import Membership
from iris_ray.outer.wire import ArrayConnection, Header, Leaves

Who = tuple[int, int]
"""A slice's id, and the number of the attempt that runs there."""

WAKE_S, LOOK_S = 0.02, 0.1
EPOCH_S = 2.0
"""How long a process that hears of a newer membership waits until the runtime tells it, too."""
ACCEPT_S = 0.2
"""The interval at which a process that waits for others looks whether it is to end."""
LAST_ANSWERS_S = 10.0
"""How long a slice waits at its end until the others have the last result."""


@dataclass(frozen=True)
class Result:
    """The outcome of a round.

    Attributes:
        number: the round's.
        made_by: who has led it.
        members: ids of the slices that have contributed to it.
        roster: the slices of the next round.
        mean: the average of the contributions.
    """

    number: int
    made_by: Who
    members: tuple[int, ...]
    roster: tuple[Who, ...]
    mean: Leaves

    def message(self) -> tuple[Header, Leaves]:
        facts = {"round": self.number, "made_by": self.made_by, "members": self.members, "roster": self.roster}
        return {"kind": "result", **facts}, self.mean

    @staticmethod
    def of(header: Header, mean: Leaves) -> "Result":
        made_by, roster = _who(header["made_by"]), tuple(map(_who, header["roster"]))
        return Result(int(header["round"]), made_by, tuple(map(int, header["members"])), roster, mean)


@dataclass(frozen=True)
class Contribution:
    """A slice's contribution to a round. This slice's own has no connection on which it waits for the result."""

    number: int
    leaves: Leaves
    connection: ArrayConnection | None = None


class Seen(Enum):
    """What a leader learns of another slice about its round."""

    NEWER = "the round is over for it, and this slice has taken its state"
    LEFT = "it makes the round with another leader, because this one was late"
    NOTHING = "neither, or it does not answer"


class Member:
    """The rounds as one slice knows them. Threads that answer others share it with the one that trains.

    Args:
        me: this slice.
        state: the state before the first round.
        membership: returns which slices run.

    Attributes:
        changed: guards all that follows, and is notified when it changes.
        round: the number of the round that is being made.
        state: the state before that round. It may lag behind for a moment: see ``state_round``.
        state_round: the round that ``state`` belongs to.
        last: the result of the round before; None if this slice has seen none.
        origin: who made the result before ``state``. States of one round that have another origin differ.
        roster: the slices of this round.
        joined: whether this slice is one of them.
        following: whether it is just becoming one of them.
        contributions: the contribution of each slice, with its round. That of a slice that left for another leader is
            void.
        admitted: newcomers that have the state.
        late: slices that have led and have not answered in time.
        is_over: whether there is nothing to join any more.
    """

    def __init__(self, me: Who, state: Leaves, membership: Callable[[], Membership]) -> None:
        self.changed = threading.Condition()
        self.me = me
        self.round = self.state_round = 0
        self.state = state
        self.last: Result | None = None
        self.origin: Who | None = None
        self.roster: tuple[Who, ...] = ()
        self.joined = self.following = self.is_over = False
        self.contributions: dict[Who, Contribution] = {}
        self.admitted: list[Who] = []
        self.late: set[Who] = set()
        self.membership = membership
        self._readers: dict[ArrayConnection, int] = {}  # the round whose result each waits for
        self._closed = False

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Guard a change, and wake everybody who waits for one."""
        with self.changed:
            yield
            self.changed.notify_all()

    # -- who is there ----------------------------------------------------------------------------------------------

    def runs(self, who: Who) -> bool:
        """Return whether this attempt of a slice runs."""
        return self.membership().running.get(who[0]) == who[1]

    def leader(self) -> Who:
        """Return who leads this round."""
        there = (who for who in self.roster if who == self.me or (self.runs(who) and who not in self.late))
        return next(there, self.me)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def lead(self, mine: Leaves, deadline_s: float, see: Callable[[Who], Seen]) -> Result | None:
        """Gather the contributions to this round, and return its result; None if it was over for another slice.

        Args:
            mine: the contribution of this slice.
            deadline_s: how long to wait for slices that run.
            see: asks a slice whether the round is over for it, and then takes its state.
        """
        deadline, number = time.monotonic() + deadline_s, self.round
        with self.changed:
            self.contributions[self.me] = Contribution(number, mine)
        takes_over = number > 0 and (self.last is None or self.last.made_by != self.me)
        look_at = 0.0
        while True:
            now, left = time.monotonic(), 0
            with self.changed:
                there = self._there()
                missing = [who for who in self.roster if self.runs(who) and who not in {*there, *self.late}]
                if not missing and now <= deadline:
                    return self._made(there)
            if now > deadline or (takes_over and now > look_at):
                look_at = now + LOOK_S
                others = [who for who in self.roster if who != self.me and self.runs(who)]
                for who in missing if now <= deadline else others:
                    match see(who):
                        case Seen.NEWER:
                            return None
                        case Seen.LEFT:
                            left += 1
            with self.changed:
                there = self._there()
                if now > deadline and len(there) > left:
                    return self._made(there)
                self.changed.wait(WAKE_S)

    def _there(self) -> dict[Who, Leaves]:
        """Return the contributions to this round of slices that run and wait for its result."""
        return {
            who: one.leaves
            for who, one in self.contributions.items()
            if one.number == self.round and (one.connection is None or (self.runs(who) and one.connection.is_open))
        }

    def _made(self, there: dict[Who, Leaves]) -> Result:
        """Return the result of these contributions."""
        whose = sorted(there)
        for who in whose:
            if kinds_of(there[who]) != kinds_of(there[self.me]):
                raise InvalidRequestError(
                    f"slice {who[0]} contributes other arrays to a round than slice {self.me[0]}; all slices must"
                    " contribute arrays of the same types and shapes"
                )
        admitted = [who for who in self.admitted if self.runs(who)]
        roster = dict.fromkeys([who for who in self.roster if who in whose] + whose + admitted)
        mean = [_mean(parts) for parts in zip(*(there[who] for who in whose), strict=True)]
        return Result(self.round, self.me, tuple(slice_id for slice_id, _ in whose), tuple(roster), mean)

    def accept(self, result: Result) -> None:
        """Take a round's result, and give it to those who wait for it. The state is to follow with `set_state`."""
        with self._changing():
            self.last, self.roster, self.round = result, result.roster, result.number + 1
            self.joined = self.me in result.roster
            self.contributions = {who: one for who, one in self.contributions.items() if one.number >= self.round}
            self.admitted = [who for who in self.admitted if who not in result.roster]
            self.late &= set(self.roster)

    def set_state(self, state: Leaves) -> None:
        """Note the state before this round."""
        with self._changing():
            self.state, self.state_round = state, self.round
            self.origin = self.last.made_by if self.last is not None else None

    def take_over(self, header: Header, state: Leaves) -> None:
        """Go on with the state of another slice."""
        with self._changing():
            self.last, self.round, self.roster = None, int(header["round"]), tuple(map(_who, header["roster"]))
            self.joined = self.me in self.roster
            self.state, self.state_round = state, self.round
            self.origin = _who(header["origin"]) if header["origin"] else None

    def found(self) -> None:
        """Begin with this slice alone."""
        with self._changing():
            self.roster, self.joined, self.following = (self.me,), True, False

    # -- what others ask -------------------------------------------------------------------------------------------

    def serve(self, listener: socket.socket, token: str) -> None:
        """Answer other processes of the job until `close`."""
        door = Door(listener, token, ArrayConnection)
        while not self._closed:
            if (connection := door.look(ACCEPT_S)) is not None:
                name = "iris_ray.outer answers"
                try:
                    threading.Thread(target=self._answer, args=(connection,), name=name, daemon=True).start()
                except RuntimeError:  # no thread can be started now
                    connection.end()
        door.close()

    def close(self) -> None:
        """Wait until those who are owed the last result have it, and answer no more."""
        deadline = time.monotonic() + LAST_ANSWERS_S
        with self._changing():
            while any(number < self.round for number in self._readers.values()) and time.monotonic() < deadline:
                self.changed.wait(WAKE_S)
            self._closed = True

    def _answer(self, connection: ArrayConnection) -> None:
        with contextlib.suppress(ConnectionLost, OSError):
            try:
                while not self._closed:
                    self._reply(connection, *connection.receive_message(lambda: not self._closed))
            finally:
                self._has_read(connection)
                connection.close()

    def _reply(self, connection: ArrayConnection, header: Header, leaves: Leaves) -> None:
        match header["kind"]:
            case "who":
                self._wait(lambda: self.membership().epoch >= header["epoch"], EPOCH_S)
                with self.changed:
                    facts = {"joined": self.joined, "following": self.following, "roster": self.roster}
                connection.send_message({"kind": "who", **facts})
            case "newer":
                if self.round > header["round"]:
                    self._send_state(connection)
                else:
                    connection.send_message({"kind": "no", "left": _who(header["who"]) in self.late})
            case "contribute":
                self._take(connection, header, leaves)
            case "join":
                self._admit(connection, _who(header["who"]))
            case "follow":
                self._give_states(connection)

    def _take(self, connection: ArrayConnection, header: Header, leaves: Leaves) -> None:
        """Take a contribution, and answer with the result of its round. A slice that is too late is a newcomer."""
        of, who = header["round"], _who(header["who"])
        self._wait(lambda: self.state_round >= of)
        with self._changing():
            is_one_of_us = of == self.round and header["origin"] == (None if self.origin is None else [*self.origin])
            if is_one_of_us:
                self.contributions[who] = Contribution(of, leaves, connection)
                self._readers[connection] = of
        if is_one_of_us:
            self._wait(lambda: self.round > of)
            with self.changed:
                last = self.last
            if last is not None and last.number == of:
                connection.send_message(*last.message())
                self._has_read(connection)
                return
        self._has_read(connection)
        self._admit(connection, who)

    def _admit(self, connection: ArrayConnection, who: Who) -> None:
        """Give a newcomer the state at the end of this round, after which the others count on it."""
        with self.changed:
            self.admitted.append(who)
        self._wait(lambda: who in self.roster or self.leader() != self.me)
        self._send_state(connection)

    def _give_states(self, connection: ArrayConnection) -> None:
        """Give another process of this slice the state, and each state after it."""
        self._wait(lambda: self.joined or self.is_over)
        while True:
            follows = self._send_state(connection)
            with self._changing():
                self._readers[connection] = follows
            self._wait(lambda: self.round > follows)  # noqa: B023 — it is called before the next turn

    def _send_state(self, connection: ArrayConnection) -> int:
        """Send the state. Return its round."""
        self._wait(lambda: self.state_round == self.round)
        with self.changed:
            number, state, members = self.state_round, self.state, self.last.members if self.last else ()
            roster, origin, is_over = self.roster, self.origin, self.is_over
        facts = {"round": number, "roster": roster, "origin": origin, "members": members, "is_over": is_over}
        connection.send_message({"kind": "state", **facts}, state)
        return number

    def _has_read(self, connection: ArrayConnection) -> None:
        with self._changing():
            self._readers.pop(connection, None)

    def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition is true, or the time is over.

        Raises:
            ConnectionLost: this slice is done.
        """
        until = None if seconds is None else time.monotonic() + seconds
        with self.changed:
            while not condition():
                if self._closed:
                    raise ConnectionLost("this slice is done")
                if until is not None and time.monotonic() > until:
                    return
                self.changed.wait(WAKE_S)


def kinds_of(leaves: Leaves) -> list[tuple[str, tuple[int, ...]]]:
    """Return the types and shapes of arrays."""
    return [(leaf.dtype.name, leaf.shape) for leaf in leaves]


def _mean(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Return the average of arrays. Types of fewer than 32 bits are added up in 32."""
    dtype = parts[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize < 4 else dtype
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total += part
    return np.asarray(total / len(parts)).astype(dtype)


def _who(listed: Any) -> Who:
    slice_id, attempt = listed
    return int(slice_id), int(attempt)
