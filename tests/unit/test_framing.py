import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from ctypes import addressof, create_string_buffer

import pytest

from iris_ray import framing
from iris_ray.framing import FACTS, MOST_FRAME_BYTES, Connection, ConnectionLost, Frame, Frames
from tests.support.waiting import wait_until

TOKEN = "a secret"
SO_ATTACH_FILTER = 26
FRAMES = [Frame.of(b"o", 7, host="h", port=1), Frame(b"d", 2**32 - 1, bytes(range(256))), Frame(b"P")]

Pair = tuple[socket.socket, socket.socket]


def tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        calling = socket.create_connection(listener.getsockname())
        return calling, listener.accept()[0]


@pytest.fixture(params=[tcp_pair, socket.socketpair])
def sockets(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = request.param()
    with pair[0], pair[1]:
        yield pair


@pytest.fixture
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Return the sockets of a connection that notices within seconds if an end vanishes."""
    monkeypatch.setattr(framing, "SILENCE_S", 2)
    pair = tcp_pair()
    with pair[0], pair[1]:
        yield pair


@pytest.fixture
def ends(sockets: Pair) -> tuple[Connection, Connection]:
    return Connection(sockets[0]), Connection(sockets[1])


def vanish(sock: socket.socket) -> None:
    """Have the kernel drop all that comes to a socket, without an answer."""
    drop_all = create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", 1, addressof(drop_all)))


def is_lost_within(seconds: float, act: Callable[[], object], why: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConnectionLost, match=why):
        act()
    assert time.monotonic() - began < seconds


# -- frames ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_frames_are_whole_however_their_bytes_come(step: int) -> None:
    data, frames = b"".join(frame.packed() for frame in FRAMES), Frames()
    assert [frame for at in range(0, len(data), step) for frame in frames.feed(data[at : at + step])] == FRAMES


def test_frame_that_is_too_long_is_refused_at_its_length() -> None:
    with pytest.raises(ConnectionLost, match="268,435,457 bytes"):
        list(Frames().feed(struct.pack(">cII", b"d", 0, MOST_FRAME_BYTES + 1)))


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b"1", b"[" * 100_000])
def test_facts_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ConnectionLost, match="no sense"):
        assert Frame(FACTS, data=data).facts


# -- the token ---------------------------------------------------------------------------------------------------------


def prove_in_thread(end: Connection, token: str) -> list[str]:
    """Have the listening end prove a token. Return a list that gets its error, or "proven"."""
    said = list[str]()

    def prove() -> None:
        try:
            end.prove(token, calls=False)
        except ConnectionLost as error:
            said.append(str(error))
        else:
            said.append("proven")

    threading.Thread(target=prove, daemon=True).start()
    return said


def test_ends_that_know_the_token_talk(ends: tuple[Connection, Connection]) -> None:
    ours, theirs = ends
    said = prove_in_thread(theirs, TOKEN)
    ours.prove(TOKEN, calls=True)
    wait_until(lambda: said == ["proven"])
    for frame in FRAMES:
        ours.send(frame)
    ours.say(ready=True)
    assert [theirs.receive() for _ in FRAMES] == FRAMES
    assert theirs.hear() == {"ready": True}


@pytest.mark.parametrize(("token", "calls"), [("another", True), (TOKEN, False)])
def test_end_with_another_token_or_the_same_role_is_refused(
    ends: tuple[Connection, Connection], token: str, calls: bool
) -> None:
    ours, theirs = ends
    said = prove_in_thread(theirs, TOKEN)
    with pytest.raises(ConnectionLost):
        ours.prove(token, calls=calls)
    wait_until(lambda: said not in ([], ["proven"]))
    assert not ours.is_open


@pytest.mark.parametrize("noise", [b"GET / HTTP/1.1\r\n\r\n" * 4, bytes(200), b"\xff" * 1000])
def test_stranger_is_refused_before_a_frame_is_read(sockets: Pair, noise: bytes) -> None:
    sockets[0].sendall(noise)
    is_lost_within(3.0, lambda: Connection(sockets[1]).prove(TOKEN, calls=False), "token|closed|reset")


@pytest.mark.parametrize("drips", [False, True])
def test_stranger_who_is_slow_holds_nobody_up(sockets: Pair, drips: bool) -> None:
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.1):
                sockets[0].send(b"x")

    if drips:
        threading.Thread(target=drip, daemon=True).start()
    is_lost_within(1.5, lambda: Connection(sockets[1]).prove(TOKEN, calls=False, within_s=0.3), "in time")
    over.set()


# -- ends of a connection ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [0, 4, 20])
def test_connection_that_is_cut_off_is_lost_wherever_it_was(sockets: Pair, sent: int) -> None:
    theirs = Connection(sockets[1])
    sockets[0].sendall(Frame(b"d", data=bytes(100)).packed()[:sent])
    sockets[0].close()
    is_lost_within(3.0, theirs.receive, "closed")


def test_frame_that_is_too_long_is_not_read(ends: tuple[Connection, Connection]) -> None:
    ends[0].send_bytes(struct.pack(">cII", b"d", 0, MOST_FRAME_BYTES + 1))
    is_lost_within(3.0, ends[1].receive, "no sense")


def test_frame_of_another_kind_is_no_facts(ends: tuple[Connection, Connection]) -> None:
    ends[0].send(Frame(b"o", data=b"{}"))
    is_lost_within(3.0, ends[1].hear, "in place of facts")


def test_wait_ends_when_it_is_late_or_not_wanted(ends: tuple[Connection, Connection]) -> None:
    is_lost_within(3.0, lambda: ends[0].receive(deadline=time.monotonic() + 0.1), "in time")
    is_lost_within(3.0, lambda: ends[0].receive(lambda: False), "not wanted")
    is_lost_within(3.0, lambda: ends[0].send(Frame(b"d", data=bytes(32 << 20)), lambda: False), "not wanted")


def test_connection_that_another_thread_closes_is_lost(ends: tuple[Connection, Connection]) -> None:
    threading.Timer(0.1, ends[0].end).start()
    is_lost_within(5.0, ends[0].receive, "closed|descriptor")
    assert not ends[1].is_open


def test_end_that_sends_no_more_still_receives(ends: tuple[Connection, Connection]) -> None:
    ends[0].end_sending()
    is_lost_within(3.0, ends[1].receive, "closed")
    ends[1].say(exit_code=0)
    assert ends[0].hear() == {"exit_code": 0}


def test_frames_of_several_threads_do_not_mix(ends: tuple[Connection, Connection]) -> None:
    def send(kind: bytes) -> None:
        for _ in range(20):
            ends[0].send(Frame(kind, data=kind * 300_000))

    threads = [threading.Thread(target=send, args=(kind,), daemon=True) for kind in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for _ in range(40):
        frame = ends[1].receive()
        assert frame.data == frame.kind * 300_000


def test_reader_that_pauses_loses_nothing(over_tcp: Pair) -> None:
    ours, theirs = map(Connection, over_tcp)
    sending = threading.Thread(target=ours.send, args=(Frame(b"o", data=bytes(32 << 20)),), daemon=True)
    sending.start()
    time.sleep(4.0)  # the kernel's own limit would have ended the connection
    assert sending.is_alive()
    assert len(theirs.receive().data) == 32 << 20


def test_other_end_that_vanishes_is_noticed(over_tcp: Pair) -> None:
    ours = Connection(over_tcp[0])
    vanish(over_tcp[1])
    ours.say(word="is never acknowledged")
    is_lost_within(10.0, ours.receive, "silent for")


def test_idle_end_that_vanishes_is_noticed(over_tcp: Pair) -> None:
    ours = Connection(over_tcp[0])
    vanish(over_tcp[1])
    is_lost_within(15.0, ours.receive, "timed out")
