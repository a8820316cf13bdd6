"""The events that change the state of the Controller; `iris_ray.state.ControllerState` takes them."""

from iris_ray.state.events import *  # noqa: F403
