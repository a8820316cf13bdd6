"""Where a host's metadata server is."""

from iris_ray.actors.host.metadata import WELL_KNOWN_HOSTS, metadata_hosts


def test_metadata_host_comes_from_the_environment_or_is_the_well_known_one() -> None:
    assert metadata_hosts({"GCE_METADATA_HOST": "10.0.0.1:80"}) == ("10.0.0.1:80",)
    ours = {"IRIS_RAY_TEST_METADATA_HOST": "127.1.1.1:5", "GCE_METADATA_HOST": "10.0.0.1:80"}
    assert metadata_hosts(ours) == ("127.1.1.1:5",)
    assert metadata_hosts({"GCE_METADATA_HOST": ""}) == WELL_KNOWN_HOSTS
