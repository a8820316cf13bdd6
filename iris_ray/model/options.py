"""The options of a run: one table of their types, defaults, checks, units and help.

An entry of a `TypedDict` below is the only definition of its option. The following are derived from it: the parameters
and help of every public function that takes the option (`takes` in `client/run_options.py`), the flag of ``iris-ray
run`` and ``submit`` (`cli/options.py`), the checks of a request and of a `JobSpec`, and docs/options.md
(`tools/options_page.py`).

Times are in seconds; their names have no suffix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

from iris_ray.model.checks import (
    AUTO,
    VARIABLES,
    Check,
    Holds,
    ListOf,
    OneOf,
    Seconds,
    Whole,
    is_job_id,
    is_variables,
    shown,
)
from iris_ray.model.constraints import TAINT_PREFIX, Constraint
from iris_ray.model.secret import SecretValue
from iris_ray.model.tpu_processes import PROCESS_COUNTS


class PriorityBand(IntEnum):
    """Jobs of a band are placed before those of the bands after it, and may evict them, with a notice.

    In a cluster with teams, jobs within their team's quota come before all others, whatever their bands. SYSTEM is for
    operators. A smaller number goes first. The numbers of Iris's bands are others.
    """

    SYSTEM = -1
    PRODUCTION = 0
    INTERACTIVE = 1
    BATCH = 2


SPREAD, PACK = "spread", "pack"
"""Placement of independent tasks: on as many hosts as possible, or on as few."""
WHOLE_JOB, EACH_SLICE = "job", "slice"
"""The unit that restarts after a fault: all tasks of a coscheduled job, or those of one slice."""
SUCCEEDED, ENDED, STARTED = "succeeded", "ended", "started"
"""Conditions on a predecessor: it has succeeded, it has ended, or one of its tasks has run."""
FORK, ACTOR = "fork", "actor"
"""The ways in which a task's process starts."""
MOST_REASON = 200
"""The largest number of characters in the reason of a job of the band SYSTEM."""
END, ADOPT = "end", "adopt"
"""What happens to the jobs that a task has submitted when the task starts again."""

# -- checks ------------------------------------------------------------------------------------------------------------


def _no_taint(name: str) -> str:
    wrong = not name or name.startswith(TAINT_PREFIX)
    return f", which no taint is called; give its name without {TAINT_PREFIX!r}" if wrong else ""


def _is_reason(text: object) -> bool:
    return isinstance(text, str) and text.strip() != "" and text.isprintable() and len(text) <= MOST_REASON


def _no_module(name: str) -> str:
    return "" if all(part.isidentifier() for part in name.split(".")) else ", which is not the name of a module"


_TEAM = Holds(
    lambda value: value == "" or is_job_id(value), "the name of a team, such as 'research/vision'", or_none=True
)
"""A `JobSpec` has an empty str instead of None."""
_ANYTHING = Holds(lambda _: True, "a str, or None")
"""The function that reads the option validates it."""


class Secrets:
    """A mapping of names of variables to secrets, or None. No message shows a value."""

    wanted = "a mapping of names of variables to Secret objects, or None"

    def problem(self, value: object) -> str | None:
        if value is None:
            return None
        if isinstance(value, Mapping) and all(isinstance(secret, SecretValue) for secret in value.values()):
            wrong = [name for name in value if not (isinstance(name, str) and name.isidentifier())]
            return f"has {shown(wrong[0])}, which is not a variable's name" if wrong else None
        return 'must be a mapping of names to secrets, such as {"WANDB_API_KEY": Secret.from_file("~/.wandb-key")}'


class Destinations:
    """Destinations of notifications, or None. No message shows one, as it may be the address of a webhook."""

    most, longest = 20, 300
    wanted = 'a list of destinations of notifications, such as ["slack:TEAM_HOOK"], or None'

    def problem(self, value: object) -> str | None:
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            return f"must be {self.wanted}"
        if len(value) > self.most:
            return f"has {len(value):,} destinations; give {self.most} at most"
        if any("://" in one for one in value):
            return (
                "has the address of a webhook, which is a secret; store it, iris-ray cluster secrets set NAME, and give"
                " slack:NAME, googlechat:NAME or http:NAME"
            )
        if any(len(one) > self.longest or not one.isprintable() or not one.strip() for one in value):
            return f"has one that is empty, too long or can't be printed; it must be {self.wanted}"
        return None


