"""When jobs may take hosts from lower bands, as the head node's environment says."""

import logging
import math
from collections.abc import Mapping

from iris_ray.scheduler.victims import GRACE_S, EvictionRules

logger = logging.getLogger(__name__)

EVICTIONS, GRACE = "IRIS_RAY_EVICTIONS", "IRIS_RAY_EVICTION_GRACE_S"


def eviction_rules(environment: Mapping[str, str]) -> EvictionRules | None:
    """Return when jobs may take hosts from lower bands, by the variables of the head node; None: never."""
    if environment.get(EVICTIONS, "1") == "0":
        return None
    try:
        grace_s = float(environment.get(GRACE, GRACE_S))
    except ValueError:
        grace_s = -1.0
    if 0.0 <= grace_s < math.inf:
        return EvictionRules(grace_s)
    logger.warning("%s is %r, not a number of seconds; %g is used", GRACE, environment.get(GRACE), GRACE_S)
    return EvictionRules()
