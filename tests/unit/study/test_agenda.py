"""The virtual clock."""

import math

from iris_ray.study.agenda import Agenda


def test_due_work_runs_by_time_then_planning_order() -> None:
    agenda, done = Agenda(), list[tuple[float, str]]()

    def note(what: str) -> None:
        done.append((agenda.now, what))

    agenda.at(5.0, note, "third")
    agenda.at(2.0, note, "first")
    agenda.after(2.0, note, "second")
    agenda.at(9.0, note, "too late")
    agenda.at(math.inf, note, "never")
    agenda.run_until(8.0)
    assert done == [(2.0, "first"), (2.0, "second"), (5.0, "third")]
    assert (agenda.now, agenda.next_at) == (8.0, 9.0)


def test_work_planned_meanwhile_runs_and_never_in_the_past() -> None:
    agenda, done = Agenda(), list[float]()

    def plan_more() -> None:
        agenda.after(1.0, lambda: done.append(agenda.now))
        agenda.at(0.0, lambda: done.append(agenda.now))

    agenda.at(3.0, plan_more)
    agenda.run_until(10.0)
    assert done == [3.0, 4.0]
    assert agenda.next_at == math.inf
