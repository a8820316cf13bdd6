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
    """Jobs of a band are placed before those of the next, and may evict them, with a notice."""

    PRODUCTION = 0
    INTERACTIVE = 1
    BATCH = 2


SPREAD, PACK = "spread", "pack"
"""Placement of independent tasks: on as many hosts as possible, or on as few."""
WHOLE_JOB, EACH_SLICE = "job", "slice"
"""The unit that restarts after a fault: all tasks of a coscheduled job, or those of one slice."""
SUCCEEDED, ENDED, STARTED = "succeeded", "ended", "started"
"""Conditions on a predecessor: it has succeeded, it has ended, or one of its tasks has run."""
MOST_STANDBYS = 8
"""The largest number of standbys on a host. Each takes some 100 MB, and more with modules of ``preload``."""

# -- checks ------------------------------------------------------------------------------------------------------------


def _no_taint(name: str) -> str:
    wrong = not name or name.startswith(TAINT_PREFIX)
    return f", which no taint is called; give its name without {TAINT_PREFIX!r}" if wrong else ""


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
        flag: its flag on the command line, or "" if it has none.
        elsewhere: the other defaults.
    """

    default: Any
    check: Check
    help: str
    more: str = ""
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
            help="What every host must satisfy.",
            flag="--constraint",
        ),
    ]
    preferences: Annotated[
        Sequence[Constraint],
        Option(
            default=(),
            check=ListOf(Constraint, _CONSTRAINTS),
            help="What hosts should satisfy; those that satisfy most go first.",
            flag="--prefer",
        ),
    ]
    tolerations: Annotated[
        Sequence[str],
        Option(
            default=(),
            check=ListOf(str, 'a list of names of taints, such as ["spot"]', _no_taint),
            help="Taints that do not keep the job away.",
            flag="--tolerate",
        ),
    ]
    priority: Annotated[
        PriorityBand,
        Option(
            default=PriorityBand.INTERACTIVE,
            check=OneOf(tuple(PriorityBand)),
            help="The band; jobs of a higher one go first.",
            flag="--priority",
        ),
    ]
    team: Annotated[
        str | None,
        Option(
            default=None,
            check=_TEAM,
            help="The team whose quota it uses; without it, $IRIS_TEAM, or the only one to which you belong.",
            more="See docs/teams.md.",
            flag="--team",
        ),
    ]
    after: Annotated[
        Mapping[str, str] | Sequence[str],
        Option(
            default=(),
            check=After(),
            help="Jobs that must have succeeded, ended or started first.",
            more="See docs/job-groups.md.",
            flag="--after",
        ),
    ]
    scheduling_timeout: Annotated[
        float | None,
        Option(
            default=None,
            check=Seconds(None, or_none=True),
            help="The job is given up if none of its tasks has run by then; without it, or with 0 or less, never.",
            flag="--scheduling-timeout",
        ),
    ]
    max_runtime: Annotated[
        float | None,
        Option(
            default=None,
            check=Seconds(above=True, or_none=True),
            help="The job ends this long after its first task ran; its tasks get a notice before.",
            more="Waits for new hosts count; local modes ignore it. See docs/failures.md.",
            flag="--max-runtime",
        ),
    ]
    keep_warm: Annotated[
        float,
        Option(
            default=60.0,
            check=Seconds(endless=True),
            help="How long slices and their processes are kept for the next run; 0 releases them at once.",
            elsewhere=(Default(0.0, ("iris-ray run", "iris-ray submit"), "their pool ends with the job"),),
        ),
    ]
    spares: Annotated[
        int,
        Option(
            default=0,
            check=Whole(),
            help="Slices to hold ready, with started processes, each to replace a lost one at once.",
            more="A job that waits gets them first. Only gangs on slices have spares.",
            flag="--spares",
        ),
    ]
    grow_after: Annotated[
        float | Literal["auto"] | None,
        Option(
            default=AUTO,
            check=Seconds(or_none=True, auto=True),
            help="When a run on fewer slices than it can use moves to more: auto weighs what that costs this job.",
            more="It then moves once they have been free for as long as the move costs. A number: after that many"
            " seconds, once they are free, and after a loss at once. Tasks get a notice: see `preemption_notice`."
            " None: never.",
        ),
    ]
    stall_timeout: Annotated[
        float | None,
        Option(
            default=None,
            check=Seconds(or_none=True),
            help="The gang starts again if no task has called iris_ray.heartbeat() for this time; 0: never.",
            more="The stacks of all tasks are logged first, and it costs one failure. The function's start"
            " counts as a call. None: ten times the longest step seen, at least ten minutes, for tasks that call"
            " heartbeat; see docs/hangs.md.",
            flag="--stall-timeout",
        ),
    ]
    host_silence: Annotated[
        float | None,
        Option(
            default=None,
            check=Seconds(2, endless=True, or_none=True),
            help="A host that has not answered for this time is marked lost; without it, 5.",
            more="With a shorter silence faults are found sooner, and a busy host is more often taken for a lost one.",
            flag="--host-silence",
        ),
    ]
    standbys: Annotated[
        int | None,
        Option(
            default=None,
            check=Whole(1, MOST_STANDBYS, or_none=True),
            help="How many task processes wait on each host of a warm slice, for short runs in a row.",
            more="None: 3 on hosts with 16 or more cores and 16 GiB of free memory, else 1; gangs of 64 or more hosts"
            " have 1. Each takes some 100 MB, and more with modules of `preload`.",
        ),
    ]
    secrets: Annotated[
        Mapping[str, SecretValue] | None,
        Option(
            default=None,
            check=Secrets(),
            help="Variables of the tasks that no record, log or message shows.",
            more="See docs/secrets.md.",
            flag="--secret",
        ),
    ]


class GangOptions(ContainerOptions, total=False):
    """`ContainerOptions`, and the options of Python functions, which run in iris_ray's own processes."""

    preload: Annotated[
        Sequence[str],
        Option(
            default=(),
            check=ListOf(str, 'a list of module names, such as ["jax"]', _no_module),
            help="Modules that the waiting task processes import ahead, such as jax: seconds less for each start.",
            more="They see your `JAX_…` variables, and others that act when a process starts; they must not read any"
            " other variable at import. A name that no host can import ends the job with `TaskSetupError`. Of no use"
            " without TPU.",
        ),
    ]
    exit_grace: Annotated[
        float,
        Option(
            default=300.0,
            check=Seconds(),
            help="Time for threads and exit handlers of a task after its function has returned, such as an upload.",
            more="The results are out by then; the hosts are busy until it is done, and so is a script that ends.",
            flag="--exit-grace",
        ),
    ]

    processes_per_host: Annotated[
        int,
        Option(
            default=1,
            check=OneOf(PROCESS_COUNTS),
            help="How many processes run the function on each host, and share its chips; 2 suits TPU7x.",
            more="Each counts as a task: it has its own number, result and log. Only on hosts of four chips. See"
            " docs/tpu-types.md.",
            flag="--processes-per-host",
        ),
    ]
    stop_without_progress: Annotated[
        int | None,
        Option(
            default=None,
            check=Whole(1, or_none=True),
            help="The job fails after this number of attempts in a row without a new step, even with retries left.",
            more="A step is new if `heartbeat(step)` exceeds every step reported so far. Attempts that lose hosts"
            " count; evictions and moves don't. Only for one gang.",
            flag="--stop-without-progress",
        ),
    ]
    failure_domain: Annotated[
        str,
        Option(
            default=WHOLE_JOB,
            check=OneOf((WHOLE_JOB, EACH_SLICE)),
            help="What restarts after a fault: the whole job, or only the slice concerned.",
            more='With "slice", each slice is a gang by itself, and a JAX program of its own. See docs/local-sgd.md.',
            flag="--failure-domain",
        ),
    ]


