"""Finds events by comparing rows of jobs and slices before and after a change."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from iris_ray.dashboard.rows import Row

_CONDITIONS = {
    "lost": "gone",
    "suspected": "may be lost",
    "draining": "to go",
    "quarantined": "in quarantine",
    "closed": "closed",
}
"""The conditions of hosts that are worth an event, in words."""
_FINE = "fine again"


@dataclass(frozen=True, slots=True)
class Happening:
    """One event.

    Attributes:
        kind: "submitted", "started", "restarted", "ended", "eviction" or "host".
        level: "good", "bad", "notice" or "plain".
        job, slice, user: its subjects, or None.
    """

    kind: str
    level: str
    text: str
    job: str | None = None
    slice: str | None = None
    user: str | None = None


def of_job(before: Row | None, now: Row) -> Iterator[Happening]:
    """Yield the events of a job; none of a spare, which people do not see as a job."""
    if now["spare_for"]:
        return
    about = {"job": now["id"], "user": now["user"]}
    if before is None:
        yield Happening("submitted", "plain", f"submitted by {now['user']}", **about)
        before = {"state": "pending", "attempt": 0, "gives_way": None, "over": False}
    runs_anew = now["attempt"] > before["attempt"]
    if now["over"] and not before["over"]:
        yield _job_ended(now, about)
    elif before["state"] != "pending" and (now["state"] == "pending" or runs_anew):
        yield _attempt_ended(before, now, about)
    if now["state"] == "running" and (before["state"] != "running" or runs_anew):
        yield _started(now, about)
    if now["gives_way"] and not before["gives_way"]:
        yield Happening("eviction", "notice", f"its hosts are to go: {now['gives_way']['to']}", **about)


def of_slice(before: Row | None, now: Row | None) -> Iterator[Happening]:
    """Yield the events of a slice's hosts: one event for all hosts that have changed alike."""
    had = {host[0]: host[1] for host in before["hosts"]} if before else {}
    if now is None:
        assert before is not None
        yield Happening("host", "bad", f"all its hosts are gone ({len(had)})", slice=before["name"])
        return
    changed: dict[tuple[str, str | None], list[str]] = {}
    for number, condition, _, why, _, _ in now["hosts"]:
        if had.get(number, condition) != condition:
            if condition in _CONDITIONS:
                changed.setdefault((_CONDITIONS[condition], None if condition == "lost" else why), []).append(
                    str(number)
                )
            elif had[number] in _CONDITIONS:
                changed.setdefault((_FINE, None), []).append(str(number))
    if before is None:
        yield Happening("host", "plain", f"came, with {len(now['hosts'])} hosts", slice=now["name"])
    for (what, why), numbers in changed.items():
        yield _of_hosts(now["name"], what, why, numbers)


def _job_ended(now: Row, about: Mapping[str, str]) -> Happening:
    good = now["state"] == "succeeded"
    why = f": {_first_line(now['error'])}" if now["error"] and not good else ""
    return Happening("ended", "good" if good else "bad", f"{now['state'].replace('_', ' ')}{why}", **about)


def _started(now: Row, about: Mapping[str, str]) -> Happening:
    where = ", ".join(now["groups"][:4]) + (", …" if now["groups"][4:] else "")
    text = f"attempt {now['attempt']} runs" + (f" on {where}" if where else "")
    return Happening("started", "good", text, **about)


def _attempt_ended(before: Row, now: Row, about: Mapping[str, str]) -> Happening:
    why = f": {_first_line(now['error'])}" if now["error"] else ""
    counts = {"was preempted": "preemptions", "failed": "failures", "was evicted": "evictions"}
    how = next((how for how, name in counts.items() if now[name] > before.get(name, 0)), "ended")
    return Happening("restarted", "bad", f"attempt {before['attempt']} {how}, another one follows{why}", **about)


def _of_hosts(name: str, what: str, why: str | None, numbers: list[str]) -> Happening:
    which = f"host {numbers[0]}" if len(numbers) == 1 else f"hosts {', '.join(numbers)}"
    level = "good" if what == _FINE else "bad" if what == _CONDITIONS["lost"] else "notice"
    return Happening("host", level, f"{which} {what}" + (f": {why}" if why else ""), slice=name)


def as_row(happening: Happening, number: int, at: float) -> Mapping[str, object]:
    return {"number": number, "at": at, **{name: getattr(happening, name) for name in Happening.__slots__}}


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
