"""``iris-ray``: the group of all commands, and the groups by subject."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property
from typing import Any, Final

import click

import iris_ray
from iris_ray.actors.protocol.services import Command, imported, installed_services
from iris_ray.cli.address import address_option, remember_words
from iris_ray.cli.conventions import SuggestingGroup, errors_as_lines, explained, output_watched
from iris_ray.terminal import guarded_output, show_each_line

KERNEL: Final[Mapping[str, Command]] = {
    "job run": Command(
        "iris_ray.cli.run:run",
        "Run a script or function on every host of TPU slices, and wait for its end.",
        "Every day",
    ),
    "job submit": Command(
        "iris_ray.cli.submit:submit", "Put a job into the queue and leave it to the cluster.", "Every day"
    ),
    "job ls": Command("iris_ray.cli.job_list:ls", "Jobs of all users: what runs, what waits, and why.", "Every day"),
    "job status": Command("iris_ray.cli.jobs:status", "One job: its state, attempts and retry budgets."),
    "job tasks": Command(
        "iris_ray.cli.jobs:tasks", "The tasks of a job: where each is or was, for how long, and how it ended."
    ),
    "job why": Command(
        "iris_ray.cli.jobs:why", "Why a job waits: what is missing, and which jobs come first.", "Every day"
    ),
    "job events": Command(
        "iris_ray.cli.jobs:events", "What has happened to a job: its latest attempts and why each ended."
    ),
    "job cancel": Command("iris_ray.cli.ends:cancel", "End jobs, whether they wait or run.", "Every day"),
    "job wait": Command("iris_ray.cli.ends:wait", "Wait until jobs have ended; the exit code tells how.", "Every day"),
    "job rerun": Command("iris_ray.cli.rerun:rerun", "Run a job again, as it was or with other flags.", "Every day"),
    "host ls": Command("iris_ray.cli.hosts:ls", "Slices and hosts: complete or not, free or busy, and why not."),
    "host drain": Command(
        "iris_ray.cli.hosts:drain", "Keep new jobs off a slice or host, or jobs that don't tolerate a taint."
    ),
    "host undrain": Command(
        "iris_ray.cli.hosts:undrain", "Let a drained slice or host take new jobs again, or lift a taint."
    ),
    "host give-notice": Command(
        "iris_ray.cli.give_notice:give_notice",
        "Tell the tasks on a slice or host that it is about to end, and wait for them.",
    ),
    "cluster dashboard": Command(
        "iris_ray.cli.dashboard:dashboard", "Web pages of the fleet, the queue, jobs, users and events, live."
    ),
    "cluster settings": Command(
        "iris_ray.cli.settings:settings", "Settings of the whole cluster: show, set or reset them."
    ),
    "cluster controller": Command(
        "iris_ray.cli.controller:controller", "The cluster's Controller: start, stop, upgrade, status, export, import."
    ),
    "cluster controller start": Command(
        "iris_ray.cli.controller:start",
        "Start the Controller, unless it runs. It continues from the records of an earlier one.",
    ),
    "cluster controller stop": Command("iris_ray.cli.controller:stop", "End the Controller; running jobs continue."),
    "cluster controller upgrade": Command(
        "iris_ray.cli.controller:upgrade", "Replace the Controller with the version installed here and on the head."
    ),
    "cluster controller status": Command(
        "iris_ray.cli.controller:status", "Show the Controller's epoch, version, jobs and hosts."
    ),
    "job": Command(
        "iris_ray.cli.main:job",
        "All about jobs: also their status, tasks, events, stacks, profiles and goodput.",
        "By subject",
    ),
    "host": Command(
        "iris_ray.cli.main:host",
        "Slices and hosts: list, drain, and tell them that they are about to end.",
        "By subject",
    ),
    "cluster": Command(
        "iris_ray.cli.main:cluster",
        "The whole cluster: dashboard, limits, Controller, provisioning, self-test.",
        "By subject",
    ),
    "completion": Command(
        "iris_ray.cli.completion:completion", "Completion for bash, zsh or fish.", "Without a cluster"
    ),
    "demo": Command(
        "iris_ray.cli.demo:demo",
        "See a job lose two TPU slices and finish anyway, without any TPU.",
        "Without a cluster",
    ),
}
"""The kernel's commands by their words. A command is imported when it is called, so the list imports none of them."""
SECTIONS: Final = "Every day", "Inside a job", "By subject", "Without a cluster"


@cache
def commands() -> Mapping[str, Command]:
    """Return all commands by their words: the kernel's, then each service's."""
    return {**KERNEL, **{words: one for service in installed_services() for words, one in service.commands.items()}}


