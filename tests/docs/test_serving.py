"""The file of models on the page about serving can be read, and the page of other programs' words has ours."""

import re
from pathlib import Path

import pytest

from iris_ray.slots.serving import read
from tests.docs.pages import REPOSITORY, blocks


def served() -> str:
    return next(block.text for block in blocks("toml") if block.page == "docs/serving.md")


MY_MODELS = """
class Murmur:
    def __call__(self, request):
        return request["prompt"]

class Shout(Murmur):
    def __init__(self, mark):
        self.mark = mark
"""


def test_file_of_models_on_the_page_makes_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_models.py").write_text(MY_MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "models.toml"
    path.write_text(served())
    said = read(path, {"ALICE_KEY": "a" * 20})
    assert set(said.models) == {"llama", "shout", "murmur"}
    wanted = {"idle_s": 60, "group": "small", "alone": False}
    assert wanted.items() <= said.models["shout"].how.items()


def test_words_beside_those_of_others_are_in_the_file() -> None:
    elsewhere = {
        "environment",
        "timeout_s",
        "most_waiting",
        "drain_s",
        "constraints",
        "iris",
        "priority",
        "inf",
        "true",
    }
    page = (REPOSITORY / "docs" / "coming-from-llama-swap.md").read_text()
    ours = [line.split("|")[2] for line in page.splitlines() if line.startswith("| `")]
    words = set(re.findall(r"`[{[]?([a-z_]+)", "\n".join(ours)))
    assert "idle_s" in words
    assert words <= elsewhere | set(re.findall(r"[a-z_]+", served()))