class After:
    """Predecessors, as job ids or handles with a ``job_id``, or a mapping of these to the condition on each."""

    words = SUCCEEDED, ENDED, STARTED
    wanted = f"a list of job ids, or a mapping of them to {', '.join(map(repr, words[:2]))} or {words[2]!r}"

    def problem(self, value: object) -> str | None:
        if not isinstance(value, (Mapping, list, tuple)):
            return f"is {shown(value)}; give {self.wanted}"
        for one in value:
            if not is_job_id(_id_of(one)):
                return f"has {shown(one)}; give {self.wanted}"
        for word in value.values() if isinstance(value, Mapping) else ():
            if not (isinstance(word, str) and word in self.words):
                return f"has {shown(word)}; give {self.wanted}"
        return None

    @staticmethod
    def conditions(value: Mapping[Any, str] | Sequence[Any]) -> dict[str, str]:
        """Return the condition on each predecessor, by id."""
        if isinstance(value, Mapping):
            return {_id_of(one): word for one, word in value.items()}
        return {_id_of(one): SUCCEEDED for one in value}


def _id_of(job: Any) -> Any:
    return getattr(job, "job_id", job)


# -- the table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Default:
    """A default of some functions or commands that differs from the usual one, and why."""

    value: Any
    of: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option, whose name and type are in its `TypedDict`.

    Attributes:
        default: the default in all functions and commands that ``elsewhere`` does not list.
        check: the check of its values.
        help: its effect, in one sentence that is also the flag's help.
        more: further information for users.
        example: a value, as written in Python.
        flag: its flag on the command line, or "" if it has none.
        elsewhere: the other defaults.
    """

    default: Any
    check: Check
    help: str
    more: str = ""
    example: str
    flag: str = ""
    elsewhere: tuple[Default, ...] = ()

    def default_of(self, function: str) -> Any:
        """Return the default in a function or command, such as ``IrisClient.submit``."""
        return next((other.value for other in self.elsewhere if function in other.of), self.default)


_CONSTRAINTS = 'a list of Constraint objects, such as [Constraint("zone", ConstraintOp.EQ, "us-a")]'
_RESUMABLE = ("run_on_pod_resumable", "run_on_pod_multislice_resumable")
_NEVER = Default(0, ("run_on_pod_multislice",), "it never retries, so it does not take this option")
_AS_IN_IRIS = "as in Iris: docs/decisions/026-lost-task-budget-default.md"


class ContainerOptions(TypedDict, total=False):
    """Options of every function that runs a job, also in containers."""

    constraints: Annotated[
        Sequence[Constraint],
        Option(
            default=(),
            check=ListOf(Constraint, _CONSTRAINTS),
            help="Conditions that every host must satisfy.",
            example='[Constraint("zone", ConstraintOp.EQ, "us-central2-b")]',
            flag="--constraint",
        ),
    ]
    preferences: Annotated[
        Sequence[Constraint],
        Option(
            default=(),
            check=ListOf(Constraint, _CONSTRAINTS),
            help="Conditions that hosts should satisfy; hosts that satisfy more of them are preferred.",
            example='[Constraint("zone", ConstraintOp.EQ, "us-central2-b")]',
            flag="--prefer",
        ),
    ]
    tolerations: Annotated[
        Sequence[str],
        Option(
            default=(),
            check=ListOf(str, 'a list of names of taints, such as ["spot"]', _no_taint),
            help="Taints that the job tolerates: it may run on hosts that have them.",
            example='["spot"]',
            flag="--tolerate",
        ),
    ]
    priority: Annotated[
        PriorityBand | None,
        Option(
            default=None,
            check=OneOf(tuple(PriorityBand), or_none=True),
            help="The priority band; jobs in a higher band are placed first. Default: $IRIS_PRIORITY, or interactive.",
            more="In a cluster with teams, jobs within their team's quota precede all other jobs, whatever their bands."
            " See docs/sharing-a-cluster.md.",
            example="PriorityBand.PRODUCTION",
            flag="--priority",
        ),
    ]
    priority_reason: Annotated[
        str | None,
        Option(
            default=None,
            check=Holds(_is_reason, f"up to {MOST_REASON} printable characters that say why", or_none=True),
            help="Why the job is in the band `system`, which is for operators. Required there.",
            more="`iris-ray job status` shows it to everybody. Default: $IRIS_PRIORITY_REASON, which tasks of such jobs"
            " have. See docs/sharing-a-cluster.md.",
            example='"tests new hosts before users get them"',
            flag="--priority-reason",
        ),
    ]
    team: Annotated[
        str | None,
        Option(
            default=None,
            check=_TEAM,
            help="The team whose quota the job uses. Default: $IRIS_TEAM, or your only team.",
            example='"research/vision"',
            more="Users of no team: the one team that is open to everybody, or else none. See docs/teams.md.",
            flag="--team",
        ),
    ]
    after: Annotated[
        Mapping[str, str] | Sequence[str],
        Option(
            default=(),
            check=After(),
            help="Jobs that must succeed, end or start before this one starts.",
            example='{"prepare-1a2b3c4d": "succeeded"}',
            more="See docs/job-groups.md.",
            flag="--after",
        ),
    ]
    scheduling_timeout: Annotated[
        float | None,
        Option(
            default=None,
            check=Seconds(None, or_none=True),
            help="Give the job up if none of its tasks has run after this time. Default, or with 0 or less: never.",
            more="The time counts from the submission or, with `after`, from when those conditions are met.",
            example="3600",
            flag="--scheduling-timeout",
        ),
    ]
    max_runtime: Annotated[
        float | None,
        Option(
            default=None,
            check=Seconds(above=True, or_none=True),
            help="End the job this long after its first task ran, with a notice to its tasks beforehand.",
            more="Time spent waiting for new hosts counts. The modes `simple` and `validate` ignore it. See"
            " docs/failures.md.",
            example="24 * 3600",
            flag="--max-runtime",
        ),
    ]
    keep_warm: Annotated[
        float,
        Option(
            default=60.0,
            check=Seconds(endless=True),
            help="How long slices stay reserved for the next run of the same process. 0 releases them at once.",
            more="Slices for which another job or another program's placement group waits are released earlier; those"
            " of a detached job, at its end. The hosts also keep the modules that they have imported: tasks that are"
            " forks start in a fraction of a second.",
            example="600",
            elsewhere=(Default(0.0, ("iris-ray run", "iris-ray submit"), "their pool ends with the job"),),
        ),
    ]
    spares: Annotated[
        int,
        Option(
            default=0,
            check=Whole(),
            help="The number of slices held ready, with started processes, to replace a lost slice at once.",
            more="A waiting job takes precedence over a spare. Only gangs on slices have spares, and only with"
            ' `failure_domain="job"`.',
            example="1",
            flag="--spares",
        ),
    ]
    grow_after: Annotated[
        float | Literal["auto"] | None,
        Option(
            default=AUTO,
            check=Seconds(or_none=True, auto=True),
            help="When a run on fewer slices than it can use moves to more slices. auto: when the move pays.",
            more="With `auto`, it moves once the slices have been free for as long as the move costs this job. With a"
            " number, it asks for slices that many seconds after the start of its current attempt, and at once if it"
            " had more slices before a loss or an eviction; it moves once it has them. With `None`, it never moves."
            " Tasks get a notice beforehand: see docs/multislice.md.",
            example="600",
        ),
    ]
    stall_timeout: Annotated[
        float | None,
        Option(
            default=None,
            check=Seconds(or_none=True),
            help="Restart the gang if no task has called iris_ray.heartbeat() for this time. 0: never.",
            more="The restart costs one failure; the tasks log their stacks first. The start of the function counts as"
            " a call. With `None`, the limit is ten times the longest step so far and at least ten minutes, and the"
            " restart costs one preemption. It applies to jobs that call `heartbeat` and may restart after lost hosts,"
            " once ten steps were measured, and never in the first three steps of an attempt. See docs/hangs.md.",
            example="600",
            flag="--stall-timeout",
        ),
    ]
    host_silence: Annotated[
        float | None,
        Option(
            default=None,
            check=Seconds(2, endless=True, or_none=True),
            help="How long a host may be silent before it counts as lost. Default: 5 s.",
            more="A shorter time detects faults sooner, but declares busy hosts lost more often.",
            example="30",
            flag="--host-silence",
        ),
    ]
    start: Annotated[
        str,
        Option(
            default=FORK,
            check=OneOf((FORK, ACTOR)),
            help="How a task's process starts: as a fork of one that has imported modules, or as an actor of Ray.",
            more='`"fork"` takes milliseconds, `"actor"` takes seconds. Tasks with GPUs always start as actors, and so'
            " do tasks whose `runtime_env` has anything except packages, directories, environment variables,"
            " `py_executable` and `config`, such as a container or a hook. See docs/running.md.",
            example='"actor"',
        ),
    ]
    secrets: Annotated[
        Mapping[str, SecretValue] | None,
        Option(
            default=None,
            check=Secrets(),
            help="Environment variables of the tasks whose values no record, log or message shows.",
            more="See docs/secrets.md.",
            example='{"WANDB_API_KEY": Secret.from_store("WANDB_API_KEY")}',
            flag="--secret",
        ),
    ]

    notify: Annotated[
        Sequence[str] | None,
        Option(
            default=None,
            check=Destinations(),
            help="Destinations of notifications about the job's end, stalls and long waits. Default: $IRIS_NOTIFY.",
            more="A destination has the form `CHANNEL:NAME,on=EVENT+EVENT`. `[]`: only those that an operator has set"
            " for all jobs. See docs/notifications.md.",
            example='["slack:TEAM_HOOK,on=failed+stalled"]',
            flag="--notify",
        ),
    ]
    topology: Annotated[
        str | None,
        Option(
            default=None,
            check=Holds(
                lambda value: isinstance(value, str), 'the shape of a part in chips, such as "2x4"', or_none=True
            ),
            help="The shape of a part of a slice, such as 2x4: the gang gets a connected part of whole hosts.",
            more="Several jobs share a slice in this way, each on a part of its own. Default: whole slices. A job on"
            ' several parts needs `failure_domain="slice"`, which containers do not have. See docs/parts-of-slices.md.',
            example='"2x4"',
            flag="--topology",
        ),
    ]


class GangOptions(ContainerOptions, total=False):
    """`ContainerOptions`, and the options of Python functions, which run in iris_ray's own processes."""

    preload: Annotated[
        Sequence[str],
        Option(
            default=(),
            check=ListOf(str, 'a list of module names, such as ["jax"]', _no_module),
            help="Modules that each host imports once, before tasks start, such as jax. Saves seconds at each start.",
            more="While they are imported, the modules see your `JAX_…` variables and others that act when a process"
            " starts; they must not read any other variable. A module that starts threads or processes, or opens a"
            " device, is left to the tasks, and the log names it. If no host can import a module, a new job ends with"
            " `TaskSetupError`. Tasks without TPU don't benefit.",
            example='["jax"]',
        ),
    ]
    exit_grace: Annotated[
        float,
        Option(
            default=300.0,
            check=Seconds(),
            help="How long threads and exit handlers may run after all tasks of the gang have returned.",
            more="Use it for an upload or an asynchronous checkpoint. The caller already has the results; the hosts"
            " stay busy until the processes have ended, and a script that exits waits for them. In a gang"
            " that fails, a task that has raised an error gets at most 5 s, and the others none; a gang that is"
            " cancelled or moves gets no such time.",
            example="900",
            flag="--exit-grace",
        ),
    ]

    processes_per_host: Annotated[
        int,
        Option(
            default=1,
            check=OneOf(PROCESS_COUNTS),
            help="The number of processes on each host, which share its chips. 2 suits TPU7x.",
            more="Each process is a task with its own index, result and log. Only for gangs on hosts with four chips."
            " See docs/tpu-types.md.",
            example="2",
            flag="--processes-per-host",
        ),
    ]
    stop_without_progress: Annotated[
        int | None,
        Option(
            default=None,
            check=Whole(1, or_none=True),
            help="Fail the job after this number of attempts in a row without a new step, even with retries left.",
            more="A step is new if `heartbeat(step)` exceeds every step reported so far. Attempts that lose hosts"
            " count, with or without a notice; evictions and growth don't. Only for jobs that are one gang.",
            example="5",
            flag="--stop-without-progress",
        ),
    ]
    failure_domain: Annotated[
        str,
        Option(
            default=WHOLE_JOB,
            check=OneOf((WHOLE_JOB, EACH_SLICE)),
            help="What restarts after a fault: the whole job, or only the slice concerned.",
            more='With `"slice"`, each slice is a separate gang and a separate JAX program. See docs/local-sgd.md.',
            example='"slice"',
            flag="--failure-domain",
        ),
    ]
    children: Annotated[
        str | None,
        Option(
            default=None,
            check=OneOf((END, ADOPT), or_none=True),
            help="When a task restarts, the jobs that it has submitted end, or its next attempt can adopt them."
            " Default: the value of the job whose task submits this one, or else end.",
            more='With `"adopt"`, a job that the next attempt submits again, under the same name and with the same'
            " request, continues, or its results are there at once. It ends with the job of the task. Jobs of a"
            " `JobGroup` always end. See docs/client.md.",
            example='"adopt"',
            flag="--children",
        ),
    ]


