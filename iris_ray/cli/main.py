"""``iris-ray``: the group of all commands, and the groups by subject."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, NamedTuple

import click

import iris_ray
from iris_ray.cli.address import address_option, remember_words
from iris_ray.cli.conventions import SuggestingGroup, errors_as_lines


class Entry(NamedTuple):
    """A command of the list. Its module is imported when it is called.

    Attributes:
        place: its module in ``iris_ray``, and its function there.
        does: what it does, in a line.
    """

    place: str
    does: str


JOB: Final[Mapping[str, Entry]] = {
    "run": Entry("cli.run:run", "Run a script or function on every host of TPU slices, and wait for its end."),
    "submit": Entry("cli.submit:submit", "Put a job into the queue and leave it to the cluster."),
    "ls": Entry("cli.jobs:ls", "Jobs of all users: what runs, what waits, and why."),
    "status": Entry("cli.jobs:status", "One job: its state, attempts and retry budgets."),
    "tasks": Entry("cli.jobs:tasks", "The tasks of a job: where each is or was, for how long, and how it ended."),
    "why": Entry("cli.jobs:why", "Why a job waits: what is missing, and which jobs come first."),
    "logs": Entry("logs.cli:logs", "What a task has printed, even after its end."),
    "events": Entry("cli.jobs:events", "What has happened to a job: its latest attempts and why each ended."),
    "stacks": Entry("inspection.cli:stacks", "What each thread of a job's tasks does now."),
    "profile": Entry("inspection.cli:profile", "Where the time of a task goes: a picture, or a trace for XProf."),
    "chips": Entry("inspection.cli:chips", "How much the chips of a job are used: duty cycle and memory."),
    "goodput": Entry(
        "goodput.cli:goodput",
        "What the time of jobs went into: productive steps, queueing, recovery from preemptions and more.",
    ),
    "bug-report": Entry("doctor.bug_report:bug_report", "One file about a job, to read and then to send."),
    "exec": Entry("sessions.cli:exec_", "Run a command beside a task, with its variables, on its host or all hosts."),
    "shell": Entry("sessions.cli:shell", "A terminal beside a task, on its host."),
    "port-forward": Entry("sessions.cli:port_forward", "Make a port on a task's host a port of this machine."),
    "cancel": Entry("cli.jobs:cancel", "End a job, whether it waits or runs."),
}
HOST: Final[Mapping[str, Entry]] = {
    "ls": Entry("cli.hosts:ls", "Slices and hosts: complete or not, free or busy, and why not."),
    "drain": Entry("cli.hosts:drain", "Keep new jobs off a slice or host, or those that don't tolerate a taint."),
    "undrain": Entry("cli.hosts:undrain", "Let a drained slice or host take new jobs again, or lift a taint."),
    "give-notice": Entry(
        "cli.give_notice:give_notice", "Tell the tasks on a slice or host that it is about to end, and wait for them."
    ),
}
TEAM: Final[Mapping[str, Entry]] = {
    "show": Entry("teams.cli:show", "Teams: their quotas, and what each uses, borrows and lends."),
    "apply": Entry("teams.cli:apply", "Replace the tree of teams by that of a file; shows the difference first."),
}
CLUSTER: Final[Mapping[str, Entry]] = {
    "doctor": Entry("doctor.cli:doctor", "Check this machine, the cluster and each of its TPU hosts; say what to do."),
    "dashboard": Entry("cli.dashboard:dashboard", "Web pages of the fleet, the queue, jobs, users and events, live."),
    "limits": Entry("teams.limits:limits", "How much each user has and may have, or set it."),
    "secrets": Entry("secrets.cli:secrets", "API keys and the like for all jobs: set, list and remove them."),
    "settings": Entry("cli.settings:settings", "What operators have decided for the whole cluster, or set it."),
    "controller": Entry("cli.controller:controller", "The cluster's Controller: start, upgrade, status, export."),
    "provision": Entry(
        "capacity.cli:provision", "Ask Google for slices that waiting jobs miss, and give unused ones back."
    ),
    "selftest": Entry("selftest.cli:selftest", "Try real TPU slices, and write a report."),
}
SECTIONS: Final[Mapping[str, Mapping[str, Entry]]] = {
    "Every day": {
        **{name: JOB[name] for name in ("run", "submit", "ls", "why", "logs", "cancel")},
        "dev": Entry("dev.cli:dev", "Hold slices, and run what you have just edited on all their hosts."),
        "doctor": CLUSTER["doctor"],
    },
    "Inside a job": {name: JOB[name] for name in ("exec", "shell", "port-forward", "bug-report")},
    "By subject": {
        "job": Entry("cli.main:job", "All about jobs: also their status, tasks, events, stacks, profiles and goodput."),
        "host": Entry("cli.main:host", "Slices and hosts: list, drain, and tell them that they are about to end."),
        "team": Entry("cli.main:team", "Teams and their quotas: show them, or set them from a file."),
        "serve": Entry("slots.cli:serve", "Serve the models of a file as OpenAI's API, until Ctrl-C."),
        "slots": Entry("slots.cli:slots", "Models that are served: their slots, what waits for them, and why."),
        "cluster": Entry(
            "cli.main:cluster", "The whole cluster: dashboard, limits, Controller, provisioning, self-test."
        ),
        "history": Entry("history.cli:history", "Jobs that ended long ago, utilisation over time, and any SELECT."),
        "report": Entry("history.cli:report", "Chip-hours and goodput of a month by user, and what failures cost."),
    },
    "Without a cluster": {
        "demo": Entry("cli.demo:demo", "See a job lose two TPU slices and finish anyway, without any TPU."),
        "study": Entry("study.cli:study", "See in virtual time how long jobs would wait, and what faults would cost."),
    },
}
"""The commands and what each does, so that the list of them needs none of their modules."""

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
    """Lists its commands in sections, and imports a command when it is called.

    Args:
        sections: the commands, by title and name.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Mapping[str, Entry]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections
        self.entries = {name: entry for entries in sections.values() for name, entry in entries.items()}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.entries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.entries:
            return None
        module, _, function = self.entries[cmd_name].place.partition(":")
        command: click.Command = getattr(import_module(f"iris_ray.{module}"), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.entries))
        for section, entries in self.sections.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(widest), entry.does) for name, entry in entries.items()])


