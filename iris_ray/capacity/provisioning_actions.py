"""What a provisioner does in a turn, as `provisioning.py` and `taking_back.py` plan it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from iris_ray.capacity.lower_bands import ChipsWanted
from iris_ray.capacity.provider import Source
from iris_ray.model.topology import TPUConfig


@dataclass(frozen=True, slots=True)
class Create:
    """Request a slice of this name; an earlier plan may have requested it already."""

    name: str
    config: TPUConfig
    source: Source
    reason: str

    def __str__(self) -> str:
        return f"create {self.name} in {self.source}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a slice; with ``if_unused`` only if no job has started on it meanwhile.

    Slices whose chips go to a job (``for_job``) are deleted together, and only if that job still waits and the slices
    that go anyway (``besides``) do go: otherwise they would not suffice.
    """

    name: str
    reason: str
    if_unused: bool = False
    for_job: str = ""
    besides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"delete {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Slices of a type are wanted, but can't be requested now."""

    tpu_type: str
    reason: str

    def __str__(self) -> str:
        return f"wait: {self.reason}"


@dataclass(frozen=True, slots=True)
class LeaveChips:
    """Ask the Controller whether jobs of lower bands leave slices to a gang, and tell them to; otherwise to hold some.

    Attributes:
        wanted: the chips that the gang lacks, and the slices that could go.
        tpu_type: the gang's type.
        goal: what the chips become, for people.
        source: the source of the slices, which is then asked.
        otherwise: why the gang waits if no job leaves.
    """

    wanted: ChipsWanted
    tpu_type: str
    goal: str
    source: Source
    otherwise: str

    @property
    def asked(self) -> tuple[str, Source]:
        """The job and the source."""
        return self.wanted.job_id, self.source

    def granted(self, how: str) -> "TakeBack":
        """Return what happens instead of the question once it is known how the chips are freed."""
        return TakeBack.of(self.tpu_type, self.wanted.chips, self.goal, how, self.source)

    def __str__(self) -> str:
        held = ", or hold idle ones" if self.wanted.may_hold else ""
        return f"ask jobs to leave {self.wanted.chips} chips of other types for {self.goal}{held}"


@dataclass(frozen=True, slots=True)
class KeepSlices:
    """Slices that jobs were to leave for a job are no longer needed: the jobs that are still there continue."""

    job_id: str

    def __str__(self) -> str:
        return f"let other jobs keep their slices: {self.job_id} needs none of them any more"


@dataclass(frozen=True, slots=True)
class TakeBack:
    """Chips of slices of other types are being freed for a gang. The text begins with "takes"."""

    tpu_type: str
    text: str

    @staticmethod
    def of(tpu_type: str, chips: int, goal: str, how: str, source: Source) -> "TakeBack":
        """Return the action for a goal, such as slices for a job; ``how`` ends with what has to happen first."""
        return TakeBack(tpu_type, f"takes {chips} chips back for {goal}: {how}, {source} is asked")

    def __str__(self) -> str:
        return self.text.replace("takes", "take", 1)


Action = Create | Delete | Wait | TakeBack | LeaveChips | KeepSlices


def held(names: Sequence[str]) -> str:
    """Return in words how chips of held slices are freed."""
    return f"holds {listed(names)} until enough of them are idle; once these are deleted"


def unmet(slices: object, config: TPUConfig, limit: str) -> str:
    """Return in words that slices of a type are missing because of a limit."""
    return f"gangs miss {slices} more slices of {config.name}, but {limit}"


def listed(some: Sequence[object]) -> str:
    """Return the first of some things in words."""
    return ", ".join(map(str, some[:8])) + (", …" if len(some) > 8 else "")
