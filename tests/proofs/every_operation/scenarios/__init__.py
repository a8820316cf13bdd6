"""The scenarios, by name. Each is a function that imports what it needs and returns a `Scenario`."""

from collections.abc import Callable

from tests.proofs.every_operation.runs import Scenario
from tests.proofs.every_operation.scenarios.archive import archive
from tests.proofs.every_operation.scenarios.code import code
from tests.proofs.every_operation.scenarios.exec import exec_
from tests.proofs.every_operation.scenarios.exports import exports
from tests.proofs.every_operation.scenarios.history import history
from tests.proofs.every_operation.scenarios.provisioner import provisioner
from tests.proofs.every_operation.scenarios.records import records
from tests.proofs.every_operation.scenarios.secrets import secrets

SCENARIOS: dict[str, Callable[[], Scenario]] = {
    "archive": archive,
    "code": code,
    "exec": exec_,
    "exports": exports,
    "history": history,
    "provisioner": provisioner,
    "records": records,
    "secrets": secrets,
}
