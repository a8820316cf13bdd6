"""Sends one message by e-mail or by a command, once; `webhooks.py` sends it by HTTP. Neither knows jobs or queues.

An error says whether another try may help. None has the address of a webhook, a password or a key in its message.
"""

import asyncio
import contextlib
import logging
import os
import signal
import smtplib
import ssl
import subprocess
from collections.abc import Callable, Collection, Sequence
from email.message import EmailMessage
from typing import IO, Final

from iris_ray.notify.settings import Smtp
from iris_ray.processes.identity import stat_of
from iris_ray.processes.tree import ProcessTree, end_processes
from iris_ray.terminal import one_line

logger = logging.getLogger(__name__)

COMMAND_S: Final = 30.0
SMTP_STEP_S: Final = 10.0
SMTP_S: Final = 30.0
MOST_ERROR: Final = 200
COMMAND_VARIABLES: Final = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""The variables of the Controller's process that a command gets. Others may be secrets."""


class NotSentError(Exception):
    """A message was not sent.

    Args:
        why: for people, without secrets.
        again: whether another try may help.
        after_s: the receiver wants no other try before this time; seconds.
    """

    def __init__(self, why: str, again: bool = True, after_s: float = 0.0) -> None:
        super().__init__(one_line(why)[:MOST_ERROR])
        self.again = again
        self.after_s = after_s


class NotAllowedError(NotSentError):
    """A message was not sent, as users of some of its news may not use the destination's secret, or it was removed.

    Args:
        why: for people, without secrets.
        ids: the ids of these news.
    """

    def __init__(self, why: str, ids: Collection[str]) -> None:
        super().__init__(why, again=False)
        self.ids = frozenset(ids)


def reason_of(error: Exception) -> str:
    """Return an error's kind and the kernel's words for it. Its own text may have a secret."""
    cause = getattr(error, "os_error", error)  # of aiohttp's
    words = os.strerror(cause.errno) if isinstance(cause, OSError) and cause.errno and cause.errno > 0 else ""
    return f"{type(error).__name__}{f': {words}' if words else ''}"


async def run_command(words: Sequence[str], body: bytes) -> None:
    """Run a command on the head with JSON on its stdin. Processes that it started in its session end with it.

    Raises:
        NotSentError: it could not be started, took too long, or ended with an error.
    """
    environ = {name: os.environ[name] for name in COMMAND_VARIABLES if name in os.environ}
    try:
        with _in_memory(body) as stdin:
            process = subprocess.Popen(
                words, stdin=stdin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ, cwd="/",
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise NotSentError(f"the command can't be started: {error.strerror or 'an error'}") from None
    try:
        async with asyncio.timeout(COMMAND_S):
            await _ended(process.pid)
    except TimeoutError:
        raise NotSentError(f"the command has not ended within {COMMAND_S:g} s") from None
    finally:
        # Nobody has reaped it yet, so its number is still that of its group and session, and of no others.
        with contextlib.suppress(PermissionError):  # it is another user's, such as of sudo
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(_end_session, process.pid)
        await _ended(process.pid)
        process.wait()
    if process.returncode:
        raise NotSentError(f"the command has ended with code {process.returncode}")


def _in_memory(data: bytes) -> IO[bytes]:
    """Return a file with data, from its beginning. It needs neither a disk nor somebody who writes into a pipe."""
    file = open(os.memfd_create("notifications"), "w+b")  # noqa: SIM115 — the caller closes it
    try:
        file.write(data)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


async def _ended(pid: int) -> None:
    """Wait for the end of a child, without reaping it."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    pidfd = os.pidfd_open(pid)
    try:
        loop.add_reader(pidfd, ended.set)
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _end_session(leader: int) -> None:
    """End the processes of a session, whose leader was killed and not reaped. Blocks."""
    try:
        stat = stat_of(leader)
        assert stat is not None, "it was not reaped"
        tree = ProcessTree(stat.identity)
        if left := end_processes(tree.search(), tree.search):
            logger.warning("processes of a command can't be ended: %s", ", ".join(left))
    except OSError as error:
        logger.warning("what a command has left running may go on: %s", error)


def send_email(server: Smtp, message: EmailMessage, login: str, open_: Callable[[smtplib.SMTP], None]) -> None:
    """Send an e-mail. Blocks.

    Args:
        server: the server.
        message: the e-mail.
        login: ``user:password``; empty without a login.
        open_: gets the connection, so that somebody else can close it if it hangs. It may raise an OSError.

    Raises:
        NotSentError: the server did not take it.
    """
    context = ssl.create_default_context()
    try:
        if server.tls == "tls":
            smtp: smtplib.SMTP = smtplib.SMTP_SSL(server.host, server.port, timeout=SMTP_STEP_S, context=context)
        else:
            smtp = smtplib.SMTP(server.host, server.port, timeout=SMTP_STEP_S)
        with smtp:
            open_(smtp)
            if server.tls == "starttls":
                smtp.starttls(context=context)
            if login:
                user, _, password = login.strip().partition(":")
                smtp.login(user, password)
            smtp.send_message(message)
    except smtplib.SMTPAuthenticationError as error:
        raise NotSentError(f"the SMTP server refuses the login: {error.smtp_code}") from None
    except smtplib.SMTPRecipientsRefused as error:
        code = next((code for code, _ in error.recipients.values()), 550)
        raise NotSentError(f"the SMTP server refuses the recipient: {code}", again=code < 500) from None
    except smtplib.SMTPResponseException as error:
        raise NotSentError(f"the SMTP server answers {error.smtp_code}", again=error.smtp_code < 500) from None
    except smtplib.SMTPNotSupportedError as error:
        raise NotSentError(f"the SMTP server can't do that: {error}") from None
    except (smtplib.SMTPException, OSError, ValueError) as error:
        raise NotSentError(f"SMTP: {reason_of(error)}") from None
