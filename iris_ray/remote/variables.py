"""Starts a command of Ray's job API with variables from a person's file, which neither that API nor its logs may show.

The variables come as a package in the GCS. It is deleted before the command starts.
"""

import json
import os
import sys

from iris_ray.actors.calls.ray_internals import take_package
from iris_ray.settings import SENT_VARIABLES


def main(uri: str, *command: str) -> None:
    """Become the command."""
    if (found := take_package(uri, os.environ["RAY_ADDRESS"])) is None:
        sys.exit("iris_ray: the variables that were sent with this job are gone: submit it again")
    variables = json.loads(found)
    os.environ |= variables
    os.environ[SENT_VARIABLES] = ",".join((SENT_VARIABLES, *variables))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"iris_ray: {command[0]!r} can't be started: {error.strerror}", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main(*sys.argv[1:])
