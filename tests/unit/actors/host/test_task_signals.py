"""SIGTERM in a task, with and without a notice."""

import signal
import time
from pathlib import Path

import pytest

from iris_ray.actors.protocol.task_files import TaskFiles
from tests.support.processes import NOTICE, Child, Make

SAY_AND_EXIT = "signal.signal(signal.SIGTERM, lambda *_: (print('handler', flush=True), os._exit(7)))"
WAIT = "print('waits', flush=True)\nnext_start()\nprint('goes on', flush=True)"


def terminate(child: Child, tmp_path: Path, with_notice: bool) -> None:
    child.start()
    child.says("waits")
    if with_notice:
        TaskFiles.of_process(tmp_path, child.process.pid).write_notice(NOTICE)
    child.process.send_signal(signal.SIGTERM)


def test_sigterm_with_a_notice_is_swallowed_where_user_code_has_no_handler(make: Make, tmp_path: Path) -> None:
    child = make(WAIT, SAY_AND_EXIT)
    terminate(child, tmp_path, with_notice=True)
    time.sleep(0.2)
    child.start()
    child.says("goes on")
    assert child.end() == 0


@pytest.mark.parametrize("with_notice", [True, False])
def test_sigterm_reaches_the_handler_of_user_code(make: Make, tmp_path: Path, with_notice: bool) -> None:
    child = make(SAY_AND_EXIT + "\n" + WAIT)
    terminate(child, tmp_path, with_notice)
    child.says("handler")
    assert child.end() == 7


@pytest.mark.parametrize(("before", "code"), [(SAY_AND_EXIT, 7), ("", 128 + signal.SIGTERM)], ids=["a handler", "none"])
def test_sigterm_without_a_notice_ends_the_process_as_before(
    make: Make, tmp_path: Path, before: str, code: int
) -> None:
    child = make(WAIT, before)
    terminate(child, tmp_path, with_notice=False)
    assert child.end() == code


def test_sigterm_from_a_task_that_has_had_a_notice_still_ends_its_own_children(make: Make, tmp_path: Path) -> None:
    """They inherit the handler, and ``terminate()`` of a pool of processes would wait for them for ever."""
    child = make("""
        import multiprocessing
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        worker.start()
        time.sleep(0.2)
        print("waits", flush=True)
        next_start()
        worker.terminate()
        worker.join(10)
        print(worker.exitcode is not None, flush=True)
        worker.kill()
    """)
    terminate(child, tmp_path, with_notice=True)
    child.start()
    child.says("True")


def test_task_heeds_signals_before_anybody_knows_that_it_has_begun(make: Make, tmp_path: Path) -> None:
    """The mark of its start tells its host that signals may come: what runs then must not die of them."""
    script = """
        import iris_ray.actors.host.task_process as task_process
        from iris_ray.model.job_info import JobInfo
        from iris_ray.actors.protocol.messages import TaskLaunch
        from iris_ray.model.multislice import MultisliceInfo
        from ray import cloudpickle
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        faulthandler.unregister(STACKS_SIGNAL)
        (host_directory() / "dev").mkdir()
        redirect = task_process.redirect_output
        def marked(directory, launch):
            pipe = redirect(directory, launch)
            assert TaskFiles.of_process(directory, os.getpid()).started.exists()
            files.notice.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), STACKS_SIGNAL)
            return pipe
        task_process.redirect_output = marked
        info = JobInfo("job", "job/task-1", 1, 4, 2, 0, 2, "slice-a", 1, "127.0.0.1:20002")
        place = MultisliceInfo("127.0.0.1", 0, 1, 20_000, 20_001)
        launch = TaskLaunch(cloudpickle.dumps(lambda: 7), {}, info, place, None, "label")
        print(task_process.TaskProcess("127.0.0.1", (), ()).run(launch).kind.name, file=sys.__stdout__, flush=True)
    """
    child = make(script)
    child.start()
    assert child.process.stdout is not None
    assert "RETURNED" in child.process.stdout.read()
    assert child.end() == 0
    assert TaskFiles.of_process(tmp_path, child.process.pid).started.exists()
