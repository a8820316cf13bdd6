"""The settings and limits of a provisioner, and the chips and slices that count towards the limits. Pure."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from iris_ray.capacity.provider import OWNER_LABEL, QueuedSlice, Source
from iris_ray.capacity.provisioning_history import Unconfirmed
from iris_ray.capacity.reservations import Lack
from iris_ray.model.topology import TPUConfig


class Reach(StrEnum):
    """How far a provisioner goes to free chips of slices of other types for a waiting gang."""

    IDLE = "idle"
    """Only requests and idle slices go."""
    LOWER_BANDS = "lower-bands"
    """Also slices that jobs of lower bands leave."""
    HELD = "held"
    """Slices are held for the gang as well, until enough of them are idle."""

    @property
    def flag(self) -> str:
        """The option with this value."""
        return f"--take-back {self}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one provisioner.

    Attributes:
        owner: its name, in the label and in the names of its slices.
        configs: the types of its slices.
        sources: where they come from, the preferred one first.
        least: the smallest number of slices of each type that it keeps.
        most: the limit for slices of each type, failed ones that still use quota included; None: only the budget.
        idle_s: seconds after which an unneeded slice is deleted.
        max_wait_s: seconds after which a request that still waits is given up, if another source can be asked.
        budget: how many chips it asks for and holds at most, of all types and sources together; None: no limit.
        take_back: how far it goes to free chips for a gang.
    """

    owner: str
    configs: tuple[TPUConfig, ...]
    sources: tuple[Source, ...]
    least: int
    most: int | None
    idle_s: float
    max_wait_s: float = math.inf
    budget: int | None = None
    take_back: Reach = Reach.LOWER_BANDS

    def prefix(self, config: TPUConfig) -> str:
        return f"iris-{self.owner}-{config.name}-"

    def config_of(self, name: str) -> TPUConfig | None:
        """Return the type of the slice of this provisioner that has this name, or None."""
        return next((config for config in self.configs if name.startswith(self.prefix(config))), None)

    def holds(self, found: QueuedSlice) -> bool:
        """Return whether a slice counts towards the budget: a provisioner of this name has made it, of any type."""
        return found.labels.get(OWNER_LABEL) == self.owner and found.name.startswith(f"iris-{self.owner}-")

    def owns(self, found: QueuedSlice) -> bool:
        """Return whether this provisioner has made a slice."""
        return self.holds(found) and self.config_of(found.name) is not None

    def most_of(self, config: TPUConfig) -> int:
        """Return how many slices of a type it may hold at most."""
        by_budget = (self.budget or 0) // config.chip_count
        return min((one for one in (self.most, self.budget and by_budget) if one is not None), default=0)


@dataclass(slots=True)
class Holdings:
    """The requested and held chips and slices, by which limits are kept. Each chip counts once, whatever its slice's
    size.

    Attributes:
        chips: all chips, of all types and sources.
        of_source: the chips of each source, by its key.
        of_type: the slices of each type, by its name.
        kept: the chips that have been freed for jobs, or are being freed, by job id.
    """

    settings: Settings
    chips: int = 0
    of_source: Counter[str] = field(default_factory=Counter)
    of_type: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def of(settings: Settings, held: Iterable[QueuedSlice], unconfirmed: Mapping[str, Unconfirmed]) -> "Holdings":
        ledger = Holdings(settings)
        for one in held:
            config = settings.config_of(one.name)
            ledger._add(one.chips, one.source, config.name if config else "")
        for name, asked in unconfirmed.items():
            if (config := settings.config_of(name)) is not None:
                ledger._add(config.chip_count, asked.source, config.name)
        return ledger

    def copy(self) -> "Holdings":
        about = self.of_source.copy(), self.of_type.copy(), self.kept.copy()
        return Holdings(self.settings, self.chips, *about)

    def _add(self, chips: int, source: str, tpu_type: str, slices: int = 1) -> None:
        self.chips += chips
        self.of_source[source] += chips
        self.of_type[tpu_type] += slices

    def take(self, config: TPUConfig, source: Source, slices: int) -> None:
        """Count slices that are about to be requested."""
        self._add(config.chip_count * slices, source.key, config.name, slices)

    def set_aside(
        self, config: TPUConfig, source: Source, slices: int, job_id: str, freed: float, of_source: float
    ) -> None:
        """Count slices that are to be requested once some chips are free; those count until then.

        ``freed`` is the number of these chips, and ``of_source`` the number of those that are of the source.
        """
        chips = config.chip_count * slices
        self.chips += int(min(chips, max(0, chips - freed)))
        self.of_source[source.key] += int(min(chips, max(0, chips - of_source)))
        self.of_type[config.name] += slices
        self.kept[job_id] += chips

    def lack(self, config: TPUConfig, source: Source, slices: int) -> Lack:
        """Return the chips that slices of a source lack."""
        chips, budget = config.chip_count * slices, self.settings.budget
        in_source = -math.inf if source.chips is None else self.of_source[source.key] + chips - source.chips
        return Lack(source.key, in_source, -math.inf if budget is None else self.chips + chips - budget)

    def room(self, config: TPUConfig) -> int:
        """Return how many more slices of a type may be requested from all sources together."""
        rooms = []
        if self.settings.most is not None:
            rooms.append(self.settings.most - self.of_type[config.name])
        if self.settings.budget is not None:
            rooms.append((self.settings.budget - self.chips) // config.chip_count)
        return max(0, min(rooms, default=0))

    def room_at(self, config: TPUConfig, source: Source) -> float:
        """Return how many more slices of a type the source has chips for, as far as that is known."""
        if source.chips is None:
            return math.inf
        return max(0, (source.chips - self.of_source[source.key]) // config.chip_count)

    def limits(self, config: TPUConfig, slices: int) -> str:
        """Return which limit keeps a number of slices from being requested, and for which jobs chips are kept."""
        most, budget = self.settings.most, self.settings.budget
        if most is not None and self.of_type[config.name] + slices > most:
            return f"{self.of_type[config.name]} of at most {most} are asked for or held (--max)"
        kept = "".join(f"; {chips} chips are kept for {job_id}" for job_id, chips in self.kept.items())
        if budget is not None and self.chips + slices * config.chip_count > budget:
            each = config.chip_count
            return (
                f"{self.chips} of the budget of {budget} chips are asked for or held (--budget), and a slice has {each}"
                f"{kept}"
            )
        full = (s for s in self.settings.sources if s.chips is not None and self.room_at(config, s) < slices)
        of_sources = ", ".join(
            f"{self.of_source[s.key]} of the {s.chips} chips of {s} are asked for or held ({s.flag})" for s in full
        )
        return of_sources + kept
