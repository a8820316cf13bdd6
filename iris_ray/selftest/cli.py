"""``iris-ray cluster selftest``: tries with real jobs whether TPU slices meet the needs of iris_ray."""

import contextlib
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from iris_ray.cli.address import cluster, node_address_option
from iris_ray.cli.conventions import FAILED
from iris_ray.cli.options import tpu_option
from iris_ray.cli.output import json_option
from iris_ray.cli.printing import Finding, Level, counted, one_line, print_finding, print_json
from iris_ray.cli.times import Duration
from iris_ray.errors import TaskCrashedError
from iris_ray.model.options import EACH_SLICE, WHOLE_JOB
from iris_ray.model.parts import hosts_of_shape, shapes_of
from iris_ray.model.topology import TPUConfig, get_tpu_config
from iris_ray.selftest import task as on_host

KEEP_WARM_S = 120.0
"""Slices stay reserved from one step to the next."""
_SIMULATE = "gcloud compute tpus tpu-vm simulate-maintenance-event NODE --zone ZONE"


_NEEDS_TPU = "on TPU hosts: pip install 'jax[tpu]', and leave JAX_PLATFORMS unset"


class NotAsExpected(Exception):
    """A job ran, and something about it is wrong."""


@click.command()
@tpu_option(required=True)
@click.option("--num-slices", "slices", type=click.IntRange(1), default=1, show_default=True, metavar="N",
              help="2 or more also tries a program across slices.")  # fmt: skip
@click.option("--await-notice", type=Duration(), default="0",
              help="Wait this long for a notice from Google, while you have one sent.")  # fmt: skip
@click.option("--timeout", type=Duration(above=True), default="10m", show_default=True,
              help="How long each job of a step may wait for its slices.")  # fmt: skip
