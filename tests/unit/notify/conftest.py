"""A cluster in this process, for tests of notifications."""

from collections.abc import Iterator

import pytest

from tests.support.controller_in_process import bare_cluster
from tests.support.receivers import Mailbox, Webhook, mailbox, webhook

__all__ = ["bare_cluster"]


@pytest.fixture
def hook() -> Iterator[Webhook]:
    with webhook() as found:
        yield found


@pytest.fixture
def box() -> Iterator[Mailbox]:
    with mailbox() as found:
        yield found
