"""Whether the clients of requests are there."""

from iris_ray.slots.actors.waiting import Clients


def test_client_is_gone_after_enough_failed_searches() -> None:
    clients = Clients(most_in_vain=2)
    for name in ("gone", "stays", "idle"):
        clients.heard(name)
    both = {"gone", "stays", ""}
    assert [clients.look(both), clients.look(both)] == [set(), set()]
    clients.heard("stays")
    assert clients.look(both) == {"gone"}
    assert clients.look({"idle"}) == set(), "it had no requests when it was silent"
