"""Stands in for Ray's runtime_env agent on a simulated host, and becomes that agent at its first use.

Run as a script, never imported. The real agent costs much CPU time to start, and a host needs it only when a worker
with a runtime_env runs there.

1. ``python -I -S lazy_agent.py wait ADDRESS PORT_FILE PYTHON SCRIPT [ARG ...]`` binds the agent's port, writes it into
   ``PORT_FILE``, where the raylet looks for it, and waits for a connection. It then leaves that connection in the
   socket's backlog and executes, in the same process,
2. ``PYTHON lazy_agent.py become FD SCRIPT [ARG ...]``, which runs the agent's own ``SCRIPT`` with the bound socket
   in place of the one that the script would make itself.
"""

import os
import runpy
import select
import socket
import sys
from typing import Any


def wait(address: str, port_file: str, python: list[str], script: list[str]) -> None:
    """Announce a bound port, wait for the first connection, and execute stage 2."""
    listener = socket.create_server((address, 0), backlog=128)
    temporary = f"{port_file}.tmp"
    with open(temporary, "w") as file:
        file.write(str(listener.getsockname()[1]))
    os.replace(temporary, port_file)  # the raylet polls for the file: it must never see half a number
    select.select([listener], [], [])
    listener.set_inheritable(True)
    port = f"--runtime-env-agent-port={listener.getsockname()[1]}"
    os.execvp(python[0], [*python, __file__, "become", str(listener.fileno()), *script, port])


def become(inherited: int, script: list[str]) -> None:
    """Run ``script`` as the main program; when it binds the inherited socket's address, it gets that socket."""
    with socket.socket(fileno=os.dup(inherited)) as listener:
        wanted = listener.getsockname()

    class Socket(socket.socket):
        def bind(self, address: Any, /) -> None:
            if address == wanted:
                os.dup2(inherited, self.fileno(), inheritable=False)
            else:
                super().bind(address)

    os.set_inheritable(inherited, False)
    socket.socket = Socket  # type: ignore[misc]
    sys.argv = script
    runpy.run_path(script[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "wait":
        separator = sys.argv.index("--")
        wait(sys.argv[2], sys.argv[3], sys.argv[4:separator], sys.argv[separator + 1 :])
    else:
        become(int(sys.argv[2]), sys.argv[3:])
