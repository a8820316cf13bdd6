"""The scripts and functions that ``iris-ray run`` and ``submit`` send to the hosts."""

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from iris_ray.actors.pool.gang_run import failure_error
from iris_ray.cli.run import as_task, failure_told, users_part
from iris_ray.cli.script import Script, find_target, print_error
from iris_ray.errors import InvalidFunctionError, InvalidRequestError
from iris_ray.model.outcomes import TpuRunError
from tests.support.command_line import REPOSITORY

PRINTS = "import sys\nprint(__name__, __file__, *sys.argv[1:])\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory to work in, and from which modules are imported."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", "") and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


def call_elsewhere(script: Script, directory: Path) -> list[str]:
    """Run it as a host would, in a process of its own; the lines that it prints."""
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())()"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(script), capture_output=True, cwd=directory, env=environment
    )
    assert run.returncode == 0, run.stderr.decode()
    return run.stdout.decode().splitlines()


def test_script_on_host_runs_in_place_as_main(home: Path, tmp_path_factory: Any) -> None:
    path = home / "train.py"
    path.write_text(PRINTS)
    script = find_target("train.py", ["--steps", "3"])
    assert isinstance(script, Script)
    elsewhere = tmp_path_factory.mktemp("host")
    assert call_elsewhere(script, elsewhere) == [f"__main__ {path} --steps 3"]


def test_travelling_script_leaves_nothing_on_host(home: Path, tmp_path_factory: Any) -> None:
    path = home / "train.py"
    path.write_text(PRINTS)
    script = find_target(str(path))
    assert isinstance(script, Script)
    path.write_text("raise SystemExit('another version')")
    (line,) = call_elsewhere(script, tmp_path_factory.mktemp("host"))
    name, where = line.split()
    assert (name, Path(where).name) == ("__main__", "train.py")
    assert not Path(where).exists()


def test_script_is_found_in_travelling_working_directory(home: Path, tmp_path_factory: Any) -> None:
    (home / "code").mkdir()
    (home / "code" / "train.py").write_text(PRINTS)
    script = find_target("code/train.py", folder="code")
    assert isinstance(script, Script)
    copy = tmp_path_factory.mktemp("host") / "train.py"
    copy.write_text(PRINTS)
    assert call_elsewhere(script, copy.parent) == [f"__main__ {copy}"]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("trian.py", r"did you mean train\.py"),
        ("broken.py", r"broken\.py, line 1"),
        (".", "is a directory"),
        ("nomodule:f", "no module nomodule"),
        ("functions:helo", "did you mean hello"),
        ("functions:NUMBER", "is a int"),
        ("raises:f", "ZeroDivisionError"),
        ("exits:f", "importing exits ends the process"),
    ],
)
def test_missing_target_is_refused_with_nearest(home: Path, target: str, said: str) -> None:
    (home / "train.py").write_text("")
    (home / "broken.py").write_text("def f(:")
    (home / "functions.py").write_text("NUMBER = 1\ndef hello(word='x'): return word\n")
    (home / "raises.py").write_text("1 / 0")
    (home / "exits.py").write_text("import sys\nsys.exit()")
    with pytest.raises(InvalidRequestError, match=said):
        find_target(target)


def test_function_travels_by_value_with_arguments(home: Path) -> None:
    from ray import cloudpickle

    from iris_ray.client.job_request import make_pod_request

    (home / "functions.py").write_text("NUMBER = 1\ndef hello(word): return word, NUMBER\n")
    function = find_target("functions:hello")
    task, name = as_task(function, ["word"], {"COLOUR": "blue"}, ship=True)
    made = make_pod_request(task, "v4-16", 1)
    assert (name, made.spec.name, made.env) == ("hello", "hello", {"COLOUR": "blue"})
    cloudpickle.unregister_pickle_by_value(sys.modules["functions"])
    del sys.modules["functions"]
    sys.path.remove(str(home))
    assert cloudpickle.loads(made.pickled_function)() == ("word", 1)
    for words, said in (([], "no arguments"), (["a", "b"], "2 arguments")):
        with pytest.raises(InvalidFunctionError, match=f"with {said} .*; its arguments are the words after --"):
            as_task(function, words, {}, ship=False)


def test_submitted_remote_function_prints_its_error_and_keeps_its_options(
    home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import ray

    from iris_ray.client.job_request import make_pod_request

    def fail() -> None:
        raise ValueError("on purpose")

    target = ray.remote(num_cpus=3, runtime_env={"env_vars": {"COLOUR": "blue"}})(fail)
    task, name = as_task(target, [], {}, ship=False, prints_errors=True)
    made = make_pod_request(task, "v4-16", 1)
    assert (name, made.spec.name, made.env) == ("fail", "fail", {"COLOUR": "blue"})
    assert made.spec.resources == make_pod_request(target, "v4-16", 1).spec.resources
    with pytest.raises(ValueError, match="on purpose"):
        task._function()
    assert "in fail\n" in capfd.readouterr().err


def test_task_error_is_shown_without_our_frames() -> None:
    text = """ray::run_on_pod(train)() (pid=1)
  File "/x/iris_ray/actors/pool.py", line 54, in run
    return await run.run()
ray.exceptions.RayTaskError: slice 0 (v4-16-0) worker 0: ValueError: no
ray::SlicePoolManager() (pid=1)
  File "/x/iris_ray/actors/task_process.py", line 72, in run
    result = f()
  File "<frozen runpy>", line 88, in _run_code
  File "/home/me/train.py", line 6, in <module>
    raise ValueError("no")
ValueError: no"""
    assert users_part(text).splitlines() == [
        "slice 0 (v4-16-0) worker 0: ValueError: no",
        "Traceback (most recent call last):",
        '  File "/home/me/train.py", line 6, in <module>',
        '    raise ValueError("no")',
        "ValueError: no",
    ]
    assert users_part("something else") == "something else"


@pytest.mark.parametrize("earlier", [None, "train-1a2b3c4d attempt 1"])
def test_run_repeats_no_traceback_that_was_shown(earlier: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    trace = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
  File "train.py", line 6, in main
    raise ValueError("no")
ValueError: no
"""
    error = failure_error(
        "train", "train-1a2b3c4d", "slice 0 worker 0: ValueError: no", TpuRunError("no", trace), earlier
    )
    with pytest.raises(click.exceptions.Exit), failure_told("train"):
        raise pickle.loads(pickle.dumps(error)).as_instanceof_cause()
    shown = capsys.readouterr().err
    assert ("main()" in shown) == (earlier is None)
    assert 'File "train.py", line 6, in main\n    raise ValueError("no")\nValueError: no\n' in shown


def test_logged_error_has_user_frames_and_causes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "train.py").write_text(
        "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise OSError('x') from error\n"
    )
    script = find_target("train.py")
    assert isinstance(script, Script)
    with pytest.raises(OSError, match="x") as raised:
        script()
    while (start := raised.value.__traceback__) and "test_script" in start.tb_frame.f_code.co_filename:
        raised.value.__traceback__ = start.tb_next  # this test is no part of iris_ray
    print_error(raised.value)
    printed = capsys.readouterr().err
    assert [line.strip() for line in printed.splitlines() if "File" in line] == [
        f'File "{home}/train.py", line 2, in <module>',
        f'File "{home}/train.py", line 4, in <module>',
    ]
    assert "direct cause" in printed
    assert printed.endswith("OSError: x\n")
