"""When an actor finds that nobody asks it any more."""

from iris_ray.actors.calls.liveness import Contact
from tests.support.virtual_time import run


async def count(contact: Contact, seconds: int) -> bool:
    for _ in range(seconds):
        await contact.count()
    return contact.is_lost


def test_contact_is_lost_after_limit_and_renewed_by_question() -> None:
    async def look() -> list[bool]:
        contact = Contact(5.0, lambda: True)
        found = [await count(contact, 4)]
        contact.asked()
        found += [await count(contact, 4), await count(contact, 1)]
        contact.asked()
        return [*found, contact.is_lost]

    assert run(look()) == [False, False, True, False]


def test_time_in_which_process_was_suspended_does_not_count() -> None:
    busy = True
    contact = Contact(5.0, lambda: busy)

    async def look() -> list[bool]:
        nonlocal busy
        await count(contact, 4)
        busy = False
        found = [await count(contact, 100)]
        busy = True
        return [*found, await count(contact, 4), await count(contact, 1)]

    assert run(look()) == [False, False, True]
