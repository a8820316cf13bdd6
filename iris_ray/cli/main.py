"""``iris-ray``: the group of all commands."""

from collections.abc import Mapping
from typing import Any

import click

import iris_ray
from iris_ray.cli.cancel import cancel
from iris_ray.cli.controller import controller
from iris_ray.cli.demo import demo
from iris_ray.cli.doctor import doctor
from iris_ray.cli.drain import drain, undrain
from iris_ray.cli.exits import errors_as_lines
from iris_ray.cli.give_notice import give_notice
from iris_ray.cli.groups import SuggestingGroup
from iris_ray.cli.limit import limit
from iris_ray.cli.logs import logs
from iris_ray.cli.ls import ls
from iris_ray.cli.options import address_option
from iris_ray.cli.provision import provision
from iris_ray.cli.run import run
from iris_ray.cli.selftest import selftest
from iris_ray.cli.simulate import simulate
from iris_ray.cli.status import status
from iris_ray.cli.submit import submit
from iris_ray.cli.taint import taint, untaint
from iris_ray.cli.tasks import tasks
from iris_ray.cli.why import why
from iris_ray.cli.workers import workers

SECTIONS: Mapping[str, tuple[click.Command, ...]] = {
    "Run": (run, submit, demo),
    "Jobs": (ls, status, tasks, logs, why, cancel),
    "Slices and hosts": (workers, drain, undrain, taint, untaint, give_notice),
    "The cluster": (limit, controller, doctor, selftest, provision, simulate),
}

_EPILOG = """
\b
COMMAND --help shows examples; listing commands have --json. Exit codes: 0 fine; 1 the job or command failed; 2 it can't
work as written; 3 no cluster, or no Controller in it; 130 Ctrl-C.

\b
IRIS_USER says who you are, if it is not your account's name; IRIS_DEBUG=1 shows where an unforeseen error comes from.

\b
Completion of commands, options, TPU types, jobs and slices in bash (or zsh, with zsh_source):
  eval "$(_IRIS_RAY_COMPLETE=bash_source iris-ray)"
"""


class Commands(SuggestingGroup):
    """Lists its commands in sections, and shows errors as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [command.name or "" for commands in SECTIONS.values() for command in commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.list_commands(ctx)))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([((c.name or "").ljust(widest), c.get_short_help_str(80)) for c in commands])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with errors_as_lines():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with errors_as_lines():
            return super().invoke(ctx)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    epilog=_EPILOG,
)
@address_option
@click.version_option(iris_ray.__version__, prog_name="iris-ray")
def main() -> None:
    """Jobs on TPU slices, on a Ray cluster: one process on every host, all or none, through preemptions.

    A job is a script or function that runs on whole slices. What can't run yet waits in one queue for all users.

    \b
    From nothing to a finished job:
      iris-ray demo                           no cluster yet? See a job on a simulated one
      export RAY_ADDRESS=10.0.0.2:6379        which cluster; on one of its machines it is found without
      iris-ray doctor                         is anything wrong, and which TPU types are there?
      iris-ray run train.py v4-32             train.py on every host of a v4-32; prints what it prints
      iris-ray submit train.py --tpu v4-32    the same, left to the cluster; prints the job's id
      iris-ray ls                             the jobs of all users: what runs, what waits
      iris-ray why train-1a2b3c4d             what that job waits for
      iris-ray logs -f train-1a2b3c4d         what it prints, from the beginning to its end
      iris-ray cancel train-1a2b3c4d          end it
      iris-ray workers                        which slices are free, and who has the others
    """


for _commands in SECTIONS.values():
    for _command in _commands:
        main.add_command(_command)
