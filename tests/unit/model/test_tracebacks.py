"""Tracebacks of user code as text."""

import pytest

from iris_ray.model import tracebacks
from iris_ray.model.tracebacks import SeenTracebacks, as_seen, last_frame, last_lines, was_seen, without_our_frames

OURS = """  File "/x/iris_ray/actors/host/user_code.py", line 38, in run_function
    end = returned(load(function)())
                   ^^^^^^^^^^^^^^^^
  File "<frozen runpy>", line 88, in _run_code
"""
CHAINED = f"""Traceback (most recent call last):
  File "/tmp/iris-ray-1/train.py", line 3, in load
    return shards[name]
KeyError: 'a'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
{OURS}  File "/tmp/iris-ray-1/train.py", line 9, in <module>
    main()
  File "/tmp/iris-ray-1/train.py", line 5, in load
    raise ValueError("no shard") from error
ValueError: no shard
"""


def test_only_our_frames_are_left_out() -> None:
    """The cause of an exception stays, although it stands above our frames."""
    assert without_our_frames(CHAINED) == CHAINED.replace(OURS, "")


def test_traceback_of_our_frames_alone_stays_whole() -> None:
    """The function can't be unpickled, for example."""
    only = f"Traceback (most recent call last):\n{OURS}AttributeError: no train\n"
    assert without_our_frames(only) == only


def test_long_traceback_is_cut_to_its_end() -> None:
    deep = "".join(f'  File "/a/deep.py", line {n}, in f\n    f({"x" * 500})\n' for n in range(30))
    shown = last_lines(f"Traceback (most recent call last):\n{deep}RecursionError: too deep\n")
    assert (shown[0], shown[-1], len(shown)) == ("…", "RecursionError: too deep", tracebacks.MOST_LINES + 1)
    assert max(map(len, shown)) == tracebacks.MOST_CHARACTERS + 1


def test_same_frames_are_the_same_traceback() -> None:
    seen = SeenTracebacks()
    assert not seen
    seen.note(CHAINED, "train-1 attempt 1")
    again = CHAINED.replace("/tmp/iris-ray-1/", "/tmp/iris-ray-22/").replace("no shard", "no other shard")
    seen.note(again, "train-1 attempt 2")
    assert seen.earlier(again) == "train-1 attempt 1"
    assert seen.earlier(CHAINED.replace("line 9", "line 10")) is None
    assert seen.earlier("") is None, "a crash has no traceback"


def test_few_tracebacks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracebacks, "MOST_KEPT", 2)
    seen = SeenTracebacks()
    for number in range(3):
        seen.note(CHAINED.replace("line 9", f"line 9{number}"), f"train-1 attempt {number}")
    assert seen.earlier(CHAINED.replace("line 9", "line 90")) is None
    assert seen.earlier(CHAINED.replace("line 9", "line 91")) == "train-1 attempt 1"


def test_seen_traceback_says_so() -> None:
    text = as_seen("train-1a2b3c4d/slice-0 attempt 2", CHAINED)
    assert was_seen(f"slice 0 worker 1: ValueError: no shard\n{text}")
    assert not was_seen(CHAINED)
    assert last_frame(text).splitlines()[0] == '  File "/tmp/iris-ray-1/train.py", line 5, in load'
    assert last_frame("something else") == "something else"
