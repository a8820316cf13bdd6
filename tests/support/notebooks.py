"""A notebook with a real Jupyter kernel, for tests that find one."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

WAIT_S = 60.0


class Notebook:
    """A notebook that has loaded iris_ray."""

    def __init__(self, kernel: Any, client: Any) -> None:
        self.kernel = kernel
        self.client = client

    @staticmethod
    @contextlib.contextmanager
    def opened(here: Path, files: Path, environ: Mapping[str, str]) -> Iterator["Notebook"]:
        """Open one in a directory; its kernel has some files in another."""
        from jupyter_client.manager import KernelManager

        kernel = KernelManager(connection_file=str(files / "kernel.json"))
        assert kernel.kernel_spec is not None
        kernel.kernel_spec.argv[0] = sys.executable
        kernel.start_kernel(cwd=str(here), env={**environ, "IPYTHONDIR": str(files / "ipython")})
        client = kernel.client()
        client.start_channels()
        try:
            client.wait_for_ready(timeout=WAIT_S)
            notebook = Notebook(kernel, client)
            assert notebook.run("%load_ext iris_ray") == (True, "", "")
            yield notebook
        finally:
            client.stop_channels()
            kernel.shutdown_kernel(now=True)
            kernel.cleanup_resources()

    def run(self, cell: str, during: Callable[[str], object] = lambda _: None) -> tuple[bool, str, str]:
        """Run a cell. Return whether it went well, and what it has shown on stdout, and on stderr and as its error."""
        shown = {"stdout": "", "stderr": ""}

        def show(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown[content["name"]] += content["text"]
                during(content["text"])
            elif message["msg_type"] == "error":
                shown["stderr"] += content["evalue"]

        reply = self.client.execute_interactive(cell, timeout=2 * WAIT_S, output_hook=show)
        return reply["content"]["status"] == "ok", shown["stdout"], shown["stderr"]
