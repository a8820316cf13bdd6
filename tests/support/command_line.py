"""``iris-ray`` for tests: in this process, and as people run it, on a cluster."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import jsonschema
import pytest
from click.testing import CliRunner, Result

from iris_ray.cli.conventions import FAILED, OK
from iris_ray.cli.main import every_command, main
from iris_ray.cli.output import JsonOption
from tools.json_page import schema_of

if TYPE_CHECKING:
    from iris_ray.testing import SimulatedCluster

REPOSITORY = Path(__file__).parents[2]


COMMANDS = dict(every_command())
"""Every command of ``iris-ray``, as it is typed: "ls", "job", "job ls"."""
Done = subprocess.CompletedProcess[str]


def invoke(*arguments: str, input: bytes | None = None, **environment: str | None) -> Result:
    done = CliRunner().invoke(main, list(arguments), input=input, env=environment)
    if done.exit_code == OK:
        require_documented_json(arguments, done.stdout)
    return done


def require_documented_json(arguments: Sequence[str], stdout: str) -> None:
    """Fail if a command's JSON is not what docs/json-output.md says of it."""
    words = [" ".join(arguments[:count]) for count in (3, 2, 1)]
    options = next((COMMANDS[path].params for path in words if path in COMMANDS), [])
    option = next((one for one in options if isinstance(one, JsonOption)), None)
    if option is None or "--json" not in arguments or not {"-h", "--help"}.isdisjoint(arguments):
        return
    values = [json.loads(stdout)] if stdout.startswith(("{\n", "[", "{}")) else map(json.loads, stdout.splitlines())
    for value in values:
        jsonschema.validate(value, schema_of(option))


def address_of_nobody() -> str:
    """An address at which nothing answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return f"127.0.0.2:{probe.getsockname()[1]}"


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "iris_ray", *arguments]


def environment(cluster: "SimulatedCluster", user: str = "ann") -> dict[str, str]:
    return {**os.environ, "RAY_ADDRESS": cluster.address, "PYTHONPATH": str(REPOSITORY), "IRIS_USER": user}


def iris(cluster: "SimulatedCluster", *arguments: str, code: int = OK, user: str = "ann") -> Done:
    """Its end; fails if that is not the one that was expected, or if bad usage takes more than a line to tell."""
    done = subprocess.run(
        command_line(*arguments), capture_output=True, text=True, timeout=120, env=environment(cluster, user)
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert code in (OK, FAILED) or done.stderr.count("\n") == 1, done.stderr
    if code == OK:
        require_documented_json(arguments, done.stdout)
    return done


def iris_json(cluster: "SimulatedCluster", *arguments: str) -> Any:
    return json.loads(iris(cluster, *arguments, "--json").stdout)


CTRL_C = "\x03"
Step = tuple[str | Callable[[], bool], str]
"""What a person waits for, a text or another condition, and what they type then: a line, or `CTRL_C`."""


class Terminal:
    """A command in this process on a terminal, and a person before it who does one step after the other.

    Attributes:
        printed: all that was printed, stdout and stderr, in its order.
    """

    def __init__(self, *steps: Step) -> None:
        self._steps = list(steps)
        self._screen = _Screen()
        self._seen = 0

    @property
    def printed(self) -> str:
        return self._screen.getvalue().decode()

    def run(self, *arguments: str) -> int:
        """Run the command and return its exit code; fail unless the person has done every step."""
        out = io.TextIOWrapper(self._screen, write_through=True)
        streams = {"stdin": _Keyboard(self._answer), "stdout": out, "stderr": out}
        with contextlib.ExitStack() as replaced:
            for name, stream in streams.items():
                replaced.enter_context(mock.patch.object(sys, name, stream))
            with pytest.raises(SystemExit) as end:
                main(list(arguments), prog_name="iris-ray")
        out.detach()
        assert not self._steps, f"{self._steps[0]} never came; printed: {self.printed}"
        return int(end.value.code or 0)

    def has_pressed_ctrl_c(self) -> bool:
        """Return whether Ctrl-C is pressed now, while nothing is asked."""
        return bool(self._steps) and self._steps[0][1] == CTRL_C and self._comes() == CTRL_C

    def _comes(self) -> str | None:
        """Return what is typed now, which ends the step, or None."""
        awaited, typed = self._steps[0]
        if isinstance(awaited, str):
            found = self.printed.find(awaited, self._seen)
            if found < 0:
                return None
            self._seen = found + len(awaited)
        elif not awaited():
            return None
        del self._steps[0]
        return typed

    def _answer(self) -> str:
        assert self._steps, f"this question is not expected: {self.printed}"
        typed = self._comes()
        assert typed is not None, f"{self._steps[0]} is waited for, and this was asked: {self.printed}"
        if typed == CTRL_C:
            raise KeyboardInterrupt
        return typed


class _Screen(io.BytesIO):
    def isatty(self) -> bool:
        return True


class _Keyboard(io.TextIOBase):
    def __init__(self, answer: Callable[[], str]) -> None:
        self._answer = answer

    def isatty(self) -> bool:
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]
        return self._answer()


EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script: str, *arguments: str) -> str:
    """Run an example to its end, and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=540,  # the machine may be slow
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
