"""Whether the clients of requests are there."""

from iris_ray.slots.actors.waiting import Clients


def test_a_client_is_gone_if_it_was_looked_for_in_vain_often_enough() -> None:
    clients = Clients(most_in_vain=2)
    for name in ("gone", "stays", "idle"):
        clients.heard(name)
    both = {"gone", "stays", ""}
    assert [clients.look(both), clients.look(both)] == [set(), set()]
    clients.heard("stays")
    assert clients.look(both) == {"gone"}
    assert clients.look({"idle"}) == set(), "it had no requests when it was silent"
