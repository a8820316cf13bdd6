"""The hosts that a gang has found to have another version: it tries others, and ends once there are none."""

import time

from iris_ray.actors.pool.attempt_place import AttemptPlace
from iris_ray.actors.pool.launch import BrokenSlices, LaunchFailed, NoVersionFits, OtherVersions
from iris_ray.state.quarantine import AVOIDED_S


class Misfits:
    """The hosts on which launches of a gang have found an iris_ray that does not go with this one.

    The Controller lets the job avoid them for `AVOIDED_S`. If it gives one to the gang nevertheless, the other hosts
    are too few for the job. If all launches have failed for this reason, none of the hosts fits.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}  # by node id
        self._launches = 0
        self._avoided_until = 0.0  # by the monotonic clock
        self._others_may_fit = False

    def note(self, failure: LaunchFailed) -> bool:
        """Note a failed launch. Return False if it only shows the version of hosts that were not known."""
        if not isinstance(failure, OtherVersions):
            self._others_may_fit = True
            return True
        known = self._known
        self._reasons = known | dict(failure.misfits)
        self._launches = self._launches + 1 if known else 1
        self._avoided_until = time.monotonic() + AVOIDED_S
        return failure.misfits.keys() <= known.keys()

    def require_others(self, place: AttemptPlace) -> None:
        """Check the hosts of an order before anything is started there.

        Raises:
            NoVersionFits: some are known to have another version, and all that the job could get instead have, too.
        """
        known = self._known
        misfits = {h.node_id: known[h.node_id] for hosts in place.order.slices for h in hosts if h.node_id in known}
        if not misfits or self._others_may_fit:
            return
        reason = "; ".join(dict.fromkeys(misfits.values()))
        if self._launches > 1:
            reason += f" (it was tried in {self._launches} places, and none has a version that fits)"
        names = dict.fromkeys(h.slice_name for hosts in place.order.slices for h in hosts if h.node_id in misfits)
        raise NoVersionFits(reason, BrokenSlices(tuple(names)), misfits)

    @property
    def _known(self) -> dict[str, str]:
        return self._reasons if time.monotonic() < self._avoided_until else {}
