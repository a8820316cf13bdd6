"""The zygote of `benchmarks/zygote.py`: what makes a process unfit to be forked from is named; forks end with it."""

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

zygotes: Any = importlib.import_module("benchmarks.zygote")

CHILD = """
import os, threading, time

def run(say, stays=False):
    say(pid=os.getpid(), threads=threading.active_count())
    time.sleep(600 * stays)
    os._exit(5)
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setattr(zygotes, "ANSWER_S", 60.0)
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    return {"PYTHONPATH": str(tmp_path)}


def test_module_that_starts_a_thread_is_named_and_left_out(environ: dict[str, str]) -> None:
    zygote, left_out = zygotes.start_without_the_unfit(["threaded", "child"], environ=environ)
    with zygote:
        assert left_out.keys() == {"threaded"}
        assert "it started 1 threads" in left_out["threaded"]
        child = zygote.fork("child:run")
        assert child.hear() == {"pid": child.pid, "threads": 1}
        assert zygote.code(child) == 5
        child.end()


def test_killed_zygote_takes_its_children_with_it_and_the_next_fork_fails(environ: dict[str, str]) -> None:
    with zygotes.Zygote(["child"], environ=environ) as zygote:
        child = zygote.fork("child:run", stays=True)
        assert child.hear()["pid"] == child.pid
        os.kill(zygote.pid, signal.SIGKILL)
        assert child.hear(10) == {}, "its pipe has ended"
        child.end()
        with pytest.raises(zygotes.ZygoteError):
            zygote.fork("child:run")
