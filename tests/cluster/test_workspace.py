"""A directory travels to the hosts as the tasks' working directory; one that is too large is refused with the limit."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from iris_ray.cli.conventions import USAGE
from iris_ray.testing import SimulatedCluster
from tests.support.command_line import Done, command_line, environment
from tests.support.gangs import all_jobs


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A script, and beside it a module and a file that it needs."""
    directory = tmp_path / "workspace"
    directory.mkdir()
    (directory / "beside.py").write_text("from pathlib import Path\nFOUND = Path('colour.txt').read_text()\n")
    (directory / "colour.txt").write_text("blue")
    (directory / "paint.py").write_text("import beside\nprint('painted', beside.FOUND)\n")
    return directory


def script(cluster: SimulatedCluster, body: str, *arguments: object, **variables: str) -> Done:
    command = [sys.executable, "-c", textwrap.dedent(body), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, cwd="/", env=environment(cluster) | variables
    )


@pytest.mark.long
def test_client_workspace_is_tasks_working_directory(cluster: SimulatedCluster, workspace: Path) -> None:
    body = """
        import sys
        from iris_ray import IrisClient, ResourceSpec, tpu_device

        def paint():
            import beside
            return beside.FOUND

        with IrisClient.remote(sys.argv[1], workspace=sys.argv[2]) as client:
            for resources in (ResourceSpec(), ResourceSpec(device=tpu_device("v4-16"))):
                print(client.submit(paint, resources=resources).results())
    """
    done = script(cluster, body, cluster.address, workspace)
    assert done.stdout == "['blue']\n['blue', 'blue']\n", done.stderr


@pytest.mark.proof
def test_workspace_over_rays_limit_is_refused_with_advice(cluster: SimulatedCluster, workspace: Path) -> None:
    """Ray's limit is 512 MiB; here it is set to less. The client can try again."""
    body = """
        import sys
        from pathlib import Path
        from iris_ray import IrisClient
        from iris_ray.errors import InvalidRequestError

        try:
            IrisClient.remote(sys.argv[1], workspace=sys.argv[2])
        except InvalidRequestError as error:
            print(error)
        Path(sys.argv[2], ".gitignore").write_text("data.bin")
        with IrisClient.remote(sys.argv[1], workspace=sys.argv[2]) as client:
            print(client.submit(lambda: Path("colour.txt").read_text() + str(Path("data.bin").exists())).results())
    """
    (workspace / "data.bin").write_bytes(os.urandom(4 << 20))
    limit = {"RAY_max_grpc_message_size": str(2 << 20)}
    refused, again = script(cluster, body, cluster.address, workspace, **limit).stdout.splitlines()
    assert refused.startswith(f"the working directory {workspace} can't travel to the hosts")
    assert "(4.00MiB) exceeds the maximum size of 2.00MiB" in refused
    assert ".gitignore" in refused
    assert again == "['blueFalse']"
    (workspace / ".gitignore").unlink()
    done = run(cluster, workspace, **limit)
    assert done.returncode == USAGE, done.stderr
    assert "maximum size of 2.00MiB" in done.stderr


@pytest.mark.long
def test_command_lines_working_dir_travels(cluster: SimulatedCluster, workspace: Path) -> None:
    done = run(cluster, workspace)
    assert done.returncode == 0, done.stderr
    assert "painted blue" in done.stdout + done.stderr


def run(cluster: SimulatedCluster, workspace: Path, **variables: str) -> Done:
    command = command_line("run", "--working-dir", str(workspace), str(workspace / "paint.py"), "v4-16")
    variables = environment(cluster) | variables
    return subprocess.run(command, capture_output=True, text=True, timeout=180, cwd="/", env=variables)


@pytest.mark.long
def test_local_client_ends_its_own_simulated_cluster(cluster: SimulatedCluster) -> None:
    body = """
        import ray
        from iris_ray import IrisClient, ResourceSpec, get_job_info, tpu_device

        def where():
            return get_job_info().slice_name

        with IrisClient.local({"v4-8": 1}, quiet=True) as client:
            print(client.submit(where, resources=ResourceSpec(device=tpu_device("v4-8"))).results())
            print(len(client.list_jobs()), len(client.list_workers()))
        print(ray.is_initialized())
    """
    done = script(cluster, body, RAY_ADDRESS="")
    assert done.stdout == "['v4-8-0']\n1 2\nFalse\n", done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("command", ["run", "submit"])
def test_checkout_travels_and_job_tells_its_commit(cluster: SimulatedCluster, workspace: Path, command: str) -> None:
    for words in (("init", "--quiet"), ("add", "paint.py"), ("commit", "--quiet", "-m", "first")):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=workspace, check=True)
    (workspace / ".env").write_text("KEY=s3cr3t")
    (workspace / "paint.py").write_text("import beside, os\nprint('painted', beside.FOUND, os.path.exists('.env'))\n")

    def iris_ray(*words: str) -> Done:
        variables = environment(cluster) | {"IRIS_RAY_CODE": ""}
        done = subprocess.run(
            command_line(*words), capture_output=True, text=True, timeout=180, cwd=workspace, env=variables
        )
        assert done.returncode == 0, done.stderr
        return done

    done = iris_ray(*(("run", "paint.py", "v4-16") if command == "run" else ("submit", "-f", "paint.py", "--cpu", "1")))
    assert "painted blue False" in done.stdout + done.stderr
    assert re.search("iris-ray: sending commit .* 3 files, .*; left out: .env .looks like a secret.", done.stderr)
    job_id = max(all_jobs(), key=lambda job: job.number).job_id
    assert re.search(r"commit [0-9a-f]{12} \(\w+\) and 7 changed lines", iris_ray("job", "status", job_id).stdout)
    difference = iris_ray("job", "status", job_id, "--difference").stdout
    assert "+print('painted', beside.FOUND, os.path.exists('.env'))" in difference
    assert "+blue" in difference
    assert "s3cr3t" not in difference