class RetryOptions(TypedDict, total=False):
    """How often a gang, or a single task, starts again."""

    max_retries_preemption: Annotated[
        int,
        Option(
            default=10_000,
            check=Whole(),
            help="Further attempts after lost hosts; 0: none in any case.",
            more="With 0 a run does not move to more slices, either. If a job of a higher band takes its hosts, which"
            " happens to such runs last, it ends as preempted.",
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
            help="Further attempts after errors and crashes; 0 while you develop.",
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
            help="Where it runs: cluster; simple, in processes of this machine, without Ray; validate, which prints"
            " the plan before; simulate, on a simulated cluster. Without it, $IRIS_RAY_MODE, or cluster.",
            more='"simulate: kill slice 0 after 30s" also has the faults.',
            flag="--mode",
        ),
    ]
    simulate: Annotated[
        str | None,
        Option(
            default=None,
            check=_ANYTHING,
            help='Faults that happen to the simulated cluster, such as "kill slice 0 after 30s".',
            more="It implies that mode. docs/local-modes.md lists all.",
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
            help="How many failed attempts the job survives, over all tasks and including retried attempts.",
            more="Its results then have errors in the places of failed tasks. None: it fails with the first task, or"
            " gang, whose retries are used up. With 5 and `max_retries_failure=1`, a task that fails twice is given up,"
            " and the others go on.",
            flag="--max-task-failures",
        ),
    ]
    task_placement: Annotated[
        str,
        Option(
            default=SPREAD,
            check=OneOf((SPREAD, PACK)),
            help="How independent CPU tasks are placed: spread over hosts, or packed on few.",
            more="Spread tasks have a host each as long as there are hosts, so a lost host costs few tasks. Packed"
            " tasks leave whole hosts to others.",
            flag="--task-placement",
        ),
    ]
    env: Annotated[
        Mapping[str, str] | None,
        Option(
            default=None,
            check=Holds(is_variables, VARIABLES.wanted, or_none=True, hides=True),
            help="Environment variables of the tasks.",
            more="Those that act when a process starts (`LD_…`, `PYTHON…`, `RAY_…` and their kind) travel as Ray's"
            " `runtime_env`, whose values Ray's own logs show: no secrets in them.",
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