class RetryOptions(TypedDict, total=False):
    """How often a gang, or a single task, starts again."""

    max_retries_preemption: Annotated[
        int,
        Option(
            default=10_000,
            check=Whole(),
            help="The number of further attempts after lost hosts. 0: a lost host ends the job.",
            more="Some other causes count as well: see docs/failures.md. With 0, an eviction also ends the job as"
            " preempted; such jobs are the last of their band to be evicted. The job doesn't move to more slices"
            " either. Failures are still retried: see `max_retries_failure`.",
            example="100",
            flag="--max-retries-preemption",
            elsewhere=(
                Default(1_000_000, _RESUMABLE, "as in Levanter: the function resumes from its own checkpoints"),
                Default(100, ("IrisClient.submit", "JobGroup.add", "an actor of Fray"), _AS_IN_IRIS),
                _NEVER,
            ),
        ),
    ]
    max_retries_failure: Annotated[
        int,
        Option(
            default=10,
            check=Whole(),
            help="The number of further attempts after errors and crashes. Use 0 while you develop.",
            example="0",
            flag="--max-retries-failure",
            elsewhere=(Default(0, ("IrisClient.submit", "JobGroup.add", "an actor of Fray"), _AS_IN_IRIS), _NEVER),
        ),
    ]


class ModeOptions(TypedDict, total=False):
    """Where a run happens."""

    mode: Annotated[
        str | None,
        Option(
            default=None,
            check=_ANYTHING,
            help="Where it runs: cluster; simple: local processes without Ray; validate: the same after printing"
            " the plan; simulate: a simulated cluster. Default: $IRIS_RAY_MODE, or cluster.",
            more='`"simulate: kill slice 0 after 30s"` adds faults. See docs/without-tpus.md.',
            example='"simple"',
            flag="--mode",
        ),
    ]
    simulate: Annotated[
        str | None,
        Option(
            default=None,
            check=_ANYTHING,
            help='Faults of the simulated cluster, such as "kill slice 0 after 30s".',
            more="Implies the mode `simulate`. docs/without-tpus.md lists all faults.",
            example='"kill slice 0 after 30s"',
        ),
    ]


