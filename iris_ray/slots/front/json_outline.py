"""Parses large JSON for another process: a program that reads JSON and answers with an outline of it.

Parsing stops all threads of a process: four megabytes for ten milliseconds, 100,000 values for as long. This program
imports the standard library only, so that it starts at once. A message is its length in eight bytes, and its bytes.

    python -I json_outline.py MOST_VALUES FIELD...
"""

import gc
import json
import os
import signal
import sys
from typing import IO, Any

LENGTH_BYTES = 8
TEXT_SHOWN = 1000
"""The limit for the characters of a text in an outline."""
DEEPEST = 2
NICE = 5
"""The niceness of this process: other processes go first."""


def values(data: bytes) -> int:
    """Return an upper bound for the values of JSON: all but the first follow a comma or an opening bracket."""
    return data.count(b",") + data.count(b"[") + data.count(b"{")


def outline(value: Any, fields: list[str], depth: int = 0) -> Any:
    """Return a part of a value: the fields of an object, the first value of a list, the beginning of a text."""
    match value:
        case str():
            return value[:TEXT_SHOWN]
        case list():
            return [outline(each, fields, depth + 1) for each in value[:1]] if depth < DEEPEST else []
        case dict():
            kept = [name for name in fields if name in value] if depth < DEEPEST else []
            return {name: outline(value[name], fields, depth + 1) for name in kept}
    return value


def described(data: bytes, most_values: int, fields: list[str]) -> dict[str, Any]:
    """Return the outline of JSON and the lengths of an object's lists, or why there is none: broken, or too large."""
    if values(data) > most_values:
        return {"error": "values"}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return {"error": "json"}
    of_lists = value.items() if isinstance(value, dict) else ()
    counts = {name: len(each) for name, each in of_lists if name in fields and isinstance(each, list)}
    return {"outline": outline(value, fields), "counts": counts}


def write(out: IO[bytes], data: bytes) -> None:
    """Send a message."""
    out.write(len(data).to_bytes(LENGTH_BYTES, "big"))
    out.write(data)
    out.flush()


def read(source: IO[bytes]) -> bytes:
    """Return the next message.

    Raises:
        EOFError: there will be none.
    """
    length = source.read(LENGTH_BYTES)
    data = source.read(int.from_bytes(length, "big"))
    if len(length) < LENGTH_BYTES or len(data) < int.from_bytes(length, "big"):
        raise EOFError
    return data


def main() -> None:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which may still have requests
    os.nice(NICE)
    gc.disable()  # values of JSON have no cycles
    most_values, *fields = sys.argv[1:]
    while True:
        try:
            data = read(sys.stdin.buffer)
        except EOFError:
            return
        write(sys.stdout.buffer, json.dumps(described(data, int(most_values), fields)).encode())


if __name__ == "__main__":
    main()
