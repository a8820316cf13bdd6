"""Destinations of notifications as people write them, and the settings of a cluster for them."""

import pytest

from iris_ray.errors import InvalidRequestError
from iris_ray.model.cluster_settings import ClusterSetting
from iris_ray.model.options import PriorityBand
from iris_ray.notify.destination import DEFAULT_ON, Channel, Destination, What, parse_destination, parse_destinations
from iris_ray.notify.settings import NOTIFY, NOTIFY_COMMANDS, NOTIFY_PRIVATE, NOTIFY_SMTP


def test_destination_with_all_options_is_read() -> None:
    found = parse_destination("http:HOOK,on=ended+lost,lines=20,wait=2h,chip-hours=100.5,key=KEY,band=production")
    assert found == Destination(
        Channel.HTTP,
        "HOOK",
        frozenset({What.SUCCEEDED, What.FAILED, What.LOST}),
        20,
        7200.0,
        100.5,
        "KEY",
        frozenset({PriorityBand.PRODUCTION}),
    )
    assert found.place == "http:HOOK"
    assert found.secret_names == ("HOOK", "KEY")


def test_destinations_have_defaults_and_are_separated() -> None:
    slack, mail = parse_destinations("slack:TEAM_HOOK ;\n email:ann@example.org ")
    assert (slack.on, slack.lines, mail.place, mail.secret_names) == (DEFAULT_ON, 0, "email:ann@example.org", ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no channel"),
        ("slack", "it has no channel"),
        ("irc:x", "one of http, slack, googlechat, email, command"),
        ("Slack:X", "there is no channel 'Slack'; did you mean slack?"),
        ("irc:X", "there is no channel 'irc'; give CHANNEL:NAME"),
        ("slack:a b", "the name of the secret"),
        ("slack:../x", "the name of the secret"),
        ("email:ann", "give an address"),
        ("email:ann@example.org\nBcc: all@example.org", "give an address"),
        ("email:a@b.org%0abcc", "give an address"),
        ("command:/bin/sh", "the name of a command"),
        ("command:-x", "the name of a command"),
        ("http:HOOK", "have to be signed"),
        ("slack:HOOK,key=K", "only http has a key"),
        ("slack:HOOK,on=", "give one or more of started"),
        ("slack:HOOK,on=done", "give one or more of started"),
        ("slack:HOOK,lines=51", "50 at most"),
        ("slack:HOOK,lines=-1", "50 at most"),
        ("slack:HOOK,lines=1e1", "50 at most"),
        ("slack:HOOK,lines=١", "50 at most"),
        ("slack:HOOK,lines=1,lines=2", "twice"),
        ("slack:HOOK,wait=1", "a minute or more"),
        ("slack:HOOK,wait=nan", "is not a duration"),
        ("slack:HOOK,chip-hours=0", "more than 0"),
        ("slack:HOOK,chip-hours=inf", "more than 0"),
        ("slack:HOOK,color=red", "the options are on"),
        ("slack:HOOK,", "the options are on"),
        ("slack:HOOK,band=high", "give one or more of system, production"),
    ],
)
def test_bad_destination_is_refused_with_advice(text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_destination(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("url", ["https://hooks.example.org/s3cr3t", "slack:https://x/s3cr3t", "https:x,s3cr3t"])
def test_address_of_webhook_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(InvalidRequestError, match="cluster secrets set") as refused:
        parse_destination(url)
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    ["slack:hooks.example.org/services/s3cr3t", "http:HOOK,key=whsec_s3cr3t", "http:HOOK,key=whsec_s3cr3t+/="],
)
def test_address_or_key_in_place_of_a_name_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="the name of a secret") as refused:
        parse_destination(text)
    assert "s3cr3t" not in str(refused.value)


@pytest.mark.parametrize(
    ("setting", "text", "said"),
    [
        (NOTIFY, "slack", "it has no channel"),
        (NOTIFY, " ", "give 1 to 20"),
        (NOTIFY, "slack:A,lines=3", "only its user decides who sees its output"),
        (NOTIFY, " ".join(["slack:A"] * 21), "give 1 to 20"),
        (NOTIFY_COMMANDS, "page", "as JSON"),
        (NOTIFY_COMMANDS, "[" * 100_000, "as JSON"),
        (NOTIFY_COMMANDS, '{"page": "/bin/page"}', "as JSON"),
        (NOTIFY_COMMANDS, '{"page": ["page"]}', "an absolute path"),
        (NOTIFY_COMMANDS, '{"page": []}', "as JSON"),
        (NOTIFY_COMMANDS, '{"a b": ["/x"]}', "as JSON"),
        (NOTIFY_COMMANDS, '{"page": ["/x", "\\u0000"]}', "as JSON"),
        (NOTIFY_SMTP, "mail", "give HOST:PORT"),
        (NOTIFY_SMTP, "mail:0,from=a@example.org", "give HOST:PORT"),
        (NOTIFY_SMTP, "mail:25", "give HOST:PORT"),
        (NOTIFY_SMTP, "mail:25,from=a@example.org,x", "give HOST:PORT"),
        (NOTIFY_SMTP, "mail:25,from=a@example.org,tls=maybe", "give HOST:PORT"),
        (NOTIFY_SMTP, "mail:25,from=a@example.org,to=*", "not a domain"),
        (NOTIFY_SMTP, "mail:25,from=a@example.org,login=a b", "the name of a secret"),
        (NOTIFY_SMTP, "mail:25,from=a@example.org,tls=off,login=X", "not sent without TLS"),
        (NOTIFY_PRIVATE, "10.0.0.1/8", "names of hosts, addresses or networks"),
        (NOTIFY_PRIVATE, "http://x", "names of hosts, addresses or networks"),
    ],
)
def test_bad_setting_is_refused_with_advice(setting: ClusterSetting[object], text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        setting.checked(text)
    assert said in str(refused.value)


def test_email_goes_only_to_domains_that_the_setting_names() -> None:
    own = NOTIFY_SMTP.parse("mail:587,from=iris@example.org")
    assert own is not None
    assert (own.tls, own.sends_to("Ann@Example.ORG"), own.sends_to("ann@evil.org")) == ("starttls", True, False)
    assert not own.sends_to("ann@sub.example.org")
    two = NOTIFY_SMTP.parse("mail:465,from=iris@example.org,tls=tls,to=a.org+b.org,login=SMTP")
    assert two is not None
    assert (two.sends_to("x@b.org"), two.sends_to("x@example.org"), two.login) == (True, False, "SMTP")
