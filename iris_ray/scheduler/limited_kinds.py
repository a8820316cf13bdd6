"""Leaves jobs that wait for a limit out of plans until the usage that counts towards it changes.

In a crowded cluster, most jobs wait for their user's limit or their team's quota. Their turn would have the same result
as before, because it depends only on the jobs of an account and not on the hosts. A plan therefore considers only the
accounts that have changed, and the jobs that wait for hosts.
"""

from collections.abc import Iterable, Mapping

from iris_ray.model.job_spec import JobSpec
from iris_ray.model.jobs import Kind
from iris_ray.model.options import PriorityBand
from iris_ray.scheduler.pending_reason import LimitAccount
from iris_ray.scheduler.reasons import Reasons
from iris_ray.state import ControllerState
from iris_ray.state.waiting_jobs import WaitingJobs


class LimitedKinds:
    """The kinds of plain jobs that plans can leave out.

    These kinds reached a limit in an earlier plan, and no victims could bring them within it. Since then no job that
    counts towards that limit has changed or been considered. If the teams, the limits or the size of the cluster
    change, all kinds are considered again; also from time to time, since time alone may change a reason.

    Attributes:
        reasons: the pending reasons of the jobs that are left out.
    """

    def __init__(self, state: ControllerState) -> None:
        self.reasons = Reasons()
        self._state = state
        self._kinds: dict[LimitAccount, dict[Kind, None]] = {}
        self._left_out: set[Kind] = set()
        self._accounts: dict[tuple[str, PriorityBand, str, str | None], tuple[LimitAccount, ...]] = {}
        self._changes_seen = 0
        self._valid_for: object = None

    def rest(self) -> WaitingJobs:
        """Return the waiting jobs that are not left out."""
        return self._state.pending().without(self._left_out)

    def release_changed(self, reasons: Reasons) -> None:
        """Stop leaving out jobs whose limits are affected by changes, and add their reasons to ``reasons``."""
        if not self._left_out:
            return
        changed = self._state.changed_specs.since(self._changes_seen)
        if changed is None or self._valid_for != self._conditions():
            self.release_all(reasons)
            return
        rest = self.rest()
        firsts = (next(iter(jobs.values())) for jobs in rest.by_kind.values())
        others = (one for job in rest.others.values() for one in job.members or (job,))
        looked_at = (job.spec for jobs in (others, firsts) for job in jobs)
        accounts = (account for specs in (changed, looked_at) for spec in specs for account in self._of(spec))
        self._release(accounts, reasons)

    def release_all(self, reasons: Reasons) -> None:
        """Stop leaving out any jobs, and add their reasons to ``reasons``."""
        for kind in self._left_out:
            reasons.take(self.reasons, kind)
        self._kinds.clear()
        self._left_out.clear()
        self._accounts.clear()

    def add(self, limited: Mapping[Kind, tuple[LimitAccount, ...]], reasons: Reasons) -> None:
        """Leave out the jobs of some kinds from now on, and take their reasons from ``reasons``.

        ``limited`` has the kinds, with the accounts that determine whether their jobs are within their limits.
        """
        for kind, accounts in limited.items():
            self._left_out.add(kind)
            for account in accounts:
                self._kinds.setdefault(account, {})[kind] = None
            self.reasons.take(reasons, kind)

    def planned(self) -> None:
        """Record that the plan is committed. Its own changes don't bring any other job within its limits."""
        self._changes_seen = self._state.changed_specs.version
        conditions = self._conditions()
        if conditions != self._valid_for:
            self._valid_for = conditions
            self._accounts.clear()  # the teams may differ

    def _release(self, accounts: Iterable[LimitAccount], reasons: Reasons) -> None:
        """Stop leaving out the kinds of some accounts, and, in turn, the kinds whose limits these affect."""
        left = {account for account in accounts if account in self._kinds}
        waiting = self._state.pending().by_kind
        while left:
            for kind in self._kinds.pop(left.pop()):
                reasons.take(self.reasons, kind)
                self._left_out.discard(kind)
                for job in waiting.get(kind, {}).values():
                    left.update(account for account in self._of(job.spec) if account in self._kinds)
                    break

    def _of(self, spec: JobSpec) -> tuple[LimitAccount, ...]:
        """Return the accounts towards which a job counts."""
        teams = self._state.teams
        key = spec.user, spec.priority, spec.team, teams.kind(spec) if teams.teams.types else None
        accounts = self._accounts.get(key)
        if accounts is None:
            of_teams = () if key[-1] is None else tuple((name, key[-1]) for name in teams.path(spec.team))
            accounts = self._accounts[key] = ((spec.user, spec.priority), *of_teams)
        return accounts

    def _conditions(self) -> object:
        """Return everything except the jobs on which limits depend."""
        state = self._state
        return state.teams.version, state.limits.version, dict(state.fleet.totals), dict(state.fleet.chips)
