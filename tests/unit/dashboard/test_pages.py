"""The pages in a real browser, on a made-up cluster with the real Controller."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from iris_ray.actors.calls.controller_connection import ControllerConnection
from iris_ray.actors.pool import attempt
from iris_ray.capacity.calls import CapacityCalls
from iris_ray.capacity.core import CapacityReport, SliceBatch, Trouble
from iris_ray.history.history_file import NAME, Bounds, HistoryFile
from iris_ray.history.rows import CurvePoint
from iris_ray.model.options import PriorityBand
from iris_ray.notify.core import News, news_id
from iris_ray.notify.destination import What
from iris_ray.notify.outbox import Entry, Outbox, Outcome
from tests.support.controller_in_process import ControllerInProcess
from tests.support.dashboard_pages import Browser, browser, served
from tests.support.histories import a_month
from tests.support.proofs import in_long
from tests.support.worlds import gang_spec, in_group

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

SCREENSHOTS = "IRIS_TEST_SCREENSHOTS"
"""The variable with a directory for the pictures of the documents."""
PAGES = {
    "fleet": "train-llama",
    "queue": "waiting for 3 slices",
    "jobs": "train-llama",
    "users": "nobody",
    "events": "the latest first",
    "history": "On average",
    "notifications": "email:ann@example.org",
    "jobs/train-llama": "step 7",
    "jobs/eval": "Why it waits",
    "slices/v4-16-2": "drained",
    "compare": "Their step rate",
    "compare/train-llama,ablate-lr": "Chip-hours lost",
}
"""What each of them shows."""
LOOKS = ("light", False, 1280), *in_long(("dark", True, 1280)), ("phone", True, 390)
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as chromium:
        yield chromium


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ControllerInProcess]:
    """Slices of several types, and a Controller whose history has a month."""
    slices = {"v4-16": 3, "v4-32": 4, "v5litepod-64": 1}
    with ControllerInProcess(tmp_path, slices).installed(monkeypatch) as world:
        world.history = tmp_path / "history"
        HistoryFile(world.history / NAME, Bounds(400, 100)).write(list(a_month(time.time())))
        Outbox(world.history).write(list(map(told, ("train-llama", "eval"), (Outcome.SENT, Outcome.GIVEN_UP))))
        world.start_controller()
        yield world


def told(job_id: str, outcome: Outcome) -> Entry:
    place, error = "email:ann@example.org", "" if outcome is Outcome.SENT else "HTTP 404"
    about = 2, job_id, "<b>train</b>", "ann", "", "running", time.time(), "it has lost hosts, and goes on", place
    return Entry(News(news_id(job_id, What.LOST, 2, place), What.LOST, *about), outcome, time.time(), 1, error)


@pytest.fixture
def url(chromium: Browser, world: ControllerInProcess) -> Iterator[str]:
    """The dashboard of a cluster on which something happens; no page may complain."""
    chromium.troubles.clear()
    with served() as url:
        world.start("train-llama", slices=(2,), max_retries_failure=3)
        world.start("ablate-lr", tpu_type="v4-32", user="bob")
        world.submit("eval", slices=(3,), user="bob")
        world.submit("nightly", slices=(2,), user="cho", priority=PriorityBand.BATCH)
        world.prints("train-llama", 0, "".join(f"step {i}: loss {3 - i / 10:.2f}\n" for i in range(8)))
        world.iris("host", "drain", "v4-16-2", "--reason", "a fan is broken", user="olga")
        yield url
    assert chromium.troubles == []


def waits_for(page: "Page", text: str) -> None:
    page.get_by_text(text).first.wait_for(timeout=PATIENCE_MS)


def picture(page: "Page", name: str) -> None:
    if directory := os.environ.get(SCREENSHOTS):
        page.screenshot(path=Path(directory, f"{name}.png"))


@pytest.mark.parametrize(("look", "dark", "width"), LOOKS)
def test_every_page_fits_its_window(chromium: Browser, url: str, look: str, dark: bool, width: int) -> None:
    def story(page: "Page") -> None:
        for name, shown in PAGES.items():
            page.goto(f"{url}/#/{name}")
            page.locator("h1").wait_for(timeout=PATIENCE_MS)
            page.locator("#live", has_text="live").wait_for(timeout=PATIENCE_MS)
            waits_for(page, shown)
            too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
            assert too_wide <= 0, f"{name} is {too_wide} px too wide"
            picture(page, f"{look}-{name.replace('/', '-')}")

    chromium.see(story, dark=dark, width=width)


def test_changes_appear_without_reload(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    def story(page: "Page") -> None:
        page.goto(f"{url}/#/fleet")
        page.locator(".tile.busy").nth(1).wait_for(timeout=PATIENCE_MS)
        assert page.locator(".tile .cell.lost").count() == 0
        world.kill_host("v4-16-1", 1)
        page.locator("a.tile.incomplete", has_text="v4-16-1").wait_for(timeout=PATIENCE_MS)
        assert page.locator("a.tile.incomplete .cell.lost").count() == 1
        page.get_by_role("link", name="Events").click()
        waits_for(page, "host 1 gone")
        page.get_by_role("button", name="Jobs").click()
        assert page.get_by_text("host 1 gone").count() == 0

    chromium.see(story)


def test_fleet_is_filtered_by_words_and_condition(chromium: Browser, url: str) -> None:
    def story(page: "Page") -> None:
        page.goto(f"{url}/#/fleet")
        page.locator(".tile.busy").nth(1).wait_for(timeout=PATIENCE_MS)
        tiles = page.locator("a.tile .tile-name")
        page.get_by_label("Search slices").fill("ann")
        assert tiles.all_text_contents() == ["v4-16-0", "v4-16-1"]
        page.get_by_label("Search slices").fill("")
        page.get_by_role("button", name="closed").click()
        assert tiles.all_text_contents() == ["v4-16-2"]
        assert page.get_by_role("button", name="closed").get_attribute("aria-pressed") == "true"

    chromium.see(story)


@pytest.mark.parametrize(("look", "dark", "width"), LOOKS)
def test_jobs_of_group_name_it_and_current_page_is_seen(
    chromium: Browser, world: ControllerInProcess, url: str, look: str, dark: bool, width: int
) -> None:
    for spec in in_group(*(gang_spec(name, user="dee") for name in ("trainer", "sampler"))):
        world.submitted(spec)

    def story(page: "Page") -> list[str]:
        seen = []
        for name in ("jobs", "queue"):
            page.goto(f"{url}/#/{name}")
            page.locator(".tag", has_text="rl").nth(1).wait_for(timeout=PATIENCE_MS)
            seen += page.locator("tr", has=page.locator(".tag", has_text="rl")).all_inner_texts()
            picture(page, f"{look}-{name}-with-a-group")
        page.goto(f"{url}/#/history")
        waits_for(page, "On average")
        place = page.locator("nav a[aria-current]").bounding_box()
        assert place is not None
        assert place["x"] >= 0
        assert place["x"] + place["width"] <= width, "a phone scrolls to it"
        return seen

    rows = chromium.see(story, dark=dark, width=width)
    assert ["trainer" in row or "sampler" in row for row in rows] == [True] * 4


def test_notifications_are_shown_with_their_outcome_and_by_job(chromium: Browser, url: str) -> None:
    def story(page: "Page") -> None:
        page.goto(f"{url}/#/fleet")
        page.get_by_role("link", name="Notifications").click()
        rows = page.locator("tbody tr")
        rows.nth(1).wait_for(timeout=PATIENCE_MS)
        assert rows.count() == 2
        assert "HTTP 404" in rows.filter(has_text="given up").inner_text()
        page.get_by_label("Search notifications").fill("SENT")
        rows.filter(has_text="given up").wait_for(state="detached", timeout=PATIENCE_MS)
        assert "train-llama" in rows.first.inner_text()
        rows.get_by_role("link").click()
        page.get_by_role("link", name="notifications", exact=True).click()
        page.get_by_role("heading", name="Notifications of train-llama").wait_for(timeout=PATIENCE_MS)
        rows.filter(has_text="email:ann@example.org").wait_for(timeout=PATIENCE_MS)
        assert rows.count() == 1

    chromium.see(story)


def test_queue_shows_order_and_reasons(chromium: Browser, url: str) -> None:
    def story(page: "Page") -> list[str]:
        page.goto(f"{url}/#/queue")
        page.locator("tbody tr").nth(1).wait_for(timeout=PATIENCE_MS)
        return page.locator("tbody tr").all_inner_texts()

    first, second = chromium.see(story)
    assert "eval" in first
    assert "The cluster has too few that suit it" in first
    assert "waiting for 3 slices" in first
    assert "nightly" in second
    assert "batch" in second


def test_logs_stream_and_are_shown_as_text(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    def story(page: "Page") -> str:
        page.goto(f"{url}/#/jobs/train-llama")
        waits_for(page, "step 7: loss 2.30")
        world.prints("train-llama", 0, "<img src=x onerror=document.title='taken'>\nstep 8\n")
        waits_for(page, "step 8")
        page.locator("#log-task").fill("1")
        page.locator("#log-task").press("Enter")
        waits_for(page, "It has printed nothing yet.")
        return page.title()

    assert chromium.see(story) == "train-llama · iris_ray"


@pytest.mark.parametrize("address", ["driver-1%2Flr_1e-3", "driver-1/lr_1e-3"], ids=["linked", "typed"])
def test_job_page_of_a_job_with_an_odd_id(
    chromium: Browser, world: ControllerInProcess, url: str, address: str
) -> None:
    world.start("driver-1/lr_1e-3", slices=(1,), tpu_type="v4-32")
    world.prints("driver-1/lr_1e-3", 0, "step 1\n")

    def story(page: "Page") -> None:
        page.goto(f"{url}/#/jobs/{address}")
        waits_for(page, "step 1")
        page.get_by_role("link", name="Jobs").first.click()
        page.get_by_role("link", name="driver-1/lr_1e-3").click()
        waits_for(page, "step 1")

    chromium.see(story)


def test_job_page_shows_attempts_and_their_causes(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    world.fail("train-llama", 1)
    world.wait_for_attempt("train-llama", 2)

    def story(page: "Page") -> None:
        page.goto(f"{url}/#/jobs/train-llama")
        waits_for(page, "exited with code 3")
        assert page.locator(".bar-of.failed").count() == 1
        assert page.locator(".bar-of.running").count() == 1

    chromium.see(story)


def test_job_page_shows_cost_of_disruptions(chromium: Browser, url: str) -> None:
    """The figures are made up: here they would take hours."""
    seconds = {"productive": 30_000.0, "program_startup": 900.0, "queueing": 3600.0}
    seconds |= {"wasted_progress_from_disruption": 1800.0, "infrastructure_recovery_from_disruption": 300.0}
    chips = {kind: 16 * amount for kind, amount in seconds.items() if kind != "queueing"}
    goodput = {"seconds": seconds, "chip_seconds": chips, "goodput": 0.909, "measured": 1.0}
    lost = {"count": 3, "median_s": 41.5, "worst_s": 1900.0, "seconds": 2100.0, "chip_seconds": 33_600.0}
    goodput |= {"time_lost": {"LOST": lost}, "chip_hour": [1.5, "USD"]}

    def with_goodput(route: "Route") -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"goodput": goodput})

    def story(page: "Page") -> str:
        page.route("**/api/jobs/train-llama", with_goodput)
        page.goto(f"{url}/#/jobs/train-llama")
        waits_for(page, "Where its time went")
        page.get_by_text("All kinds of time").click()
        page.wait_for_timeout(2500)  # the page asks again meanwhile
        assert page.get_by_text("wasted progress from disruption").is_visible()
        assert page.get_by_text("41.5s").is_visible()
        assert page.get_by_text("14.00 USD").is_visible()
        picture(page, "goodput")
        return page.locator(".headline").inner_text()

    said = (
        "Goodput, the productive share since its code first ran: 91 %."
        " All disruptions together have cost 35m00s, that is 9.3 chip-hours."
    )
    assert chromium.see(story, height=1400) == said


def test_job_page_explains_wait_in_plain_words(chromium: Browser, url: str) -> None:
    def story(page: "Page") -> tuple[str, list[str], str]:
        page.goto(f"{url}/#/jobs/eval")
        waits_for(page, "Why it waits")
        why = page.locator(".callout").inner_text(), page.locator(".closest li").all_inner_texts()
        waits_for(page, "Its code has not run yet.")
        return *why, page.locator(".fact-grid").inner_text()

    callout, closest, facts = chromium.see(story)
    assert callout == "It needs 3 slices at once. Only 2 slices suit it, and none is free now."
    assert "v4-16-0: in use by train-llama" in closest
    assert "v4-16-2: host 0 is tainted: drained (a fan is broken)" in closest
    assert "0, none allowed" in facts


@pytest.mark.parametrize(("look", "dark", "width"), LOOKS)
def test_job_page_shows_cost_of_last_preemption(
    chromium: Browser,
    world: ControllerInProcess,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    look: str,
    dark: bool,
    width: int,
) -> None:
    monkeypatch.setattr(attempt, "AT_ONCE_S", 0.0)  # later than that, a lost host costs a preemption
    world.start("pretrain", tpu_type="v4-32", max_retries_preemption=10)
    world.kill_host(world.status("pretrain").groups[0], 1)
    world.wait_for_attempt("pretrain", 2)

    def story(page: "Page") -> str:
        page.goto(f"{url}/#/jobs")
        waits_for(page, "1 preemption")
        picture(page, f"{look}-jobs-with-a-preemption")
        page.goto(f"{url}/#/jobs/pretrain")
        waits_for(page, "The last loss of a host, which ended attempt 1, cost")
        picture(page, f"{look}-last-preemption")
        return page.locator(".last-cost").inner_text()

    assert "until its code ran again" in chromium.see(story, dark=dark, width=width, height=1100)


@pytest.mark.parametrize(("look", "dark", "width"), LOOKS)
def test_fleet_of_5000_hosts_fits_its_window(chromium: Browser, url: str, look: str, dark: bool, width: int) -> None:
    """The rows are copies of those of the small cluster."""

    def many(route: "Route") -> None:
        answer = route.fetch()
        body = answer.json()
        rows = [row for row in body["tables"]["slices"].values() if row["type"] == "v4-32"]
        for number in range(4, 1252):
            name = f"v4-32-{number}"
            body["tables"]["slices"][name] = rows[number % len(rows)] | {"name": name}
        route.fulfill(response=answer, json=body)

    def story(page: "Page") -> int:
        page.route("**/api/snapshot", many)
        page.goto(f"{url}/#/fleet")
        page.locator("a.tile", has_text="v4-32-1251").wait_for(timeout=PATIENCE_MS)
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        page.get_by_text("What the marks mean").click()
        picture(page, f"{look}-fleet-of-5000-hosts")
        return page.locator(".cell").count()

    assert chromium.see(story, dark=dark, width=width) > 5000


def test_keyboard_leads_to_slice_and_its_reason(chromium: Browser, url: str) -> None:
    def story(page: "Page") -> None:
        page.goto(f"{url}/#/fleet")
        page.locator("a.tile.closed").wait_for(timeout=PATIENCE_MS)
        page.bring_to_front()
        page.keyboard.press("Tab")
        page.locator(".skip:focus").wait_for(timeout=PATIENCE_MS)
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.locator("a.tile.closed").focus()
        page.keyboard.press("Enter")
        waits_for(page, "drained (a fan is broken)")

    chromium.see(story)


def test_chosen_theme_is_kept(chromium: Browser, url: str) -> None:
    def story(page: "Page") -> list[str]:
        page.goto(f"{url}/#/users")
        page.locator("h1").wait_for(timeout=PATIENCE_MS)
        colours = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
        for _ in range(2):
            page.locator("#theme").click()
        page.reload()
        page.locator("h1").wait_for(timeout=PATIENCE_MS)
        return [*colours, page.evaluate("getComputedStyle(document.body).backgroundColor")]

    light, dark = chromium.see(story)
    assert light != dark


def test_page_recovers_by_itself(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    def story(page: "Page") -> None:
        page.goto(f"{url}/#/jobs")
        waits_for(page, "train-llama")
        page.context.set_offline(True)
        page.evaluate("window.dispatchEvent(new Event('offline'))")
        page.context.set_offline(False)
        world.submit("late", user="dee")
        waits_for(page, "late")

    chromium.see(story)
    chromium.troubles[:] = [text for text in chromium.troubles if "ERR_INTERNET_DISCONNECTED" not in text]


def test_fleet_shows_what_provisioners_have_asked_for(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    waiting = SliceBatch("v6e-16", "us-east5-a", "spot", False, 2, 32, time.time() - 720, 25.6)
    held = SliceBatch("v6e-16", "us-central1-b", "reserved", True, 1, 16, time.time() - 7200, None)
    trouble = Trouble("v6e-16", "us-east5-a", 2, "<b>no capacity</b>")
    report = CapacityReport(
        "iris", ("v6e-16", "v7x-8"), (waiting, held), (trouble,), (("v7x-8", "the budget is spent"),)
    )
    ControllerConnection().ask(CapacityCalls.report_capacity, report)

    def story(page: "Page") -> list[str]:
        page.goto(f"{url}/#/fleet")
        waits_for(page, "2 asked for")
        picture(page, "provisioned")
        return [row.inner_text().replace("\t", " ") for row in page.locator("section table tbody tr").all()]

    central, east, none = chromium.see(story)
    assert central.startswith("v6e-16 us-central1-b reserved 1 held 16 ")
    assert east.startswith("v6e-16 us-east5-a spot 2 asked for 32 12m")
    assert east.endswith("25.6 USD <b>no capacity</b>")
    assert none.endswith("the budget is spent")


def test_history_shows_time_and_jobs_of_it(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    world.succeed("ablate-lr")

    def story(page: "Page") -> None:
        page.goto(f"{url}/#/history")
        assert page.locator(".chart").count() in (0, 3)
        page.locator(".chart").nth(2).wait_for(timeout=PATIENCE_MS)
        page.locator(".plot").first.hover()
        waits_for(page, "of 416 chips (production 32")
        page.get_by_role("button", name="30 days").click()
        page.get_by_label("Type").select_option("v4-32")
        # The world's own minute has fewer of these chips, and weighs more if the latest step has just begun.
        page.get_by_text(re.compile(r"% of 2[45]\d")).first.wait_for(timeout=PATIENCE_MS)
        page.get_by_label("Search jobs").fill("ablate")
        page.get_by_label("Search jobs").press("Enter")
        row = page.locator("tbody tr", has_text="ablate-lr")
        row.wait_for(timeout=PATIENCE_MS)
        assert "succeeded" in row.inner_text()
        assert page.locator("tbody tr").count() == 1

    chromium.see(story)


def test_job_page_shows_curves(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    assert world.history is not None
    (job,) = world.json("history", "--name", "train-llama")
    at = job["submitted_at"]
    points = [CurvePoint("train-llama", at, at + 60 * n, 100 * n, {"loss": 3 - n / 2}) for n in range(4)]
    HistoryFile(world.history / NAME, Bounds(400, 100)).write(points)

    def story(page: "Page") -> None:
        page.goto(f"{url}/#/jobs/train-llama")
        page.locator(".small-chart").nth(1).wait_for(timeout=PATIENCE_MS)
        picture(page, "curves")
        assert page.locator("h3").all_inner_texts() == ["steps per second", "loss"]
        waits_for(page, "3 at first, now 1.5")

    chromium.see(story)


def test_two_runs_are_compared_by_step_and_by_time(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    assert world.history is not None
    jobs = {name: world.json("history", "--name", name)[0]["submitted_at"] for name in ("train-llama", "ablate-lr")}
    points = [
        CurvePoint(name, at, at + 60 * n, 100 * n * speed, {"loss": 3 - n / 2 / speed})
        for speed, (name, at) in enumerate(jobs.items(), 1)
        for n in range(4)
    ]
    HistoryFile(world.history / NAME, Bounds(400, 100)).write(points)

    def story(page: "Page") -> None:
        page.goto(f"{url}/#/jobs/train-llama")
        page.get_by_role("link", name="compare with another run").click()
        page.locator("#run1").fill("ablate-lr")
        page.locator("#run1").press("Enter")
        page.locator(".chart").nth(1).wait_for(timeout=PATIENCE_MS)
        assert page.locator("h3").all_inner_texts() == ["steps per second", "loss"]
        waits_for(page, "train-llama: 3 at step 0, 1.5 at step 300; ablate-lr: 3 at step 0, 2.25 at step 600")
        assert page.locator(".chart polyline").count() == 4
        page.get_by_role("button", name="by time").click()
        waits_for(page, "train-llama: 3 at 0s, 1.5 at ")
        assert re.search(r"ablate-lr: 3 at 0s, 2.25 at (2m5[5-9]|3m00)s", page.locator(".charts").inner_text())
        users = page.locator("tr", has_text="User").locator("td").all_inner_texts()
        assert users[1:] == ["ann", "bob"]
        picture(page, "compared")
        page.locator("#run0").fill("nobody")
        page.locator("#run0").press("Enter")
        waits_for(page, "The history has no job nobody")

    chromium.see(story)


def test_compare_page_keeps_its_curves_when_the_history_does_not_answer(chromium: Browser, url: str) -> None:
    def unavailable(route: "Route") -> None:
        route.fulfill(status=503, json={"error": "the Controller does not answer; try again"})

    def story(page: "Page") -> None:
        page.clock.install()
        page.goto(f"{url}/#/compare/train-llama,ablate-lr")
        waits_for(page, "Chip-hours lost")
        page.route("**/api/history/jobs/*", unavailable)
        page.clock.fast_forward(61_000)
        waits_for(page, "the Controller does not answer; try again")
        assert page.get_by_text("The history has no job").count() == 0
        assert page.get_by_text("Chip-hours lost").first.is_visible()

    chromium.see(story)
    chromium.troubles[:] = [text for text in chromium.troubles if "503" not in text]


def test_page_of_forgotten_job_comes_from_history(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    world.fail("ablate-lr", 2)
    assert world.json("history", "ablate-lr")["job"]["state"] == "failed"
    world.forget("ablate-lr", tpu_type="v4-32")

    def story(page: "Page") -> str:
        page.goto(f"{url}/#/jobs/ablate-lr")
        waits_for(page, "the Controller has forgotten it")
        picture(page, "forgotten-job")
        return page.locator("tbody tr").first.inner_text()

    attempt = chromium.see(story)
    assert "crashed" in attempt
    assert "v4-32-0/2" in attempt
    chromium.troubles[:] = [text for text in chromium.troubles if "404" not in text]


def test_history_page_without_history_says_so(chromium: Browser, world: ControllerInProcess, url: str) -> None:
    world.iris("cluster", "settings", "set", "history=off", user="olga")

    def story(page: "Page") -> None:
        page.goto(f"{url}/#/history")
        waits_for(page, "this cluster keeps no history")

    chromium.see(story)
    chromium.troubles[:] = [text for text in chromium.troubles if "503" not in text]
