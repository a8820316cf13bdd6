"""Asks the provider about lost slices, without ever delaying a verdict for long."""

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from iris_ray.cloud.cloud_tpu import CloudTpu
from iris_ray.errors import InvalidRequestError
from iris_ray.model.outcomes import ProviderState, ProviderWord

logger = logging.getLogger(__name__)

WORD_TIMEOUT_S = 2.0
"""How long a verdict waits for the provider's word about the slices of an attempt."""
WORD_KEPT_S = 5.0
"""How long an answer is reused."""


class ProviderWords:
    """Asks the provider about slices side by side. The answer takes `WORD_TIMEOUT_S` at most, whatever the API does.

    Args:
        cloud: the zone whose API is asked; None: nobody is.
    """

    def __init__(self, cloud: CloudTpu | None = None) -> None:
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="cloud-tpu")
        self._asked: dict[str, asyncio.Future[ProviderWord]] = {}
        self._ask_of(cloud)

    def ask_at(self, location: str | None) -> None:
        """Ask the API of this zone from now on; None: nobody is asked."""
        if location == (None if self._cloud is None else self._cloud.location):
            return
        self._asked.clear()
        try:
            self._ask_of(None if location is None else CloudTpu.at(location))
        except InvalidRequestError as error:
            logger.error("the provider is not asked about lost slices: %s", error)
            self._ask_of(None)

    def _ask_of(self, cloud: CloudTpu | None) -> None:
        self._cloud = cloud
        if cloud is not None:
            self._threads.submit(cloud.prepare)

    async def about(self, slice_names: Iterable[str]) -> dict[str, ProviderWord]:
        """Return the provider's word about each slice; nothing if no zone is configured."""
        if self._cloud is None:
            return {}
        asked = {name: self._ask(self._cloud, name) for name in slice_names}
        if asked:
            await asyncio.wait(asked.values(), timeout=WORD_TIMEOUT_S)
        late = ProviderWord(ProviderState.UNKNOWN, f"the provider did not answer within {WORD_TIMEOUT_S:g} s")
        words = {name: answer.result() if answer.done() else late for name, answer in asked.items()}
        for name, word in words.items():
            logger.info("the provider says about %s: %s (%s)", name, word.state.value, word.reason)
        return words

    def _ask(self, cloud: CloudTpu, name: str) -> "asyncio.Future[ProviderWord]":
        """Return the future answer. All hosts of a slice are lost at about the same time: they share one answer."""
        if name not in self._asked:
            loop = asyncio.get_running_loop()
            self._asked[name] = answer = loop.run_in_executor(self._threads, _word_or_defect, cloud, name)
            answer.add_done_callback(lambda _: loop.call_later(WORD_KEPT_S, self._asked.pop, name, None))
        return self._asked[name]


def _word_or_defect(cloud: CloudTpu, name: str) -> ProviderWord:
    try:
        return cloud.slice_word(name)
    except Exception as error:  # a bug here must not prevent a verdict
        logger.exception("asking the provider about %s failed", name)
        return ProviderWord(ProviderState.UNKNOWN, repr(error))
