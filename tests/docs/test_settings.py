"""The pages have a line for every variable that users set, and for every setting of a cluster."""

import re

from iris_ray.actors.protocol.services import all_settings
from iris_ray.logs.files import FILE_BYTES, FILES_KEPT, HOST_BYTES, HOST_FILES, KEPT_S
from iris_ray.model.limits import DEFAULT_LIMITS
from iris_ray.settings import (
    TEST_CLOUD_TPU_ENDPOINT,
    TEST_COMPUTE_ENDPOINT,
    TEST_HOST_SILENCE_S,
    TEST_METADATA_HOST,
    VARIABLES,
)
from tests.docs.pages import REPOSITORY

OF_TESTS = {TEST_CLOUD_TPU_ENDPOINT, TEST_COMPUTE_ENDPOINT, TEST_HOST_SILENCE_S, TEST_METADATA_HOST}


def test_page_has_a_line_for_every_variable_and_no_other() -> None:
    page = (REPOSITORY / "docs" / "environment.md").read_text().partition("## Variables that a task gets")[0]
    lines = re.findall(r"^\| `(IRIS_\w+)` \| ([^|]+) \| (.+) \|$", page, re.MULTILINE)
    assert sorted(lines) == sorted((one.name, one.where, one.meaning) for one in VARIABLES)
    assert set(re.findall(r"IRIS_RAY_TEST_\w+", page)) == OF_TESTS


def test_pages_have_the_default_limits() -> None:
    page = " ".join((REPOSITORY / "docs" / "sharing-a-cluster.md").read_text().split())
    chips, running, queued, tasks = (f"{value:,}" for _, value in DEFAULT_LIMITS.items())
    assert f"{chips} chips, {running} running jobs, {queued} queued jobs and {tasks} tasks" in page
    assert (FILE_BYTES * FILES_KEPT, HOST_BYTES, HOST_FILES, KEPT_S) == (320 << 20, 2 << 30, 20_000, 14 * 86_400)
    disks = " ".join((REPOSITORY / "docs" / "memory-and-disks.md").read_text().split())
    assert "may take 2 GiB and 20,000 files, and are kept for 14 days" in disks


def test_page_has_a_line_for_every_setting_of_a_cluster() -> None:
    page = (REPOSITORY / "docs" / "operating.md").read_text()
    lines = re.findall(r"^\| `(\w+)` \| `(\w+)` \| ([^|]+) \| (.+) \|$", page, re.MULTILINE)
    assert lines == [(one.name, one.default, one.form, one.help) for one in all_settings().values()]
