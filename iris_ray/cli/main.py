"""The group of all commands."""

import difflib
from collections.abc import Mapping
from typing import Any

import click

import iris_ray
from iris_ray.cli import hosts, jobs
from iris_ray.cli.controller import controller
from iris_ray.cli.demo import demo
from iris_ray.cli.doctor import doctor
from iris_ray.cli.exits import errors_as_lines
from iris_ray.cli.logs import logs
from iris_ray.cli.options import address_option
from iris_ray.cli.run import run
from iris_ray.cli.submit import submit

SECTIONS: Mapping[str, tuple[click.Command, ...]] = {
    "Run": (run, submit, demo),
    "Jobs": (jobs.ls, jobs.status, jobs.tasks, logs, jobs.why, jobs.cancel),
    "Slices and hosts": (hosts.workers, hosts.drain, hosts.undrain, hosts.taint, hosts.untaint),
    "The cluster": (controller, doctor),
}

_EPILOG = """
\b
Examples:
  iris-ray run train.py v4-32 --num-slices 2    run train.py on every host of two slices
  iris-ray submit train.py --tpu v4-32          the same without waiting for it
  iris-ray why train-1a2b3c4d                   why that job waits
  iris-ray logs -f train-1a2b3c4d               what its tasks print, from the beginning until its end
  iris-ray workers                              which slices are free, and who has the others

\b
Exit codes: 0 fine; 1 the job or command failed; 2 it can't work as written; 3 no cluster, or no Controller in it;
130 Ctrl-C. All listing commands have --json.

\b
Completion of commands and options in bash (or zsh, with zsh_source):
  eval "$(_IRIS_RAY_COMPLETE=bash_source iris-ray)"
"""


class Commands(click.Group):
    """Lists its commands in sections, names the nearest one to an unknown, and shows errors as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [command.name or "" for commands in SECTIONS.values() for command in commands]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.list_commands(ctx)))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([((c.name or "").ljust(widest), c.get_short_help_str(80)) for c in commands])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not ctx.resilient_parsing:
            near = difflib.get_close_matches(args[0], self.commands, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            ctx.fail(f"there is no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

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
    """


for _commands in SECTIONS.values():
    for _command in _commands:
        main.add_command(_command)
