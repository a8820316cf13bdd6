"""Ends what a task has started outside its process tree, such as a container, by the services that know how."""

import contextlib
import os
import threading
from concurrent.futures import Future

from iris_ray.actors.protocol.services import imported, installed_services
from iris_ray.actors.protocol.task_files import TaskFiles

END_S = 60.0
"""A service may take this time to end what one task owns. Then the host counts as not free."""


def end_owned(files: TaskFiles) -> list[str]:
    """End what a task owns. Block until it is gone.

    Returns:
        What still exists, in words, with the reason. The host is not free then. This includes what belongs to a service
        that is not installed, and what can't be known because the files can't be read.
    """
    folder = files.all_owned
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return [f"processes that services may have started for pid {files.pid} ({folder} can't be read: {error})"]
    ends = {service.name: service.ends_owned for service in installed_services() if service.ends_owned}
    left: list[str] = []
    for name in names:
        if name.rpartition(".")[2].isdecimal():  # `write_whole` was broken off: nothing was started after it
            with contextlib.suppress(OSError):
                (folder / name).unlink()
            continue
        what = f"processes that the service {name} has started for pid {files.pid}"
        if name not in ends:
            left.append(f"{what} (the service is not installed)")
            continue
        ended: Future[list[str]] = Future()
        # A daemon: a thread that hangs must not keep this process from its exit.
        thread = threading.Thread(target=_end, args=(ends[name], files, ended), name=name, daemon=True)
        try:
            thread.start()
            left += ended.result(END_S)
        except Exception as error:
            late = isinstance(error, TimeoutError) and not ended.done()
            why = f"no answer within {END_S:g} s" if late else f"{type(error).__name__}: {error}"
            left.append(f"{what} ({why})")
    with contextlib.suppress(OSError):  # it is not empty
        folder.rmdir()
    return left


def _end(place: str, files: TaskFiles, ended: "Future[list[str]]") -> None:
    try:
        left = imported(place)(files)
        if not isinstance(left, list) or not all(isinstance(one, str) for one in left):
            raise TypeError(f"{place} returned {type(left).__name__}, not a list of words")
        ended.set_result(left)
    except BaseException as error:  # SystemExit would end the event loop that waits
        ended.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))
