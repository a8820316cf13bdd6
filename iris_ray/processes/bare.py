"""Runs a script of iris_ray within milliseconds: without site-packages, and without what `iris_ray` itself imports.

The script may import the standard library and `iris_ray.processes`.
"""

import os
import sys


def bare_command(script: str | os.PathLike[str]) -> list[str]:
    """Return the command that runs a script, without the script's arguments."""
    return [sys.executable, "-I", "-S", __file__, os.fspath(script)]


def main() -> None:
    package = sys.modules["iris_ray"] = type(sys)("iris_ray")
    package.__path__ = [os.path.dirname(os.path.dirname(os.path.abspath(__file__)))]
    del sys.argv[0]
    with open(sys.argv[0], "rb") as script:
        code = compile(script.read(), sys.argv[0], "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__", "__file__": sys.argv[0]})


if __name__ == "__main__":
    main()