@json_option(list[Finding])
@node_address_option
def selftest(tpu_type: str, slices: int, await_notice: float, timeout: float, as_json: bool) -> None:
    """Test iris_ray on real TPU slices, and report what was found. This takes some minutes.

    \b
      iris-ray cluster selftest --tpu v4-8
      iris-ray cluster selftest --tpu v5litepod-16 --num-slices 2
      iris-ray cluster selftest --tpu v4-8 --await-notice 10m

    Small jobs start on the slices, see their chips with JAX, start again on warm slices, compute the same on all chips,
    crash, go on from a state in memory, leave processes behind, and run side by side on parts of a slice if its type
    has parts. Each step reports its finding and its time; if the first one finds an ERROR, the others are left out. The
    exit code is 1 if one found an ERROR. If something is wrong, send us the output with --json. Apart from error
    messages and the reason of a notice, it has only versions, names of slices, kinds, numbers and shapes of chips and
    tasks, sizes and times.
    """
    config = get_tpu_config(tpu_type)
    findings = []
    with cluster(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():  # Ray prints there
        for finding in SelfTest(config, slices, timeout).run(await_notice):
            findings.append(finding)
            if not as_json:
                print_finding(finding)
    if as_json:
        print_json(findings)
    if any(finding.level is Level.ERROR for finding in findings):
        raise click.exceptions.Exit(FAILED)


class SelfTest:
    """The steps, one after another.

    Args:
        config: the type of the slices.
        slices: how many.
        timeout_s: how long a step may wait for its slices; seconds.
    """

    def __init__(self, config: TPUConfig, slices: int, timeout_s: float) -> None:
        self._config = config
        self._slices = slices
        self._timeout_s = timeout_s

    def run(self, await_notice_s: float) -> Iterator[Finding]:
        """Yield the finding of each step. If the first is an error, the others would fail as well, and are left out."""
        start = self._step("start", self._start)
        yield start
        if start.level is not Level.ERROR:
            yield self._step("chips", self._chips)
            yield self._step("warm start", self._chips)
            yield self._step("same results", self._replay)
            yield self._step("crash", self._crash)
            yield self._step("recovery", self._recovery)
            yield self._step("processes left behind", self._daemons)
            if shapes := shapes_of(self._config):
                yield self._step("parts", functools.partial(self._parts, shapes[-1]))
            if self._slices > 1:
                yield self._step("across slices", functools.partial(self._chips, self._slices))
            if await_notice_s:
                yield self._step("notice", functools.partial(self._notice, await_notice_s))
        from iris_ray.client.run_on_pod import release

        release()

    def _step(self, name: str, action: Callable[[], Finding]) -> Finding:
        began = time.monotonic()
        try:
            found = action()
        except Exception as error:
            found = Finding(Level.ERROR, name, one_line(error), "iris-ray doctor examines the hosts")
        return Finding(found.level, name, f"{found.found}; {time.monotonic() - began:.1f} s", found.advice)

    def _job(
        self, function: Callable[[], Any], slices: int = 1, crashes: int = 0, topology: str | None = None
    ) -> list[Any]:
        from iris_ray.client.run_on_pod import run_on_pod

        return run_on_pod(
            function,
            self._config.name,
            num_slices=slices,
            max_retries_failure=crashes,
            scheduling_timeout=self._timeout_s,
            keep_warm=KEEP_WARM_S,
            topology=topology,
            failure_domain=WHOLE_JOB if topology is None else EACH_SLICE,
            mode="cluster",
        )

    def _start(self) -> Finding:
        hosts = self._job(on_host.facts)
        packages = {f"{name} {version}" for host in hosts for name, version in host["packages"].items()}
        systems = {f"Python {host['python']}, Linux {host['kernel']}" for host in hosts}
        where = f"{counted(len(hosts), 'task')} on {hosts[0]['slice']}"
        found = f"{where}; {', '.join(sorted(packages))}; {'; '.join(sorted(systems))}"
        mixed = [name for name in on_host.PACKAGES if len({host["packages"].get(name) for host in hosts}) > 1]
        if mixed or len(systems) > 1:
            return Finding(Level.WARNING, "", found, "the hosts differ; give all hosts one image")
        return Finding(Level.OK, "", found)

    def _chips(self, slices: int = 1) -> Finding:
        seen = self._job(on_host.devices, slices)
        first = seen[0]
        _expect("processes that joined", first["processes"], len(seen))
        _expect("a sum of ones over all devices", first["sum"], first["devices"])
        if any(host["devices"] != first["devices"] for host in seen):
            raise NotAsExpected(f"tasks see different numbers of devices: {_counts(seen, 'devices')}")
        found = f"{counted(first['devices'], 'device')} ({first['kind']}) of {counted(len(seen), 'task')}"
        if first["platform"] != "tpu":
            return Finding(Level.WARNING, "", f"{found}, but JAX runs on {first['platform']}", _NEEDS_TPU)
        _expect("devices", first["devices"], slices * self._config.chip_count * self._config.devices_per_chip)
        _expect("MEGASCALE_NUM_SLICES", first["megascale_slices"], slices)
        return Finding(Level.OK, "", found)

    def _replay(self) -> Finding:
        agrees, words = self._job(on_host.replay, self._slices)[0]
        if not agrees:
            return Finding(Level.ERROR, "", words, "drain that host: iris-ray host drain HOST; and tell your provider")
        return Finding(Level.OK, "", words)

    def _crash(self) -> Finding:
        try:
            self._job(on_host.crash)
        except TaskCrashedError as error:
            if "code 3" not in str(error):
                raise NotAsExpected(f"a task that ended with code 3 was called: {one_line(error)}") from None
            return Finding(Level.OK, "", "a task that ends with code 3 is called a crash, with its code")
        raise NotAsExpected("a task that ended with code 3 counts as a success")

    def _recovery(self) -> Finding:
        hosts = self._job(_recover, crashes=1)
        seen = {name: max(host[name] for host in hosts) for name in hosts[0]}
        found = (
            f"{seen['away']:.1f} s from a crash to the next step: {seen['restoring']:.1f} for {seen['mb']:.0f} MB"
            f" a host from memory, {seen['compiling']:.1f} for what took {seen['compiled']:.1f} to compile at first; a"
            f" save holds the program up for {seen['saved']:.2f} s"
        )
        return Finding(Level.OK, "", found)

    def _daemons(self) -> Finding:
        seconds = str(random.uniform(300, 400))
        self._job(functools.partial(on_host.leave_a_daemon, seconds))
        left = sum(self._job(functools.partial(on_host.daemons, seconds)))
        _expect("processes that tasks have left behind", left, 0)
        return Finding(Level.OK, "", "processes that a task leaves behind end with it")

    def _parts(self, shape: str) -> Finding:
        """Run a JAX program on each part of this shape at the same time."""
        hosts = hosts_of_shape(shape)
        parts = self._config.vm_count // hosts
        seen = self._job(on_host.devices, parts, topology=shape)
        for host in seen:
            _expect("processes that joined on a part", host["processes"], hosts)
            _expect("a sum of ones over all devices of a part", host["sum"], host["devices"])
        found = f"{parts} programs on parts of {shape} chips side by side, each on {counted(hosts, 'host')}"
        if seen[0]["platform"] != "tpu":
            return Finding(Level.WARNING, "", f"{found}, but JAX runs on {seen[0]['platform']}", _NEEDS_TPU)
        each = hosts * self._config.chips_per_vm * self._config.devices_per_chip
        for host in seen:
            _expect("devices of a part", host["devices"], each)
        return Finding(Level.OK, "", found)

    def _notice(self, seconds: float) -> Finding:
        click.echo(f"iris_ray: waiting {seconds:g} s for a notice; have one sent, for example: {_SIMULATE}", err=True)
        heard = self._job(functools.partial(on_host.await_notice, seconds), self._slices)
        notices = [notice for notice in heard if notice]
        if not notices:
            return Finding(Level.WARNING, "", f"none came in {seconds:g} s", f"have one sent: {_SIMULATE}")
        kind, reason, left = notices[0]
        return Finding(Level.OK, "", f"{counted(len(notices), 'task')} heard of a {kind}, {left:.0f} s ahead: {reason}")


def _recover() -> dict[str, float]:
    from iris_ray.checkpoint.selftest import recovery  # imports JAX, which this machine may lack

    return recovery()


def _expect(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise NotAsExpected(f"{what}: {found}, expected {expected}")


def _counts(hosts: Sequence[dict[str, Any]], what: str) -> str:
    times = Counter(host[what] for host in hosts)
    return ", ".join(f"{number} in {counted(tasks, 'task')}" for number, tasks in times.items())
