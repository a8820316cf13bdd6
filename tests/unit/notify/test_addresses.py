"""Webhooks can't reach loopback, metadata servers and private networks, unless an operator allows it."""

import ipaddress

import pytest

from iris_ray.notify.addresses import RefusedAddressError, checked_url, require_public
from iris_ray.notify.settings import NOTIFY_PRIVATE, PrivateHosts

NONE = PrivateHosts()


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.1", "2130706433", "0x7f000001", "017700000001", "0", "0.0.0.0", "10.0.0.1", "192.168.1.1",
        "172.16.0.1", "100.64.0.1", "169.254.169.254", "0xA9FEA9FE", "[::1]", "[::]", "[fe80::1]", "[fd20:ce::254]",
        "[::ffff:127.0.0.1]", "[::ffff:169.254.169.254]", "[64:ff9b::a9fe:a9fe]", "[2002:7f00:1::]", "224.0.0.1",
        "255.255.255.255", "[ff02::1]", "１２７.0.0.1", "[::a9fe:a9fe]", "[fec0::1]",
        "[64:ff9b:1::7f00:1]", "[5f00::1]",
    ],
)  # fmt: skip
def test_private_address_is_refused_however_it_is_written(host: str) -> None:
    with pytest.raises(RefusedAddressError, match=r"private address|not the URL"):
        checked_url(f"https://{host}/x", NONE)


@pytest.mark.parametrize(
    "text",
    ["", "hooks.example.org", "ftp://example.org/", "file:///etc/passwd", "https://", "https://a b/", "https://x:99999/",
     "gopher://x", "https://example.org/\r\nHost: x", "https://[::1", "http+unix://x", "https://" + "x" * 5000],
)  # fmt: skip
def test_text_that_is_no_webhook_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(RefusedAddressError, match="the secret is not the URL") as refused:
        checked_url(text, NONE)
    assert "passwd" not in str(refused.value)


def test_webhook_without_tls_is_refused_unless_host_is_listed() -> None:
    with pytest.raises(RefusedAddressError, match="not on https"):
        checked_url("http://hooks.example.org/x", NONE)
    listed = NOTIFY_PRIVATE.parse("alerts.internal,10.1.0.0/16,127.0.0.1")
    for url in (
        "http://Alerts.internal/x",
        "http://10.1.2.3:8080/x",
        "http://127.1:9/x",
        "https://hooks.example.org/x",
    ):
        assert str(checked_url(url, listed))
    with pytest.raises(RefusedAddressError, match="private address"):
        checked_url("http://169.254.169.254/x", listed)


def test_name_that_resolves_to_private_address_is_refused() -> None:
    with pytest.raises(RefusedAddressError):
        require_public(ipaddress.ip_address("169.254.169.254"), "innocent.example.org", NONE)
    require_public(ipaddress.ip_address("8.8.8.8"), "innocent.example.org", NONE)
    require_public(ipaddress.ip_address("2606:4700::1111"), "innocent.example.org", NONE)
