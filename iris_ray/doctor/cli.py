"""``iris-ray doctor``: what is wrong here, in the cluster and on its hosts, and what to do."""

import os
from collections import defaultdict
from collections.abc import Iterator

import click

from iris_ray.actors.calls.controller_connection import ControllerConnection, find_controller
from iris_ray.actors.host.chips import host_devices
from iris_ray.actors.protocol.controller_interface import ControllerInterface
from iris_ray.cli.address import address_option, chosen_address, cluster, head_of_dashboard, words_for_head
from iris_ray.cli.controller import in_words
from iris_ray.cli.conventions import FAILED, NO_CLUSTER, on_a_terminal
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import Finding, Level, counted, print_finding, print_json
from iris_ray.client.connection import AUTO, host_and_port
from iris_ray.doctor.cluster import (
    check_about,
    check_controller,
    check_controllers_code,
    check_hosts,
    check_quarantine,
)
from iris_ray.doctor.host_look import versions
from iris_ray.doctor.hosts import ask_head, ask_hosts, check_answers, check_gcs, claimed_nodes, tpu_hosts
from iris_ray.doctor.machine import (
    check_chips,
    check_credentials,
    check_metadata,
    check_ports,
    check_user,
    check_versions,
    ephemeral_ports,
)
from iris_ray.errors import ControllerUnavailableError, IrisError, VersionMismatchError


@click.command()
@json_option(list[Finding])
@address_option
def doctor(as_json: bool) -> None:
    """Check this machine, the cluster and each of its TPU hosts; say what to do.

    On this machine: versions, user, ports, metadata server, credentials, chips. In the cluster: labels, slices, closed
    hosts, the Controller and its services, the memory of Ray's GCS, the cleaning of disks. On every TPU host that Ray
    is not draining, all at once and for half a minute at most: which processes hold its chips although no Ray task has
    claimed them, libtpu's lock file, disks, locked memory, the metadata server, versions. Hosts that do not answer are
    named.

    The exit code is 1 if a finding is an ERROR, 3 without a cluster. This command changes nothing. With the URL of a
    dashboard, the head runs it, and "this machine" is the head.

    \b
      iris-ray doctor
      iris-ray doctor --json | jq '.[] | select(.level == "WARNING")'
    """
    if (head := head_of_dashboard()) is not None:
        head.run(words_for_head())
    if chosen_address() != AUTO:
        host_and_port(chosen_address())  # refuses a malformed address before it examines anything
    findings = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print_finding(finding)
    if as_json:
        print_json(findings)
    errors = [finding.check for finding in findings if finding.level is Level.ERROR]
    if "cluster" in errors:
        raise click.exceptions.Exit(NO_CLUSTER)
    if errors:
        raise click.exceptions.Exit(FAILED)


def examine() -> Iterator[Finding]:
    """Yield all findings, as they come."""
    from iris_ray.client.connection import current_user

    yield check_versions()
    yield check_user(os.environ, current_user())
    yield check_ports(ephemeral_ports())
    yield check_metadata(os.environ)
    yield check_credentials(os.environ)
    yield check_chips(host_devices())
    try:
        with cluster():
            yield from _examine_cluster()
    except IrisError as error:
        yield Finding(Level.ERROR, "cluster", str(error))


def _examine_cluster() -> Iterator[Finding]:
    import ray

    from iris_ray.actors.controller.node_table import NodeTable

    table = NodeTable.read()
    alive = sum(1 for node in table.nodes if node["Alive"])
    address = chosen_address() if chosen_address() != AUTO else ray.get_runtime_context().gcs_address
    found = f"{address} answers: {alive} nodes; its Ray and Python are the same as here"  # Ray refuses others
    yield Finding(Level.OK, "cluster", found)
    yield check_gcs(ask_head())
    yield from check_hosts(table, reserved_chips())
    hosts = tpu_hosts(table)
    if hosts and on_a_terminal():
        click.echo(f"{'':9}looking at {counted(len(hosts), 'TPU host')} ...", err=True)
    answers = ask_hosts(hosts)
    claimed = claimed_nodes(table) | claimed_nodes(NodeTable.read())  # a job may have come or gone meanwhile
    yield from check_answers(answers, claimed, versions())
    try:
        yield from _examine_controller()
    except VersionMismatchError as error:
        yield Finding(Level.ERROR, "Controller", str(error))
    except ControllerUnavailableError as error:
        advice = "if it stays so: iris-ray cluster controller stop, then the same with start; running jobs continue"
        yield Finding(Level.ERROR, "Controller", str(error), advice)


def _examine_controller() -> Iterator[Finding]:
    from iris_ray.actors.controller import bootstrap  # imports Ray

    if find_controller() is None:
        yield check_controller(None, "", 0)
        return
    controller = ControllerConnection()
    about = controller.ask(ControllerInterface.about)
    workers = controller.ask_all(ControllerInterface.list_workers)
    yield check_controller(about, in_words(about), len(workers))
    yield check_controllers_code(about, bootstrap.installed_on_head())
    yield from check_quarantine(workers)
    yield from check_about(about)


def reserved_chips() -> dict[str, float]:
    """Return how many chips of each node iris_ray has reserved, by node id; the names of placement groups tell."""
    from ray.util.placement_group import placement_group_table

    from iris_ray.actors.calls.names import PLACEMENT_GROUP_PREFIX

    chips: defaultdict[str, float] = defaultdict(float)
    for group in placement_group_table().values():
        if group["name"].startswith(PLACEMENT_GROUP_PREFIX) and group["state"] == "CREATED":
            for index, node_id in group["bundles_to_node_id"].items():
                chips[node_id] += group["bundles"][index].get("TPU", 0.0)
    return chips
