"""Records ``examples/demo.py`` as an animated picture: ``make pictures`` has it drawn as ``docs/demo.svg``.

The picture has the demo's own lines at the times at which they were printed, with pauses of at most `LONGEST_PAUSE_S`.
Messages of Ray, JAX and Gloo about the lost hosts are left out, because they fill several screens. termtosvg draws it.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
COLUMNS, ROWS = 104, 28
LONGEST_PAUSE_S = 1.2
LEFT_OUT = re.compile(
    r"\(raylet\)|\[Gloo\]|preemption_notifier|Terminating process because the JAX"
    r"|^\s+\(\d\) raylet"
)


def main(recording: Path) -> None:
    """Run the demo and write an asciicast of it."""
    header = {"version": 2, "width": COLUMNS, "height": ROWS}
    events = [(0.0, "$ make demo\r\n")]
    began = now = time.monotonic()
    left_out = shown_at = 0.0
    command = [sys.executable, "examples/demo.py"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            now = time.monotonic() - began
            if LEFT_OUT.search(line):
                continue
            left_out += max(0.0, now - left_out - shown_at - LONGEST_PAUSE_S)
            shown_at = now - left_out
            events.append((shown_at, line.rstrip("\n") + "\r\n"))
    if demo.returncode:
        sys.exit(f"the demo failed with exit code {demo.returncode}")
    events.append((shown_at + 4.0, "\r\n"))  # the last screen stays
    lines = [json.dumps(header), *(json.dumps([round(at, 3), "o", text]) for at, text in events)]
    recording.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
