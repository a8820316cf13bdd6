"""Turns news into a message of its channel and sends it once. It runs in the sender's thread."""

import asyncio
import smtplib
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from iris_ray.errors import IrisError, NotPermittedError, SecretNotFoundError
from iris_ray.notify.channels import SMTP_S, NotAllowedError, NotSentError, run_command, send_email
from iris_ray.notify.core import News, batch_id
from iris_ray.notify.destination import Channel
from iris_ray.notify.messages import Lines, chat_body, email_message, json_body, signed_headers
from iris_ray.notify.settings import PrivateHosts, Smtp

LINES_OF_MOST: Final = 3
"""Messages with more news have no last lines, so a thousand failures at once don't read a thousand logs."""
LINES_S: Final = 10.0
SMTP_AT_ONCE: Final = 2


@dataclass(frozen=True, slots=True)
class Config:
    """The cluster's settings for notifications.

    Attributes:
        commands: lists of arguments by name.
        smtp: the server for e-mail, or None.
        private: private hosts that are allowed.
    """

    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    smtp: Smtp | None = None
    private: PrivateHosts = field(default_factory=PrivateHosts)


class Delivery:
    """Sends messages.

    Args:
        secret: returns the value of a secret for news; blocks; raises an IrisError. Its arguments: the secret's name,
            and the news, or None for a secret of a setting.
        last_lines: returns the last lines of output for news.
    """

    def __init__(
        self, secret: Callable[[str, News | None], str], last_lines: Callable[[News], Awaitable[Sequence[str]]]
    ) -> None:
        self.config = Config()
        self._secret = secret
        self._last_lines = last_lines
        self._for_smtp = ThreadPoolExecutor(SMTP_AT_ONCE, thread_name_prefix="notifications by e-mail")
        self._smtp_turns = asyncio.Semaphore(SMTP_AT_ONCE)

    async def send(self, news: Sequence[News], more: int) -> None:
        """Send news of one place in one message.

        Args:
            news: at least one.
            more: how many earlier ones were dropped.

        Raises:
            NotSentError: it was not sent; the message has no secret.
        """
        first, config = news[0], self.config
        channel, _, name = first.place.partition(":")
        lines = await self._lines(news)
        match Channel(channel):
            case Channel.HTTP:
                now = time.time()
                body = json_body(news, lines, now)
                key = await self._read_for_all(first.key, news)
                await self._post(name, news, body, signed_headers(batch_id(news), body, key, now))
            case Channel.SLACK | Channel.GOOGLE_CHAT as chat:
                await self._post(name, news, chat_body(chat, news, lines, more), {})
            case Channel.EMAIL:
                await self._email(name, news, lines, more)
            case Channel.COMMAND:
                if name not in config.commands:
                    raise NotSentError(f"the setting notify_commands has no command {name}")
                await run_command(config.commands[name], json_body(news, lines, time.time()))

    def close(self) -> None:
        self._for_smtp.shutdown(wait=False, cancel_futures=True)

    async def _post(self, name: str, news: Sequence[News], body: bytes, headers: Mapping[str, str]) -> None:
        from iris_ray.notify.webhooks import post  # with aiohttp

        await post(await self._read_for_all(name, news), body, headers, self.config.private)

    async def _email(self, to: str, news: Sequence[News], lines: Lines, more: int) -> None:
        server = self.config.smtp
        if server is None:
            raise NotSentError("the setting notify_smtp has no server")
        if not server.sends_to(to):
            raise NotSentError("the setting notify_smtp does not allow e-mail to this domain", again=False)
        message = email_message(news, lines, more, server.sender, to)
        login = await self._read(server.login, None) if server.login else ""
        opened: list[smtplib.SMTP] = []
        given_up = threading.Event()

        def open_(smtp: smtplib.SMTP) -> None:
            opened.append(smtp)
            if given_up.is_set():  # it is tried again, and must not be sent twice
                raise TimeoutError

        async with self._smtp_turns:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(SMTP_S):  # an e-mail that waits for a thread is then not sent any more
                    await loop.run_in_executor(self._for_smtp, send_email, server, message, login, open_)
            except TimeoutError:
                given_up.set()
                for one in opened:
                    one.close()  # ends the thread's wait for a server that answers a byte at a time
                raise NotSentError(f"the SMTP server has not taken it within {SMTP_S:g} s") from None

    async def _read_for_all(self, name: str, news: Sequence[News]) -> str:
        """Return the value of a secret. Raise NotAllowedError with the news whose users may not use it any more.

        A secret that was removed is nobody's any more. If it is a key, the news with other keys must not wait for it.
        """
        value, refused = "", set[tuple[str, str, bool]]()
        for owner, one in {_owner(one): one for one in news}.items():
            try:
                value = await self._read(name, one)
            except NotPermittedError:
                refused.add(owner)
            except SecretNotFoundError:
                raise NotAllowedError(f"the secret {name} was removed", [one.id for one in news]) from None
        if refused:
            why = f"the user may not use the secret {name} any more"
            raise NotAllowedError(why, [one.id for one in news if _owner(one) in refused])
        return value

    async def _read(self, name: str, news: News | None) -> str:
        try:
            return await asyncio.to_thread(self._secret, name, news)
        except IrisError as error:
            if news is not None and isinstance(error, (NotPermittedError, SecretNotFoundError)):
                raise
            raise NotSentError(f"the secret {name} can't be used: {type(error).__name__}") from None

    async def _lines(self, news: Sequence[News]) -> Lines:
        if len(news) > LINES_OF_MOST:
            return {}
        found = {}
        for one in news:
            if one.lines:
                try:
                    async with asyncio.timeout(LINES_S):
                        found[one.id] = await self._last_lines(one)
                except Exception:  # its host is gone, or the service of logs is
                    found[one.id] = ["(its output can't be read now)"]
        return found


def _owner(news: News) -> tuple[str, str, bool]:
    return news.user, news.team, news.by_rule
