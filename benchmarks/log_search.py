"""How fast `iris-ray logs --grep` reads the files of one host.

python benchmarks/log_search.py                 # one attempt with all that is kept of it, 320 MB
"""

import tempfile
import time
from pathlib import Path

from figures import row
from iris_ray.actors.host.output.log_files import FILE_BYTES, FILES_KEPT, AttemptLog, LogWriter
from iris_ray.actors.host.output.log_search import MOST_FOUND_BYTES, LogSearch, search

PATTERNS = "Traceback", "Traceback|Error", r"worker \d+ failed", "(?i)out of memory"


def main() -> None:
    lines = b"".join(b"2026-11-27 05:30:00 worker %d step %d loss=%f lr=0.0003\n" % (n % 16, n, 1 / n)
                     for n in range(1, 20_000))  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        log = AttemptLog(Path(directory), "job", 0, 1)
        writer = LogWriter(log)
        for _ in range(FILE_BYTES * FILES_KEPT // len(lines)):
            writer.write(lines)
        writer.write(b"Traceback (most recent call last):\n")
        writer.close()
        size = sum(path.stat().st_size for _, path in log.files())
        for pattern in PATTERNS:
            began = time.perf_counter()
            search(log, LogSearch(pattern), MOST_FOUND_BYTES)
            row(pattern, f"{size / 1e6 / (time.perf_counter() - began):,.0f} MB/s")


if __name__ == "__main__":
    main()
