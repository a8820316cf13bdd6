"""Ends what a task has started outside its process tree, such as a container, by the services that know how."""

from concurrent.futures import ThreadPoolExecutor

from iris_ray.actors.protocol.services import imported, installed_services
from iris_ray.actors.protocol.task_files import OWNED, TaskFiles

END_S = 60.0
"""A service may take this time to end what one task owns. Then the host counts as not free."""


def end_owned(files: TaskFiles) -> list[str]:
    """End what a task owns. Block until it is gone.

    Returns:
        What still exists, in words, with the reason. The host is not free then. This includes what belongs to a service
        that is not installed.
    """
    left: list[str] = []
    prefix = f"{files.pid}.{OWNED}"
    try:
        names = [path.name.removeprefix(prefix) for path in files.started.parent.glob(f"{prefix}*")]
    except OSError:
        return left
    ends = {service.name: service.ends_owned for service in installed_services() if service.ends_owned}
    for name in names:
        if name not in ends:
            left.append(f"what the service {name} has started for pid {files.pid} (the service is not installed)")
            continue
        thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        try:
            left += thread.submit(imported(ends[name]), files).result(END_S)
        except TimeoutError:
            left.append(f"what the service {name} has started for pid {files.pid} (no answer within {END_S:g} s)")
        except Exception as error:
            left.append(f"what the service {name} has started for pid {files.pid} ({type(error).__name__}: {error})")
        finally:
            thread.shutdown(wait=False)
    return left
