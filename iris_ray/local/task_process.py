"""The process of one task of a local run: ``python -m iris_ray.local.task_process LAUNCH_FILE PARENT``."""

import pickle
import sys
from pathlib import Path

from iris_ray.actors.host.user_code import flush_output, import_all, raised, run_function
from iris_ray.actors.protocol.task_files import LocalRun, TaskFiles, write_whole
from iris_ray.errors import TaskSetupError
from iris_ray.processes.subtree import end_with_parent
from iris_ray.terminal import show_each_line


def main(launch_file: Path) -> None:
    """Run the function and write how it ended. Threads and exit handlers of user code run on after that."""
    function, preload = pickle.loads(launch_file.read_bytes())
    files, run, index = TaskFiles.of_this_task(), LocalRun.of_this_task(), int(launch_file.stem)
    assert files is not None, "the run has set its variable"
    assert run is not None, "and its own"
    problem = import_all(preload)
    files.started.touch()
    end = run_function(function, files) if problem is None else raised(TaskSetupError(problem))
    flush_output()
    write_whole(run.end_file(index), pickle.dumps(end))


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    show_each_line()
    main(Path(sys.argv[1]))