class RunOptions(GangOptions, RetryOptions, total=False):
    """The options of a function on a cluster."""


class PodGangOptions(GangOptions, ModeOptions, total=False):
    """The options of the ``run_on_pod`` functions that take no retries, or take them by position."""


class PodOptions(RunOptions, ModeOptions, total=False):
    """The options of the other ``run_on_pod`` functions."""


class DockerRequestOptions(ContainerOptions, RetryOptions, total=False):
    """The options of a program in containers on a cluster."""


class DockerOptions(DockerRequestOptions, ModeOptions, total=False):
    """The options of `run_docker_on_pod`."""


class JobOptions(RunOptions, total=False):
    """The options of `IrisClient.submit`."""

    max_task_failures: Annotated[
        int | None,
        Option(
            default=None,
            check=Whole(or_none=True),
            help="The number of failed attempts that the job survives, over all tasks and including retries.",
            more="Its results then hold errors in the places of failed tasks. With `None`, the job fails with the first"
            " task, or gang, whose retries are used up. With 5 and `max_retries_failure=1`, a task that fails twice is"
            " given up and the others continue.",
            example="5",
            flag="--max-task-failures",
        ),
    ]
    task_placement: Annotated[
        str,
        Option(
            default=SPREAD,
            check=OneOf((SPREAD, PACK)),
            help="How independent CPU tasks are placed: spread over many hosts, or packed onto few.",
            more="Spread tasks get a host each while there are equally suitable hosts, so that a lost host costs few"
            " tasks; hosts with chips are used when the others are full. Packed tasks leave whole hosts to other jobs.",
            example='"pack"',
            flag="--task-placement",
        ),
    ]
    env: Annotated[
        Mapping[str, str] | None,
        Option(
            default=None,
            check=Holds(is_variables, VARIABLES.wanted, or_none=True, hides=True),
            help="Environment variables of the tasks.",
            more="Variables of Python functions that act when a process starts (such as `LD_…`, `PYTHON…` and `RAY_…`)"
            " are passed in Ray's `runtime_env`, whose values Ray's logs may show. Pass secrets as `secrets`.",
            example='{"TF_CPP_MIN_LOG_LEVEL": "1"}',
        ),
    ]


class _AllOptions(JobOptions, ModeOptions):
    """Every option of every public function."""


def options_of(group: type) -> dict[str, Option]:
    """Return the options in a `TypedDict`, by name."""
    hints = get_type_hints(group, include_extras=True)
    return {name: next(one for one in hint.__metadata__ if isinstance(one, Option)) for name, hint in hints.items()}


OPTIONS: Mapping[str, Option] = MappingProxyType(options_of(_AllOptions))
"""Every option, by name."""


def default_of(option: str, function: str = "") -> Any:
    """Return the default of an option, optionally in a given function or command."""
    return OPTIONS[option].default_of(function)
