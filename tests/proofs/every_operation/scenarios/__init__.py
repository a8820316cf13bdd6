"""The scenarios, by name. Each is a function that imports what it needs and returns a `Scenario`."""

from collections.abc import Callable
from importlib.util import find_spec

from tests.proofs.every_operation.runs import Scenario
from tests.proofs.every_operation.scenarios.archive import archive
from tests.proofs.every_operation.scenarios.checkpoints import checkpoints
from tests.proofs.every_operation.scenarios.code import code
from tests.proofs.every_operation.scenarios.docker import docker
from tests.proofs.every_operation.scenarios.exec import exec_
from tests.proofs.every_operation.scenarios.exports import exports
from tests.proofs.every_operation.scenarios.gke import gke
from tests.proofs.every_operation.scenarios.held import held
from tests.proofs.every_operation.scenarios.history import history
from tests.proofs.every_operation.scenarios.models import models
from tests.proofs.every_operation.scenarios.parquet import parquet
from tests.proofs.every_operation.scenarios.port import port
from tests.proofs.every_operation.scenarios.provisioner import provisioner
from tests.proofs.every_operation.scenarios.records import records
from tests.proofs.every_operation.scenarios.secrets import secrets
from tests.proofs.every_operation.scenarios.serving import serving
from tests.proofs.every_operation.scenarios.tunnel import tunnel

SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "archive": archive,
    "checkpoints": checkpoints,
    "code": code,
    "docker": docker,
    "exec": exec_,
    "exports": exports,
    "gke": gke,
    "held": held,
    "history": history,
    "models": models,
    "port": port,
    "provisioner": provisioner,
    "records": records,
    "secrets": secrets,
    "serving": serving,
    "tunnel": tunnel,
}
if find_spec("pyarrow") is not None:
    SCENARIOS["parquet"] = parquet
