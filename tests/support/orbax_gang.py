"""One process of a gang that saves, or restores, with one of Orbax's managers: `test_orbax_managers.py`.

    python -m tests.support.orbax_gang save|restore MANAGER PROCESS COORDINATOR LOCAL_DIRECTORY BUCKET

Four processes, two slices of two hosts. The state is spread over the hosts of a slice, and each slice has all of it.
Step 1 is saved to the bucket, too; step 2 only to the hosts. A process that restores prints the step that it got.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

PROCESSES, SLICES = 4, 2
IN_BUCKET, ON_HOSTS = 1, 2


def main(verb: str, kind: str, process: int, coordinator: str, local: str, bucket: str) -> None:
    flags.FLAGS(["orbax"])
    jax.distributed.initialize(coordinator, PROCESSES, process)
    import orbax.checkpoint as ocp
    from orbax.checkpoint import multihost

    multihost.initialize_runtime_to_distributed_ids()
    multihost.initialize_distributed_to_device_ids()
    mesh = Mesh(np.array(jax.devices()).reshape(SLICES, -1), ("slice", "host"))
    over_hosts = NamedSharding(mesh, PartitionSpec("host"))
    shape = (8, 4)

    def state_of(step: int) -> Any:
        return {"w": jax.make_array_from_callback(shape, over_hosts, lambda box: np.full(shape, step)[box])}

    state = state_of(0)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    manager, composite = MANAGERS[kind](mesh, like, Path(local), Path(bucket))
    if verb == "save":
        for step in (IN_BUCKET, ON_HOSTS):
            manager.save(step, args=composite(state=ocp.args.PyTreeSave(state_of(step))))
            manager.wait_until_finished()
    else:
        step = manager.latest_step()
        args = ocp.args.PyTreeRestore(like, restore_args=ocp.checkpoint_utils.construct_restore_args(like))
        restored = manager.restore(step, args=composite(state=args))
        tree = restored.get("state", restored)
        assert all((np.asarray(shard.data) == step).all() for shard in tree["w"].addressable_shards), tree
        print("restored", step, flush=True)
    manager.close()


def emergency(mesh: Mesh, like: Any, local: Path, bucket: Path) -> tuple[Any, Any]:
    import orbax.checkpoint as ocp
    from orbax.checkpoint.experimental.emergency import checkpoint_manager as emergency

    options = emergency.CheckpointManagerOptions(
        local=emergency.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        persistent=emergency.PersistentCheckpointOptions(should_save_fn=lambda step, _: step == IN_BUCKET),
    )
    return emergency.CheckpointManager(local, bucket, mesh, like, options=options), ocp.args.Composite


def p2p(mesh: Mesh, like: Any, local: Path, bucket: Path) -> tuple[Any, Any]:
    from orbax.checkpoint.experimental.emergency.p2p import args, checkpoint_manager, options

    given = options.CheckpointManagerOptions(
        local=options.LocalCheckpointOptions(save_interval_steps=1, max_to_keep=2),
        persistent=options.PersistentCheckpointOptions(save_interval_steps=100, save_interval_offset_steps=IN_BUCKET),
    )
    return checkpoint_manager.CheckpointManager(mesh, like, local, bucket, options=given), args.Composite


MANAGERS = {"emergency": emergency, "p2p": p2p}


if __name__ == "__main__":
    verb, kind, process, *rest = sys.argv[1:]
    main(verb, kind, int(process), *rest)
