"""Calls of user code in a task's process. Whatever it does becomes a value."""

import importlib
from collections.abc import Collection

from iris_ray.actors.host.exits.after_notice import means_saved, report_saved
from iris_ray.actors.host.exits.result_pickling import exited, raised, returned
from iris_ray.actors.wire.payloads import Payload, load
from iris_ray.actors.wire.task_files import TaskFiles
from iris_ray.model.outcomes import TaskEnd


def run_function(function: Payload, files: TaskFiles) -> TaskEnd:
    """Unpickle the user's function, call it, and return how it ended; not if it exits after a notice."""
    try:
        return returned(load(function)())
    except SystemExit as stop:
        if means_saved(stop, files):
            report_saved(files)
        return exited(stop)
    except BaseException as error:
        return raised(error)


def import_all(modules: Collection[str]) -> str | None:
    """Import modules, and return why the first one that can't be imported can't; None if all can."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            return f"preload={module!r} can't be imported: {type(error).__name__}: {error}"
    return None
