"""A container engine that runs programs as plain processes of this machine: what docker's command line says, it does.

As with docker, the program is no descendant of whoever starts it, has only the variables that it was given, and goes on
if the client is killed. Every call is recorded. It runs by itself, with the standard library alone; `StandIn` makes it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DIRECTORY = Path(sys.argv[0]).resolve().parent
FLAGS = ("--privileged",)


def main(command: str, *arguments: str) -> int:
    with (DIRECTORY / "calls").open("a") as calls:
        calls.write(json.dumps([command, *arguments]) + "\n")
    if (DIRECTORY / "broken").exists():
        print("Cannot connect to the daemon", file=sys.stderr)
        return 1
    return {"version": version, "run": run, "container": inspect, "kill": kill, "rm": remove, "ps": ps}[command](
        *arguments
    )


def version() -> int:
    print("1.0")
    return 0


def run(*arguments: str) -> int:
    options = []
    rest = list(arguments)
    while rest[0].startswith("--"):
        options.append(rest.pop(0).partition("=")[::2])
    image, *program = rest
    given = dict(options)
    if image == "no-such-image":
        print(f"Unable to find image {image!r}", file=sys.stderr)
        return 125
    container = DIRECTORY / given["--name"]
    container.mkdir()
    env = {}
    for option, value in options:
        if option == "--env":
            name, equals, written = value.partition("=")
            env[name] = written if equals else os.environ[name]
    if os.fork() == 0:
        supervise(container, program, env)
    while not (container / "code").exists():
        time.sleep(0.02)
    return int((container / "code").read_text())


def supervise(container: Path, program: list[str], env: dict[str, str]) -> None:
    """What the daemon does: it starts the program, waits for it, and writes down how it ended."""
    os.setsid()
    if os.fork():
        os._exit(0)
    write(container / "env", json.dumps(env))
    os.execve(sys.executable, [sys.executable, "-SE", __file__, "supervise", str(container), *program], {})


def supervised(container: Path, program: list[str]) -> None:
    env = json.loads((container / "env").read_text())
    started = subprocess.Popen(program, env=env, start_new_session=True)
    write(container / "pid", str(started.pid))
    code = started.wait()
    write(container / "code", str(128 - code if code < 0 else code))


def inspect(*arguments: str) -> int:
    container = DIRECTORY / arguments[-1]
    if not container.exists():
        print("No such container", file=sys.stderr)
        return 1
    code = code_of(container)
    out_of_memory = str((DIRECTORY / "out-of-memory").exists()).lower()
    print("running 0 false" if code is None else f"exited {code} {out_of_memory}")
    return 0


def kill(*arguments: str) -> int:
    container = DIRECTORY / arguments[-1]
    pid = read(container / "pid")
    if pid is None or code_of(container) is not None:
        return 1
    if "--signal=TERM" in arguments:
        os.kill(int(pid), signal.SIGTERM)
    else:
        os.killpg(int(pid), signal.SIGKILL)
    return 0


def code_of(container: Path) -> str | None:
    """How a container ended; None if it has not. Its supervisor may have been killed with its simulated host."""
    pid, code = read(container / "pid"), read(container / "code")
    return "137" if code is None and pid is not None and not Path("/proc", pid).exists() else code


def remove(*arguments: str) -> int:
    container = DIRECTORY / arguments[-1]
    if container.exists() and (code_of(container) is not None or read(container / "pid") is None):
        for path in container.iterdir():
            path.unlink()
        container.rmdir()
    return 0


def ps(*arguments: str) -> int:
    name = arguments[-1].rpartition("=")[2]
    if (DIRECTORY / name).exists():
        print(name)
    return 0


def write(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        supervised(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main(*sys.argv[1:]))
