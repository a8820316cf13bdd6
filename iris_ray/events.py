"""The events of the controller's state, under their public name."""

from iris_ray.state.events import *  # noqa: F403
