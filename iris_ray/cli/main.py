"""``iris-ray``: the group of all commands."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

import iris_ray
from iris_ray.cli.address import address_option
from iris_ray.cli.conventions import SuggestingGroup, errors_as_lines

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Run": {
        "run": "Run a script or function on every host of TPU slices, and wait for its end.",
        "submit": "Put a job into the queue and leave it to the cluster.",
        "demo": "See a job lose two TPU slices and finish anyway, without any TPU.",
    },
    "Jobs": {
        "ls": "Jobs of all users: what runs, what waits, and why.",
        "status": "One job: its state, attempts and retry budgets.",
        "tasks": "The tasks of a job: where each is or was, for how long, and how it ended.",
        "logs": "What a task has printed, even after its end.",
        "why": "Why a job waits: what is missing, and which jobs come first.",
        "events": "What has happened to a job: its latest attempts and why each ended.",
        "stacks": "What each thread of a job's tasks does now.",
        "profile": "Where the time of a task goes: a picture of its functions.",
        "goodput": "What the time of jobs went into: productive steps, queueing, recovery from preemptions and more.",
        "cancel": "End a job, whether it waits or runs.",
    },
    "Slices and hosts": {
        "workers": "Slices and hosts: complete or not, free or busy, and why not.",
        "drain": "Keep new jobs off a slice or host; what runs there goes on.",
        "undrain": "Let a drained slice or host take new jobs again.",
        "taint": "Keep jobs away that don't tolerate the taint NAME; what runs there goes on.",
        "untaint": "Take the taint NAME off a slice or host.",
        "give-notice": "Tell the tasks on a slice or host that it is about to end.",
    },
    "Models": {
        "slots": "Models that are served: their slots, what waits for them, and why.",
    },
    "The cluster": {
        "dashboard": "Web pages of the fleet, the queue, jobs, users and events, live.",
        "limit": "How much each user has and may have, or set it.",
        "settings": "What operators have decided for the whole cluster, or set it.",
        "controller": "The cluster's Controller: start, stop, upgrade, status.",
        "doctor": "Check this machine, the cluster and each of its TPU hosts; say what to do.",
        "selftest": "Try real TPU slices, and write a report.",
        "provision": "Ask Google for slices that waiting jobs miss, and give unused ones back.",
        "simulate": "See in virtual time how long jobs would wait, and what faults would cost.",
    },
}
"""The commands and what each does, so that the list of them needs none of their modules."""

_MODULES: Mapping[str, str] = {
    **dict.fromkeys(("ls", "status", "tasks", "why", "events", "cancel"), "iris_ray.cli.jobs"),
    **dict.fromkeys(("workers", "drain", "undrain", "taint", "untaint", "give-notice"), "iris_ray.cli.hosts"),
    **dict.fromkeys(("stacks", "profile"), "iris_ray.cli.inspect"),
    "slots": "iris_ray.slots.cli",
    "simulate": "iris_ray.cli.study",
}
"""Where a command is, if not in the module of its own name."""

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
    """Lists its commands in sections, imports a command when it is called, and shows errors as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in SECTIONS.values() for name in commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = import_module(_MODULES.get(cmd_name, f"iris_ray.cli.{cmd_name}"))
        command: click.Command = getattr(module, cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.list_commands(ctx)))
        for section, commands in SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(widest), does) for name, does in commands.items()])

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
