"""What `iris_ray.levanter.run` makes of a config, without Levanter: parts of its config stand in."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest

import iris_ray.levanter
from iris_ray.errors import InvalidRequestError
from iris_ray.model.job_info import JobInfo


@dataclass(frozen=True)
class Distributed:
    initialize_jax_distributed: bool = True
    process_id: int | None = 7


@dataclass(frozen=True)
class Ray:
    auto_start_cluster: bool = True


@dataclass
class Checkpointing:
    base_path: str = "gs://bucket/checkpoints"

    def expanded_path(self, run_id: str) -> str:
        return f"{self.base_path}/{run_id}"

    def create(self, run_id: str) -> "Saving":
        return Saving(self.expanded_path(run_id))


@dataclass
class Saving:
    path: str
    steps: list[int] = field(default_factory=list)

    def on_step(self, info: Any, force: bool = False) -> None:
        if force:
            self.steps.append(info.step)

    def wait_until_finished(self) -> None:
        self.steps.append(-1)


@dataclass
class Trainer:
    id: str | None = None
    num_train_steps: int = 2
    checkpointer: Checkpointing = field(default_factory=Checkpointing)
    load_checkpoint: bool | None = False  # else checkpoints are looked for, which takes fsspec
    distributed: Distributed = Distributed()
    ray: Ray = Ray()
    require_accelerator: bool | None = None
    shutdown_at_exit: bool | float = False


@dataclass
class Whole:
    trainer: Trainer
    model: str = "small"


@dataclass
class Info:
    step: int


ME = JobInfo("train 1/eval-2", "train 1/eval-2/task-0", 0, 1, 1, 0, 1, "v4-8-0", 0, "10.0.0.2:81", "/tmp")


@pytest.fixture
def in_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN_ID", raising=False)
    for name, value in ME.to_env().items():
        monkeypatch.setenv(name, value)


def run(config: Any) -> Any:
    """What ``main`` gets, for that config."""
    return iris_ray.levanter.run(lambda given: given, config)


def test_main_outside_a_task_gets_unchanged_config() -> None:
    config = Whole(Trainer(checkpointer=Checkpointing("checkpoints/")))
    assert run(config) is config


@pytest.mark.usefixtures("in_a_task")
def test_task_config_leaves_distributed_and_ray_to_us() -> None:
    config = Whole(Trainer(id="mine"), model="large")
    before = dataclasses.replace(config.trainer)
    made = run(config)
    assert made.model == "large"
    assert made.trainer.distributed == Distributed(initialize_jax_distributed=False)
    assert made.trainer.ray == Ray(auto_start_cluster=False)
    assert config.trainer == before
    assert config.trainer.checkpointer.create("x").path == "gs://bucket/checkpoints/x"


@pytest.mark.usefixtures("in_a_task")
def test_run_id_comes_from_config_or_variable_or_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(Trainer()).id == "train-1-eval-2", "the same in every attempt, and good for a file name"
    monkeypatch.setenv("RUN_ID", "chosen")
    assert run(Trainer()).id == "chosen"
    assert run(Trainer(id="mine")).id == "mine"


@pytest.mark.usefixtures("in_a_task")
def test_accelerator_is_optional_where_jax_uses_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert run(Trainer()).require_accelerator is False
    assert run(Trainer(require_accelerator=True)).require_accelerator is True
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert run(Trainer()).require_accelerator is None


@pytest.mark.usefixtures("in_a_task")
def test_last_step_is_saved_and_awaited_after_main() -> None:
    made: list[Any] = []

    def main(config: Whole) -> str:
        made.append(config.trainer.checkpointer.create("mine"))
        for step in (0, 1, 1):
            made[0].on_step(Info(step))
        assert made[0].steps == []
        return "result"

    assert iris_ray.levanter.run(main, Whole(Trainer(id="mine"))) == "result"
    assert made[0].path == "gs://bucket/checkpoints/mine"
    assert made[0].steps == [1, -1]


@pytest.mark.usefixtures("in_a_task")
def test_error_of_main_reaches_gang_without_saving() -> None:
    made: list[Any] = []

    def main(config: Trainer) -> None:
        made.append(config.checkpointer.create("mine"))
        made[0].on_step(Info(1))
        raise RuntimeError("Loss is NaN")

    with pytest.raises(RuntimeError, match="NaN"):
        iris_ray.levanter.run(main, Trainer())
    assert made[0].steps == []


@pytest.mark.usefixtures("in_a_task")
def test_complete_run_does_not_call_main(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / "step-1").mkdir(parents=True)
    (tmp_path / "mine" / "step-1" / "metadata.json").touch()
    config = Trainer(id="mine", checkpointer=Checkpointing(str(tmp_path)), load_checkpoint=None)
    assert run(config) is None
    assert "Run mine is complete" in capsys.readouterr().out
    assert run(dataclasses.replace(config, num_train_steps=3)) is not None
    assert run(dataclasses.replace(config, load_checkpoint=False)) is not None


@dataclass
class LoadingTrainer(Trainer):
    """One that has ``load_checkpoint_path``, as Marin's Levanter reads it."""

    load_checkpoint_path: str = ""

    def checkpoint_search_paths(self, run_id: str) -> list[str]:
        return [self.load_checkpoint_path]


@pytest.mark.usefixtures("in_a_task")
def test_run_that_loads_another_checkpoint_is_complete_with_its_own_last_step(tmp_path: Any) -> None:
    loaded, own = tmp_path / "pretrained" / "step-0", tmp_path / "mine" / "step-1"
    loaded.mkdir(parents=True)
    (loaded / "metadata.json").touch()
    config = LoadingTrainer(
        "mine", checkpointer=Checkpointing(str(tmp_path)), load_checkpoint=None, load_checkpoint_path=str(loaded.parent)
    )
    assert run(config) is not None
    own.mkdir(parents=True)
    (own / "metadata.json").touch()
    assert run(config) is None


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize("base_path", ["checkpoints/", "./here", ""])
def test_checkpoint_directory_of_one_host_is_refused(base_path: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"checkpointer\.base_path is .* give one that all hosts share"):
        run(Trainer(checkpointer=Checkpointing(base_path)))


@pytest.mark.usefixtures("in_a_task")
@pytest.mark.parametrize("after_s", [True, 60.0, 0.0])
def test_shutting_down_cluster_host_is_refused(after_s: bool | float) -> None:
    with pytest.raises(InvalidRequestError, match=f"shutdown_at_exit is {after_s}, but"):
        run(Trainer(shutdown_at_exit=after_s))


@pytest.mark.parametrize("config", [None, {"trainer": {}}, Trainer, Info(1), "config.yaml"])
def test_config_that_is_not_levanters_is_refused(config: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give Levanter's TrainerConfig, or a dataclass that has one"):
        run(config)
