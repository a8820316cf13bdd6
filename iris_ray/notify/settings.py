"""The cluster settings of notifications."""

import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from iris_ray.errors import InvalidRequestError
from iris_ray.model.cluster_settings import OFF, ClusterSetting
from iris_ray.model.secret import is_secret_name
from iris_ray.notify.destination import COMMAND_NAME, EMAIL, Destination, parse_destinations

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_HOST: Final = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
MOST_RULES: Final = 20


@dataclass(frozen=True, slots=True)
class PrivateHosts:
    """The hosts in private networks to which notifications may be sent.

    Attributes:
        names: names of hosts, in lower case.
        networks: networks of addresses.
    """

    names: frozenset[str] = frozenset()
    networks: tuple[Network, ...] = ()


@dataclass(frozen=True, slots=True)
class Smtp:
    """The server that sends e-mail.

    Attributes:
        host, port: the server.
        sender: the address in From.
        tls: "starttls", "tls" from the first byte, or "off".
        login: the name of the secret with ``user:password``; empty without a login.
        domains: the domains to which e-mail may be sent, in lower case.
    """

    host: str
    port: int
    sender: str
    tls: str = "starttls"
    login: str = ""
    domains: frozenset[str] = frozenset()

    def sends_to(self, address: str) -> bool:
        """Whether it may send e-mail to an address."""
        return address.rpartition("@")[2].lower() in self.domains


def _rule(text: str) -> tuple[Destination, ...]:
    if text == OFF:
        return ()
    try:
        found = parse_destinations(text)
    except InvalidRequestError as error:
        raise ValueError(str(error)) from None
    if not found or len(found) > MOST_RULES:
        raise ValueError(f"give 1 to {MOST_RULES} destinations, separated by spaces; or {OFF}")
    if any(one.lines for one in found):
        raise ValueError("lines= is for a job's own destinations: only its user decides who sees its output")
    return found


def _commands(text: str) -> Mapping[str, Sequence[str]]:
    if text == OFF:
        return {}
    form = 'give lists of arguments by name, as JSON: {"page": ["/usr/local/bin/page", "--team", "ml"]}; or off'
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(form) from None
    if not isinstance(found, dict):
        raise ValueError(form)
    for name, words in found.items():
        is_list = isinstance(words, list) and words and all(isinstance(one, str) and "\0" not in one for one in words)
        if not COMMAND_NAME.fullmatch(name) or not is_list or not words[0].startswith("/"):
            raise ValueError(f"{form}. The first argument is an absolute path; no shell reads the others")
    return {name: tuple(words) for name, words in found.items()}


def _smtp(text: str) -> Smtp | None:
    if text == OFF:
        return None
    form = f"give HOST:PORT,from=ADDRESS[,tls=starttls|tls|off][,login=SECRET][,to=DOMAIN+DOMAIN], or {OFF}"
    place, *options = text.split(",")
    host, colon, port = place.rpartition(":")
    words = dict(option.strip().split("=", 1) for option in options if "=" in option)
    sender, tls, login = words.pop("from", ""), words.pop("tls", "starttls"), words.pop("login", "")
    to = words.pop("to", sender.rpartition("@")[2])
    fits = _HOST.fullmatch(host) and colon and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536
    if not fits or words or len(set(options)) != len(options) or any("=" not in one for one in options):
        raise ValueError(form)
    domains = frozenset(to.lower().split("+"))
    if not EMAIL.fullmatch(sender) or tls not in ("starttls", "tls", "off"):
        raise ValueError(form)
    if not all(EMAIL.fullmatch(f"a@{domain}") for domain in domains):
        raise ValueError(f"to has something that is not a domain; {form}")
    if login and not is_secret_name(login):
        raise ValueError(f"login is the name of a secret with user:password; {form}")
    if login and tls == "off":
        raise ValueError("a password is not sent without TLS; give tls=starttls or tls=tls, or leave login out")
    return Smtp(host, int(port), sender, tls, login, domains)


def _private(text: str) -> PrivateHosts:
    if text == OFF:
        return PrivateHosts()
    names, networks = set(), []
    for word in filter(None, map(str.strip, text.split(","))):
        try:
            networks.append(ipaddress.ip_network(word))
        except ValueError:
            if "/" in word or not _HOST.fullmatch(word):
                raise ValueError(
                    f"give names of hosts, addresses or networks, separated by commas, as in alerts.internal,"
                    f"10.1.0.0/16; or {OFF}"
                ) from None
            names.add(word.lower())
    return PrivateHosts(frozenset(names), tuple(networks))


NOTIFY = ClusterSetting(
    "notify",
    OFF,
    f"destinations, separated by spaces; or {OFF}",
    "Where notifications about all jobs are sent, in addition to the destinations of each job.",
    _rule,
)
NOTIFY_COMMANDS = ClusterSetting(
    "notify_commands",
    OFF,
    f"lists of arguments by name, as JSON; or {OFF}",
    "Commands on the head that notifications may start, by the name in command:NAME.",
    _commands,
)
NOTIFY_SMTP = ClusterSetting(
    "notify_smtp",
    OFF,
    f"HOST:PORT,from=ADDRESS[,tls=…][,login=SECRET][,to=DOMAINS]; or {OFF}",
    "The server that sends notifications by e-mail; only to the domain of its own address, or to those of to=.",
    _smtp,
)
NOTIFY_PRIVATE = ClusterSetting(
    "notify_private",
    OFF,
    f"hosts and networks, separated by commas; or {OFF}",
    "Private hosts and networks to which webhooks may be sent; if the URL names them, also without TLS.",
    _private,
)

SETTINGS: Final = (NOTIFY, NOTIFY_COMMANDS, NOTIFY_SMTP, NOTIFY_PRIVATE)
