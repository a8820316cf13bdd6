"""Groups of jobs that start together or not at all, as each of their jobs describes them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from iris_ray.errors import InvalidJobError
from iris_ray.model.checks import is_job_id, shown

MOST_MEMBERS = 100
"""Limit for the jobs of one group."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The group that a job belongs to. All jobs of the group carry an equal spec.

    Args:
        group_id: unique in the cluster.
        name: the display name.
        members: the name and the job id of each job, in the order of their submission.
        main: the names of the main jobs. Once all of them have succeeded, the others are ended.

    Raises:
        InvalidJobError: a name or an id is invalid or occurs twice, or there are too many jobs.
    """

    group_id: str
    name: str
    members: tuple[tuple[str, str], ...]
    main: tuple[str, ...]

    def __post_init__(self) -> None:
        who = f"group {shown(self.name)}"
        if not is_job_id(self.group_id) or not is_job_id(self.name):
            raise InvalidJobError(f"{who} has the id {shown(self.group_id)}; give letters, digits, '.', '_' and '-'")
        if not 1 <= len(self.members) <= MOST_MEMBERS:
            raise InvalidJobError(f"{who} has {len(self.members)} jobs; a group has 1 to {MOST_MEMBERS}")
        for which, values in (("names", [name for name, _ in self.members]), ("ids", [one for _, one in self.members])):
            if wrong := [value for value in values if not is_job_id(value)]:
                raise InvalidJobError(
                    f"{who}: {shown(wrong[0])} is not valid among the {which} of its jobs; give letters, digits, '.',"
                    " '_' and '-'"
                )
            if len(set(values)) < len(values):
                raise InvalidJobError(f"{who}: two of its jobs have the same {which[:-1]}")
        if not self.main or not set(self.main) <= {name for name, _ in self.members}:
            raise InvalidJobError(f"{who}: main is {shown(self.main)}; give names of its jobs, at least one")

    @property
    def job_ids(self) -> Mapping[str, str]:
        """The ids of the group's jobs, by name."""
        return MappingProxyType(dict(self.members))

    def without_others(self, job_ids: Collection[str]) -> "GroupSpec":
        """Return the group reduced to the jobs with these ids. If none of them is a main job, all become main jobs."""
        members = tuple((name, job_id) for name, job_id in self.members if job_id in job_ids)
        names = tuple(name for name, _ in members)
        return GroupSpec(self.group_id, self.name, members, tuple(n for n in names if n in self.main) or names)

    def name_of(self, job_id: str) -> str:
        """Return the name of one of its jobs."""
        return next(name for name, one in self.members if one == job_id)
