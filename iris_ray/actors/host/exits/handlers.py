"""Exit handlers of user code. They run before Ray ends the process."""

import atexit
import threading

import ray


def run_exit_handlers() -> None:
    """Do what the interpreter does when it ends: wait for threads that are no daemons, then run exit handlers.

    Ray would end all child processes first. Then a handler that talks to one, as experiment trackers do with the
    process that uploads for them, would lose what it had to say.
    """
    atexit.unregister(ray.shutdown)  # the process stays connected until it exits
    threading._shutdown()  # type: ignore[attr-defined]  # concurrent.futures ends its threads here
    atexit._run_exitfuncs()
