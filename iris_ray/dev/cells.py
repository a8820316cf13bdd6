"""The program that runs a notebook's cells on a held host, one after the other, with the same variables."""

import ast
import json
import linecache
import os
import select
import signal
import sys
import traceback
import types
from collections.abc import Iterator

IDLE_S = 1800.0
"""The time without a cell after which a notebook no longer keeps its slices; seconds."""


def end_of(token: str, is_well: bool) -> bytes:
    """Return the line that ends the output of a cell, on stdout and on stderr."""
    return f"\x1e{token} {'well' if is_well else 'failed'}\n".encode()


def main() -> None:
    variables = types.ModuleType("__main__")
    sys.modules["__main__"] = variables
    source = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a cell reads nothing
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for asked in _lines(source):
        wanted = json.loads(asked)
        is_well = _run(wanted["cell"], f"<cell {wanted['number']}>", variables)
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.write(descriptor, end_of(wanted["token"], is_well))


def _lines(source: int) -> Iterator[bytes]:
    begun = b""
    while select.select([source], [], [], IDLE_S)[0] and (data := os.read(source, 1 << 16)):
        *lines, begun = (begun + data).split(b"\n")
        yield from lines


def _run(cell: str, name: str, variables: types.ModuleType) -> bool:
    """Run a cell, and show the value of its last expression. Return whether it went well."""
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)  # tracebacks quote it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        parsed = ast.parse(cell, name)
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        exec(compile(parsed, name, "exec"), variables.__dict__)
        if isinstance(last, ast.Expr):
            sys.displayhook(eval(compile(ast.Expression(last.value), name, "eval"), variables.__dict__))
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
        return False
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return True


if __name__ == "__main__":
    main()
