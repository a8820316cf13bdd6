"""What ``iris-ray run`` sends to the hosts: a script with its text, or a function. Used here and on the hosts."""

import atexit
import contextlib
import importlib
import os
import re
import runpy
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from iris_ray.errors import InvalidFunctionError, InvalidRequestError, UnknownTPUTypeError
from iris_ray.model.checks import unknown
from iris_ray.model.topology import get_tpu_config

_OURS = re.compile(r"<frozen runpy>|.*/iris_ray/(actors|cli)/[^/]*")
_WHAT = "give a script, such as train.py, or a function as module:function"


@dataclass(frozen=True)
class Script:
    """A script that runs as ``__main__`` wherever it is called.

    Its text travels with it. A host that has the same file (shared storage, a working directory) runs that file, so
    that it finds the modules beside it.

    Attributes:
        path: as given on the command line, or its path in the working directory that travels with it.
        absolute: its path on the machine that sends it.
        text: its content.
        arguments: its ``sys.argv[1:]``.
    """

    path: str
    absolute: str
    text: bytes
    arguments: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(self.path).stem) or "script"

    def __call__(self) -> None:
        path = self._on_this_host()
        sys.argv = [str(path), *self.arguments]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")

    def _on_this_host(self) -> Path:
        for candidate in (Path.cwd() / self.path, Path(self.absolute)):
            with contextlib.suppress(OSError):
                if candidate.read_bytes() == self.text:
                    return candidate
        directory = tempfile.mkdtemp(prefix="iris-ray-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)  # until then tracebacks quote it
        path = Path(directory) / Path(self.path).name
        path.write_bytes(self.text)
        return path


def read_script(path: str, arguments: Sequence[str] = ()) -> Script:
    """Read a script.

    Raises:
        InvalidRequestError: it can't be read, or is not Python.
    """
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{path} can't be read: {error.strerror}") from None
    try:
        compile(text, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise InvalidRequestError(f"{path}, line {error.lineno}: {error.msg}; it would fail on every host") from None
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not a Python script: {error}") from None
    return Script(path, str(Path(path).absolute()), text, tuple(arguments))


def find_target(target: str, arguments: Sequence[str] = (), folder: str = ".") -> Script | Callable[..., Any]:
    """Return the script or function that a target names.

    Args:
        target: a path, or ``module:function``.
        arguments: for a script.
        folder: where to look for modules, besides the installed ones.

    Raises:
        InvalidRequestError: there is none; the message suggests the nearest.
    """
    if os.path.isfile(target):
        script = read_script(target, arguments)
        home = Path(folder).resolve()
        inside = Path(target).resolve().is_relative_to(home)
        return replace(script, path=str(Path(target).resolve().relative_to(home))) if inside else script
    if os.path.isdir(target):
        raise InvalidRequestError(f"{target} is a directory; {_WHAT}")
    if is_tpu_type(target):
        raise InvalidRequestError(f"{target} is a TPU type, and the script comes first; {_WHAT}")
    module, colon, function = target.partition(":")
    if colon and re.fullmatch(r"\w+(\.\w+)*", module) and re.fullmatch(r"\w+(\.\w+)*", function):
        return find_function(module, function, folder)
    if re.fullmatch(r"python[\d.]*", Path(target).name):
        raise InvalidRequestError(f"{target} is left out: {_WHAT}, and the hosts run it with their Python")
    siblings = sorted(map(str, Path(target).parent.glob("*.py")))
    error = unknown("script", target, siblings)
    raise InvalidRequestError(f"{error} (a function is given as module:function)")


def is_tpu_type(text: str) -> bool:
    try:
        get_tpu_config(text)
    except UnknownTPUTypeError:
        return False
    return True


def find_function(module_name: str, function_name: str, folder: str) -> Callable[..., Any]:
    """Import the function from the folder or from the installed modules; raises like `find_target`."""
    here = os.path.abspath(folder)
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f"neither installed nor in {here}"
        raise InvalidRequestError(f"there is no module {error.name} ({where}); {_WHAT}") from None
    except SystemExit:
        raise InvalidRequestError(
            f"importing {module_name} ends the process; put what it runs as a script under"
            ' `if __name__ == "__main__":`, or give the script itself'
        ) from None
    except Exception as error:
        raise InvalidRequestError(f"importing {module_name} failed: {type(error).__name__}: {error}") from None
    found: Any = module
    for part in function_name.split("."):
        if not hasattr(found, part):
            there = [n for n, value in vars(module).items() if callable(value) and not isinstance(value, type)]
            raise unknown(f"function in {module_name}", function_name, there)
        found = getattr(found, part)
    if not callable(found) and not hasattr(found, "remote"):
        raise InvalidFunctionError(f"{module_name}:{function_name} is a {type(found).__name__}; give a function")
    function: Callable[..., Any] = found
    return function


def print_error(error: Exception) -> None:
    """Print an error to stderr, with its traceback from the user's first frame on."""
    start = error.__traceback__
    while start is not None and start.tb_next is not None and _OURS.fullmatch(start.tb_frame.f_code.co_filename):
        start = start.tb_next
    traceback.print_exception(type(error), error, start)


def is_at_home(function: Callable[..., Any]) -> ModuleType | None:
    """Return the module of a function if it lies in the current directory, from which the hosts can't import it."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or "site-packages" in file:
        return None
    return module if Path(file).resolve().is_relative_to(Path.cwd()) else None