def sections_of_all() -> dict[str, dict[str, Command]]:
    """Return the commands that work without a group's name, by section and last word."""
    return {
        section: {words.split()[-1]: one for words, one in commands().items() if one.section == section}
        for section in SECTIONS
    }


def section_of(group: str) -> Callable[[], dict[str, dict[str, Command]]]:
    """Return a function for the commands of a group."""
    found = [(words.rpartition(" "), one) for words, one in commands().items()]
    return lambda: {"Commands": {name: one for (of, _, name), one in found if of == group}}


_EPILOG = """
\b
COMMAND --help shows examples. For scripts: --json, lists also -q; exit codes: 0 fine; 1 the job or command failed; 2 it
can't work as written; 3 no cluster, or no Controller in it; 130 Ctrl-C.

\b
list and ps are ls, top is ls --watch, status and describe are job status, ssh is shell.

\b
IRIS_USER is your name, if it is not your account's; IRIS_DEBUG=1 shows where an unforeseen error comes from.
"""


class Commands(SuggestingGroup):
    """Lists its commands in sections, and imports a command when it is called.

    Args:
        sections: returns the commands, by title and name.
    """

    def __init__(self, *args: Any, sections: Callable[[], dict[str, dict[str, Command]]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = sections

    @cached_property
    def sections(self) -> dict[str, dict[str, Command]]:
        """The commands by section and name, without empty sections."""
        return {title: entries for title, entries in self._sections().items() if entries}

    @cached_property
    def entries(self) -> dict[str, Command]:
        """The commands by name."""
        return {name: entry for entries in self.sections.values() for name, entry in entries.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.entries:
            return None
        command: click.Command = imported(self.entries[cmd_name].place)
        return explained(command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.entries))
        for section, entries in self.sections.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(widest), entry.does) for name, entry in entries.items()])


class Main(Commands):
    """The group of all commands. It shows errors as one line."""

    def paths(self, ctx: click.Context) -> list[str]:
        return [*super().paths(ctx), *(words for words in commands() if " " in words)]

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **kwargs: Any) -> click.Context:
        words = tuple(args)  # parsing empties the list
        with errors_as_lines():
            context = super().make_context(info_name, args, *others, **kwargs)
        remember_words(context, words)
        return context

    def main(self, *args: Any, **kwargs: Any) -> Any:
        show_each_line()
        if os.environ.get("NO_COLOR") or not all(stream and stream.isatty() for stream in (sys.stdout, sys.stderr)):
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # Ray would colour its prefixes in files and pipes as well
        with output_watched(), guarded_output():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with errors_as_lines():
            return super().invoke(ctx)


@click.group(
    cls=Main,
    sections=sections_of_all,
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
      export RAY_ADDRESS=http://10.0.0.2:8265 which cluster; on one of its nodes it is found without
      iris-ray doctor                         is anything wrong, and which TPU types are there?
      iris-ray run train.py v4-32             train.py on every host of a v4-32; prints what it prints
      iris-ray submit train.py --tpu v4-32    the same, left to the cluster; prints the job's id
      iris-ray ls                             the jobs of all users: what runs, what waits
      iris-ray why train-1a2b3c4d             what that job waits for
      iris-ray logs -f train-1a2b3c4d         what its latest attempt and later ones print, to the end
      iris-ray cancel train-1a2b3c4d          end it
      iris-ray host ls                        which slices are free, and who has the others
    """


def every_command(group: click.Group = main, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield every command of ``iris-ray`` with its words, such as "ls", "job", "job ls" and "slots evict"."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{before}{name}", command
        if isinstance(command, click.Group):
            yield from every_command(command, f"{before}{name} ")


# -- groups by subject -------------------------------------------------------------------------------------------------


@click.group(cls=Commands, sections=section_of("job"))
def job() -> None:
    """Commands about jobs. The everyday ones also work without "job".

    \b
      iris-ray job status train-1a2b3c4d
      iris-ray job goodput
    """


@click.group(cls=Commands, sections=section_of("host"))
def host() -> None:
    """Slices and hosts: list, drain, and tell them that they are about to end.

    \b
      iris-ray host ls
      iris-ray host drain v4-32-7 --reason "bad link"
    """


@click.group(cls=Commands, sections=section_of("cluster"))
def cluster() -> None:
    """The whole cluster: its health, limits, Controller, and new slices.

    \b
      iris-ray cluster doctor
      iris-ray cluster limits ann --priority batch --chips 256
      iris-ray cluster controller upgrade
    """
