"""``iris-ray cluster settings``: what it shows, sets and refuses at the real Controller."""

import pytest

from iris_ray.actors.protocol.services import all_settings
from iris_ray.cli.conventions import USAGE
from iris_ray.errors import InvalidRequestError
from tests.support.controller_in_process import ControllerInProcess


def test_settings_are_shown_with_defaults_and_who_has_set_them(world: ControllerInProcess) -> None:
    found = world.json("cluster", "settings")
    assert {name: (one["value"], one["set_by"], one["set_at"]) for name, one in found.items()} == {
        name: (setting.default, None, None) for name, setting in all_settings().items()
    }
    world.iris("cluster", "settings", "set", "eviction_grace_s=1m", " evictions = off ", user="olga")
    grace = world.json("cluster", "settings")["eviction_grace_s"]
    assert (grace["value"], grace["default"], grace["set_by"]) == ("1m", "30", "olga")
    assert grace["form"].startswith("a duration")
    shown = world.iris("cluster", "settings").stdout
    assert all(
        said in shown for said in ("eviction_grace_s", "1m", "olga, 20", "off", all_settings()["evictions"].help)
    )


def test_setting_outlives_the_controller_until_it_is_reset(world: ControllerInProcess) -> None:
    set_at = world.json("cluster", "settings", "set", "eviction_grace_s=60")["eviction_grace_s"]["set_at"]
    world.iris("cluster", "controller", "upgrade")
    found = world.json("cluster", "settings")["eviction_grace_s"]
    assert (found["value"], found["set_at"]) == ("60", set_at)
    assert world.json("cluster", "settings", "reset", "eviction_grace_s")["eviction_grace_s"]["value"] == "30"
    world.iris("cluster", "controller", "upgrade")
    assert world.json("cluster", "settings")["eviction_grace_s"]["set_by"] is None


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("operators=", "name at least one user"),
        ("operators= , ", "name at least one user"),
        ("evictions=0", "give on or off"),
        ("evictions_per_job=0", "give a whole number, 1 or more, or off"),
        ("evictions_per_user=six", "give a whole number, 1 or more, or off"),
        ("eviction_grace_s=soon", "give a duration"),
        ("eviction_grace_s=nan", "give a duration"),
        ("eviction_grace_s=-1", "give a duration"),
        ("cloud_tpu=us-east5-a", "give projects/PROJECT/locations/ZONE, or several with commas, or off"),
        ("autoscaler_demand=1", "give one of auto, always, never"),
        ("evictions", "has no value; write evictions=VALUE: on or off"),
        ("operator=olga", "did you mean operators"),
    ],
)
def test_impossible_setting_is_refused_with_advice(world: ControllerInProcess, assignment: str, said: str) -> None:
    assert said in world.iris("cluster", "settings", "set", "evictions=off", assignment, code=USAGE).stderr
    assert world.json("cluster", "settings")["evictions"]["value"] == "on", "all or none"


def test_the_controller_refuses_what_its_table_refuses(world: ControllerInProcess) -> None:
    for texts, said in (({"evictions": "no"}, "give on or off"), ({"eviction": None}, "did you mean evictions")):
        with pytest.raises(InvalidRequestError, match=said):
            world.controller().set_settings.remote(texts, False, "ann").future().result(60)
    assert world.json("cluster", "settings")["evictions"]["set_by"] is None


def test_head_sets_first_operators_only_where_none_are_set(world: ControllerInProcess) -> None:
    start = "cluster", "controller", "start", "--setting", "operators=olga"
    world.iris(*start, user="root")
    assert world.json("cluster", "settings")["operators"]["set_by"] == "root"
    world.iris(*start, user="root")  # the head starts anew, and its records are there
    world.iris("cluster", "settings", "set", "operators=olga,otto", user="olga")
    assert "operators stays olga,otto, as olga has set it" in world.iris(*start, user="root").stdout
    assert "only operators may" in world.iris(*start, "--setting=evictions=off", user="root", code=1).stderr


def test_what_is_so_already_needs_no_operator(world: ControllerInProcess) -> None:
    world.iris("cluster", "settings", "set", "operators=olga", user="olga")
    world.iris("cluster", "settings", "set", "operators=olga", user="bob")
    world.iris("cluster", "settings", "reset", "evictions", user="bob")
    assert world.json("cluster", "settings")["operators"]["set_by"] == "olga"
