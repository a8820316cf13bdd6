"""What a Controller has written of its jobs: only what has changed, as its journal does."""

from dataclasses import dataclass, field

from iris_ray.state import ControllerState
from iris_ray.state.record_check import require_whole
from iris_ray.state.records import JobRecord

Part = tuple[str, int | None]
"""Job id, and the number of a chunk; None for the head."""


def changed_parts(state: ControllerState) -> dict[Part, bytes | None]:
    """Return what is to be written now; None is to be deleted. The state takes it for written."""
    parts: dict[Part, bytes | None] = {}
    for job_id, chunks in state.unrecorded.items():
        record = state.record(job_id)
        parts[job_id, None] = None if record is None else record.head()
        found = dict.fromkeys(chunks) if record is None else dict(record.chunks(chunks))
        parts |= {(job_id, number): chunk for number, chunk in found.items()}
    state.unrecorded.clear()
    return parts


@dataclass
class Recorded:
    """The values that were written so far."""

    parts: dict[Part, bytes] = field(default_factory=dict)

    def write(self, part: Part, value: bytes | None) -> None:
        if value is None:
            self.parts.pop(part, None)
        else:
            self.parts[part] = value

    def write_all(self, state: ControllerState) -> None:
        """Write what has changed."""
        for part, value in changed_parts(state).items():
            self.write(part, value)

    def records(self) -> list[JobRecord]:
        """Return what a successor reads, the oldest job first."""
        found = []
        for (job_id, number), head in self.parts.items():
            if number is None:
                chunks = {n: value for (of, n), value in self.parts.items() if of == job_id and n is not None}
                found.append(require_whole(JobRecord.joined(head, [chunks[n] for n in sorted(chunks)]), job_id))
        return sorted(found, key=lambda record: record.job.number)
