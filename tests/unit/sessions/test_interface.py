"""The actor of a session has the methods of its interface, with the same parameters, defaults and results."""

from iris_ray.sessions.core import SessionInterface
from iris_ray.sessions.host import HostSession
from tests.unit.actors.protocol.test_interfaces import signatures


def test_session_has_the_methods_of_its_interface_and_no_others() -> None:
    assert dict(signatures(HostSession)) == dict(signatures(SessionInterface))


def types(session: HostSession) -> SessionInterface:
    """The types of arguments and results. This is never called: mypy checks it."""
    return session
