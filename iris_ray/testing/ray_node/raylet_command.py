"""Rewrites the command lines of Ray's processes."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray._raylet import (  # type: ignore[attr-defined]
    DASHBOARD_AGENT_LISTEN_PORT_NAME,
    METRICS_AGENT_PORT_NAME,
    METRICS_EXPORT_PORT_NAME,
    RUNTIME_ENV_AGENT_PORT_NAME,
    get_port_filename,
)

from iris_ray.testing.machine import script_command

_NOT_IN_USE = -1  # how Ray's agents themselves report a service that they do not offer


def without_agents(command: Sequence[str], session_dir: Path, address: str) -> list[str]:
    """Return a raylet's command line without its dashboard agent, and with a runtime_env agent that starts on demand.

    Side effect: this writes the port files of the dashboard agent, which the raylet reads.
    """
    node_id = flag(command, "node_id")
    for name in (METRICS_AGENT_PORT_NAME, METRICS_EXPORT_PORT_NAME, DASHBOARD_AGENT_LISTEN_PORT_NAME):
        (session_dir / get_port_filename(node_id, name)).write_text(str(_NOT_IN_USE))
    port_file = session_dir / get_port_filename(node_id, RUNTIME_ENV_AGENT_PORT_NAME)
    agent = shlex.split(flag(command, "runtime_env_agent_command"))
    script = next(i for i, argument in enumerate(agent) if argument.endswith(".py"))
    lazy = [
        *script_command("lazy_agent.py"),
        "wait",
        address,
        str(port_file),
        *agent[:script],
        "--",
        *agent[script:],
    ]
    replaced = {
        # Through a shell, because the raylet adds arguments of its own.
        "dashboard_agent_command": subprocess.list2cmdline(["/bin/sh", "-c", "exec sleep infinity"]),
        "runtime_env_agent_command": subprocess.list2cmdline(lazy),
        "num_prestart_python_workers": "0",
    }
    return [replace_flag(argument, replaced) for argument in command]


def flag(command: Sequence[str], name: str) -> str:
    """Return the value of ``--name=value`` in a command line."""
    prefix = f"--{name}="
    return next(argument.removeprefix(prefix) for argument in command if argument.startswith(prefix))


def replace_flag(argument: str, values: Mapping[str, str]) -> str:
    """Return ``--name=value`` with the value that ``values`` has for it, or the argument as it is."""
    name, equals, _ = argument.partition("=")
    value = values.get(name.removeprefix("--"))
    return argument if not equals or value is None else f"{name}={value}"
