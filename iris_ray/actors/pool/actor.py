"""The SlicePoolManager as a class for Ray. Processes that only have a handle of it do not import the pool."""

from iris_ray.actors.calls.thin_actors import actor_class
from iris_ray.actors.protocol.pool_interface import PoolInterface

SlicePoolManager = actor_class("iris_ray.actors.pool.slice_pool_manager:SlicePoolManager", PoolInterface, __name__)