class Main(Commands):
    """The group of all commands. It shows errors as one line."""

    def paths(self, ctx: click.Context) -> list[str]:
        inner = (("job", JOB), ("host", HOST), ("team", TEAM), ("cluster", CLUSTER))
        return [*super().paths(ctx), *(f"{group} {name}" for group, entries in inner for name in entries)]

    def make_context(self, info_name: str | None, args: list[str], *others: Any, **kwargs: Any) -> click.Context:
        words = tuple(args)  # parsing empties the list
        with errors_as_lines():
            context = super().make_context(info_name, args, *others, **kwargs)
        remember_words(context, words)
        return context

    def invoke(self, ctx: click.Context) -> Any:
        with errors_as_lines():
            return super().invoke(ctx)


@click.group(
    cls=Main,
    sections=SECTIONS,
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
      iris-ray host ls                        which slices are free, and who has the others
    """


# -- groups by subject -------------------------------------------------------------------------------------------------


@click.group(cls=Commands, sections={"Commands": JOB})
def job() -> None:
    """All about jobs. Those that one types daily also work without "job".

    \b
      iris-ray job status train-1a2b3c4d
      iris-ray job goodput
    """


@click.group(cls=Commands, sections={"Commands": HOST})
def host() -> None:
    """Slices and hosts: list, drain, and tell them that they are about to end.

    \b
      iris-ray host ls
      iris-ray host drain v4-32-7 --reason "bad link"
    """


@click.group(cls=Commands, sections={"Commands": TEAM})
def team() -> None:
    """Teams and their quotas: who may have how many chips, and what others use of them meanwhile.

    \b
      iris-ray team show
      iris-ray team show --toml | tee teams.toml
      iris-ray team apply teams.toml
    """


@click.group(cls=Commands, sections={"Commands": CLUSTER})
def cluster() -> None:
    """The whole cluster: what is wrong, who may have how much, its Controller, and new slices.

    \b
      iris-ray cluster doctor
      iris-ray cluster limits ann --priority batch --chips 256
      iris-ray cluster controller upgrade
    """
