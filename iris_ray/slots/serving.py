"""Serves the models of a TOML file, which has the hosts, models, keys and HTTP server, and may be read again."""

import importlib
import os
import re
import socket
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from iris_ray.errors import InvalidSlotError, IrisError
from iris_ray.model.checks import NAME, Holds, ListOf, Number, is_loopback, is_texts, nearest, require, shown
from iris_ray.model.constraints import AttributeValue, Constraint, ConstraintOp
from iris_ray.model.options import PriorityBand
from iris_ray.model.topology import get_tpu_config
from iris_ray.model.workers import TPU_NAME, TPU_TOPOLOGY, TPU_VM_COUNT, TPU_WORKER_ID
from iris_ray.slots.actors.messages import ModelOrder, SlotHosts
from iris_ray.slots.client.hold_host import require_possible
from iris_ray.slots.client.model_order import model_order
from iris_ray.slots.client.served_command import ServedCommand
from iris_ray.slots.client.slot_client import SlotClient
from iris_ray.slots.core.allocator import fits_when_empty
from iris_ray.slots.core.devices import UNKNOWN, DeviceKind, Runner
from iris_ray.slots.core.memory_estimates import SHARES, gguf_memory, read_gguf, split_memory
from iris_ray.slots.core.models import ModelSpec
from iris_ray.slots.core.policy import ServingPolicy
from iris_ray.slots.front.api_keys import ApiKey
from iris_ray.slots.front.http_front import HttpFront, check_front

T = TypeVar("T")
GB: Final = 10**9
_NUMBER_OF_DEVICES: Final = re.compile(r"[1-9][0-9]{0,17}")
SIMPLE_POLICY: Final = {each.name for each in fields(ServingPolicy)} - {"placement"}


@dataclass(frozen=True, slots=True)
class FileModel:
    """A model of the file.

    Attributes:
        model: a program, or where its class is: ``module:Class``.
        how: the other arguments of `SlotClient.register`.
        aliases: further names.
    """

    name: str
    model: ServedCommand | str
    how: Mapping[str, Any]
    aliases: Sequence[str]

    def order(self, kind: DeviceKind) -> ModelOrder:
        """Return the order of this model for a SlotManager.

        Args:
            kind: the kind of devices that it runs on if it does not say one.

        Raises:
            InvalidSlotError: it could not be served as written.
        """
        model = self.model if isinstance(self.model, ServedCommand) else class_at(self.model)
        return model_order(model, self.name, **{"kind": kind, **self.how})


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The contents of a file of models.

    Attributes:
        name: the name under which other processes find the models.
        host, port, timeout_s: see `HttpFront`.
        orders: the order of each model for a SlotManager. The classes of the models are imported to make them.

    Raises:
        InvalidSlotError: a model could not be served as written.
    """

    hosts: Sequence[SlotHosts]
    models: Mapping[str, FileModel]
    keys: Sequence[ApiKey] = ()
    name: str = "slots"
    host: str = "127.0.0.1"
    port: int = 8000
    timeout_s: float = 300.0
    policy: ServingPolicy = field(default_factory=ServingPolicy)
    orders: Mapping[str, ModelOrder] = field(init=False)

    def __post_init__(self) -> None:
        kinds = {each.kind for each in self.hosts}
        kind = kinds.pop() if len(kinds) == 1 else DeviceKind.GPU
        orders = {}
        for name, model in self.models.items():
            with _at(f"[models.{name}]"):
                orders[name] = model.order(kind)
        object.__setattr__(self, "orders", orders)

    @property
    def aliases(self) -> dict[str, str]:
        """The models by their aliases."""
        return {alias: model.name for model in self.models.values() for alias in model.aliases}

    def place(self, name: str) -> str:
        """Return where a model fits on an empty host, or "" if it fits nowhere."""
        spec = self.orders[name].spec
        for count in spec.memory:
            alone = _on(spec, count)
            if any(fits_when_empty(each.runner, alone) for each in suitable_hosts(self.hosts, spec)):
                return f"{_words(spec.sizes_on(count))} GB of {spec.kind.value}"
        return ""

    @property
    def fixed(self) -> tuple[object, ...]:
        """The settings that can't change while the file is served."""
        return self.hosts, self.name, self.host, self.port, self.timeout_s, self.policy


class ServedFile:
    """Serves the contents of a file, until it is closed.

    Args:
        client: has the file's hosts.
        said: the contents of the file.
    """

    def __init__(self, client: SlotClient, said: ModelsFile) -> None:
        self._client, self._said = client, said
        self._unsure: set[str] = set()
        """Models of changes that failed. The SlotManager may have made such a change, and only its answer was lost."""
        client._change(list(said.orders.values()))
        where: Any = {"host": said.host, "port": said.port, "timeout_s": said.timeout_s}
        self.front = HttpFront(client, **where, keys=said.keys, aliases=said.aliases)

    def recover(self) -> None:
        """Serve the models again after the SlotManager was lost, by a new one."""
        self._client._attach(list(self._said.orders.values()))

    def change(self, said: ModelsFile) -> list[str]:
        """Serve the new contents of the file. Running requests go on. Return the changes in words.

        The models change all at once, or not at all. An error other than `InvalidSlotError` leaves that open; then call
        it again, with the contents from before or after the change.

        Raises:
            InvalidSlotError: something changed that can't change while it is served. Nothing was changed.
        """
        before = self._said
        if said.fixed != before.fixed:
            raise InvalidSlotError(
                "hosts, name, address, timeout_s and policy hold until `iris-ray serve` is restarted"
            )
        differs = {name for name, model in said.models.items() if before.models.get(name) != model}
        changed = [name for name in said.models if name in differs | self._unsure]
        gone = sorted((before.models.keys() | self._unsure) - said.models.keys())
        self._unsure.update(changed, gone)
        self._client._change([said.orders[name] for name in changed], gone)
        self.front.set_access(said.keys, said.aliases)
        self._unsure.clear()
        self._said = said
        words = [f"{name} is {'changed' if name in before.models else 'new'}" for name in changed]
        words += [f"{name} is served no more" for name in gone]
        return words + (["keys have changed"] if list(said.keys) != list(before.keys) else [])


def class_at(place: str) -> type:
    """Return the class at ``module:Class``. A module that is imported already is not read again.

    Raises:
        InvalidSlotError: there is none, or its module can't be imported.
    """
    module, _, name = place.partition(":")
    try:
        found: type = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever a user's module raises
        why = f"{type(error).__name__}: {error}"
        raise InvalidSlotError(f"class {place!r} can't be imported ({why}); give module:Class") from None
    return found


def require_free_port(said: ModelsFile) -> None:
    """Refuse a port or address at which this process can't listen, before anything is acquired."""
    family = socket.AF_INET6 if ":" in said.host else socket.AF_INET
    try:
        socket.create_server((said.host, said.port), family=family).close()
    except socket.gaierror:  # perhaps a name of an IPv6 address, which `HttpFront` finds
        return
    except OSError as error:
        why = f"port {said.port} of {said.host} can't be used: {error.strerror or error}"
        raise InvalidSlotError(f"{why}; give a free port and an address of this machine") from None


# -- checks ------------------------------------------------------------------------------------------------------------

OF_A_HOST: Final = {TPU_NAME, TPU_WORKER_ID, "node-id"}
"""Attributes whose values nobody knows before the hosts are there."""


def check(found: ModelsFile) -> None:
    """Refuse contents that could not be served, before anything is acquired.

    Raises:
        InvalidSlotError: what makes no sense, and how to mend it.
    """
    if not found.hosts:
        raise InvalidSlotError("there are no hosts; describe them in a table [[hosts]]")
    if not found.models:
        raise InvalidSlotError("there are no models; give at least one table [models.NAME]")
    require("name", found.name, NAME, InvalidSlotError)
    names = [*found.models, *(alias for model in found.models.values() for alias in model.aliases)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidSlotError(f"{twice[0]} is the name of two models; give each name or alias once")
    if isinstance(found.host, str) and found.host and not found.keys and not is_loopback(found.host):
        raise InvalidSlotError(
            f"host is {found.host!r}, and without keys everybody who reaches it could use the models; add a table"
            " [keys.NAME] for each caller, or leave out host"
        )
    check_front(found.host, found.port, found.timeout_s, found.keys, found.aliases)
    require_possible(found.hosts, found.name)
    _check_places(found)
    _check_groups(found)
    for key in found.keys:
        if missing := set(key.models or ()) - found.models.keys():
            raise InvalidSlotError(f"key {key.name} may use {sorted(missing)[0]}, and there is no such model")


def _check_places(found: ModelsFile) -> None:
    """Refuse models that fit on no host, and more replicas than fit on all hosts."""
    for name, order in found.orders.items():
        spec = order.spec
        with _at(f"[models.{name}]"):
            of_kind = [each for each in found.hosts if each.kind is spec.kind]
            if not of_kind:
                raise InvalidSlotError(f"there are no hosts with {spec.kind.value} devices; get some, or give its kind")
            suitable = suitable_hosts(found.hosts, spec)
            if not suitable:
                asked = ", ".join(map(str, spec.constraints))
                raise InvalidSlotError(
                    f"constraints: no table [[hosts]] promises hosts with {asked}; give one the same constraints"
                )
            if not found.place(name):
                neighbours = " A slot has 1, 2, 4, … neighbouring chips of a host, or all."
                needs = " or ".join(f"{_words(spec.sizes_on(count))} GB" for count in spec.memory)
                there = " or ".join(dict.fromkeys(_words_of(each.runner) for each in suitable))
                raise InvalidSlotError(
                    f"it would fit on none of the hosts: it needs {needs}, and a host has {there}; give it less"
                    f" memory_gb or another number of devices, or larger hosts."
                    f"{neighbours if spec.kind is DeviceKind.TPU else ''}"
                )
            most = sum(_runners(each) * _most_slots(each.runner, spec) for each in suitable)
            if order.replicas > most:
                raise InvalidSlotError(f"replicas is {order.replicas}; all hosts together have room for {most}")


def suitable_hosts(hosts: Sequence[SlotHosts], spec: ModelSpec) -> list[SlotHosts]:
    """Return the hosts of a model's kind whose attributes, as far as the file tells them, can meet its constraints."""
    of_kind = [each for each in hosts if each.kind is spec.kind]
    return [each for each in of_kind if all(_can_meet(each, asked) for asked in spec.constraints)]


def _can_meet(hosts: SlotHosts, asked: Constraint) -> bool:
    if asked in hosts.constraints or asked.key in OF_A_HOST:
        return True
    values = list[AttributeValue]()
    for each in hosts.constraints:
        if each.key == asked.key and each.op in (ConstraintOp.EQ, ConstraintOp.IN):
            values += each.value if isinstance(each.value, tuple) else filter(None, [each.value])
    if hosts.tpu_type is not None:
        config = get_tpu_config(hosts.tpu_type)
        facts: dict[str, str | int] = {TPU_TOPOLOGY: config.name, TPU_VM_COUNT: config.vm_count}
        values += [AttributeValue(facts[asked.key])] if asked.key in facts else []
    try:
        allowed = asked.op in (ConstraintOp.NE, ConstraintOp.NOT_EXISTS) and not values
        return allowed or any(map(asked.accepts, values))
    except TypeError:  # it can't be compared
        return False


def _most_slots(runner: Runner, spec: ModelSpec) -> int:
    """Return an upper bound for the slots of a model on an empty runner."""
    memory, charge = [device.memory for device in runner.devices], runner.devices[0].charge
    fits = [count for count in spec.memory if fits_when_empty(runner, _on(spec, count))]
    taken = [[charge(size) for size in spec.sizes_on(count)] for count in fits]
    if len(taken) == 1 and len(set(taken[0])) == 1:
        return sum(each // taken[0][0] for each in memory) // len(taken[0])
    return sum(memory) // min(map(sum, taken), default=2**62)


def _on(spec: ModelSpec, count: int) -> ModelSpec:
    """Return the model on this number of devices alone."""
    return replace(spec, memory={count: spec.sizes_on(count)})


def _words(sizes: Sequence[int]) -> str:
    """Return the gigabytes of devices: 2 × 6, or 12 + 6."""
    each = [f"{size / GB:.10g}" for size in sizes]
    return f"{len(each)} × {each[0]}" if len(set(sizes)) == 1 else " + ".join(each)


def _words_of(runner: Runner) -> str:
    sizes = [device.memory for device in runner.devices]
    return f"{len(sizes)} devices of unknown size" if sizes[0] == UNKNOWN else f"{_words(sizes)} GB"


def _check_groups(found: ModelsFile) -> None:
    """Refuse groups of one model, and models that replicas of others may keep from every host."""
    specs = {name: order.spec for name, order in found.orders.items()}
    groups = [spec.group for spec in specs.values() if spec.group]
    for name, spec in specs.items():
        with _at(f"[models.{name}]"):
            if groups.count(spec.group) == 1:
                near = nearest(spec.group, set(groups) - {spec.group})
                hint = f"did you mean {near[0]!r}?" if near else "give it to another one, or leave it out"
                raise InvalidSlotError(f"group: no other model has group = {spec.group!r}; {hint}")
            kept = {other: found.orders[other].replicas for other, each in specs.items() if spec.excludes(each)}
            kept = {other: count for other, count in kept.items() if count and specs[other].kind is spec.kind}
            hosts = sum(_runners(each) for each in found.hosts if each.kind is spec.kind)
            if kept and sum(kept.values()) >= hosts:
                key = "alone" if spec.alone or any(specs[other].alone for other in kept) else "group"
                raise InvalidSlotError(
                    f"{key}: it must not share a host with {', '.join(kept)}, whose replicas are never evicted and may"
                    " be on every host; give fewer replicas, or more hosts"
                )


def _runners(hosts: SlotHosts) -> int:
    """Return the number of runners of these hosts. A whole slice is one runner."""
    is_slice = hosts.tpu_type is not None and not hosts.whole_slices
    return hosts.count * (get_tpu_config(hosts.tpu_type).vm_count if is_slice and hosts.tpu_type else 1)


# -- reading -----------------------------------------------------------------------------------------------------------


def read(path: Path, environ: Mapping[str, str] = os.environ) -> ModelsFile:
    """Read a file of models.

    Args:
        environ: has the secrets of keys that name a variable.

    Raises:
        InvalidSlotError: it can't be served as written; the message names the place.
    """
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidSlotError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidSlotError(f"{path} can't be read: {error}") from None
    with _at(str(path)):
        _check_names(table, {"name", "host", "port", "timeout_s", "hosts", "models", "keys", "policy"})
        plain = {name: table[name] for name in ("name", "host", "port", "timeout_s") if name in table}
        with _at("[[hosts]]"):
            hosts = [_hosts(each) for each in _list(table.get("hosts", []), "[[hosts]]")]
        models = {name: _model(name, each, path.parent) for name, each in _tables(table, "models")}
        keys = [_key(name, each, environ) for name, each in _tables(table, "keys")]
        with _at("[policy]"):
            _check_names(table.get("policy", {}), SIMPLE_POLICY)
            policy = ServingPolicy(**table.get("policy", {}))
        found = ModelsFile(hosts, models, keys, **plain, policy=policy)
        check(found)
    return found


def _hosts(table: Mapping[str, Any]) -> SlotHosts:
    simple = {"count", "devices", "tpu_type", "whole_slices"}
    _check_names(table, simple | {"kind", "memory_gb", "constraints", "preferences", "priority", "tolerations"})
    found = {name: table[name] for name in simple if name in table}
    if "kind" in table:
        found["kind"] = _choice(DeviceKind, table["kind"], "kind")
    if "memory_gb" in table:
        found["memory"] = _bytes_of_each(table["memory_gb"])
    elif found.get("kind") is not DeviceKind.GPU:
        raise InvalidSlotError(
            "it has no memory_gb; give the gigabytes of each chip, or of the host for CPUs. Only GPUs can say it"
        )
    if "priority" in table:
        found["priority"] = _choice(PriorityBand, table["priority"], "priority")
    for name in {"constraints", "preferences"} & table.keys():
        found[name] = tuple(map(Constraint.parse, _texts(table[name], name)))
    return SlotHosts(**found, tolerations=_texts(table.get("tolerations", []), "tolerations"))


def _model(name: str, table: Mapping[str, Any], directory: Path) -> FileModel:
    of_program = {"health", "load_s", "environment"}
    simple = {"concurrency", "runtime", "lora", "idle_s", "group", "alone", "arguments", "replicas", "prewarm"}
    with _at(f"[models.{name}]"):
        others = {"command", "class", "memory_gb", "gguf", "context", "kind", "constraints", "aliases"}
        _check_names(table, of_program | simple | others)
        if ("command" in table) == ("class" in table):
            raise InvalidSlotError('give either command = "PROGRAM … --port {port}", or class = "module:Class"')
        how = {each: table[each] for each in simple if each in table}
        if "memory_gb" in table:
            how["memory"] = _memory(table["memory_gb"])
        if {"gguf", "context"} & table.keys():
            how["memory"] = _memory_of_gguf(table, directory)
        if "kind" in table:
            how["kind"] = _choice(DeviceKind, table["kind"], "kind")
        if "constraints" in table:
            how["constraints"] = tuple(map(Constraint.parse, _texts(table["constraints"], "constraints")))
        model: ServedCommand | str
        if "command" in table:
            model = ServedCommand(table["command"], **{each: table[each] for each in of_program if each in table})
            if "memory" not in how:
                raise InvalidSlotError(
                    "a program needs memory_gb: gigabytes on a device, or { 1 = 16, 2 = 9 }; or gguf and context"
                )
        elif wrong := {"health", "environment"} & table.keys():
            raise InvalidSlotError(f"{min(wrong)} is for programs; a class has a method of its own")
        else:
            model = str(table["class"])
            how |= {"load_s": table["load_s"]} if "load_s" in table else {}
        return FileModel(name, model, how, _texts(table.get("aliases", []), "aliases"))


def _key(name: str, table: Mapping[str, Any], environ: Mapping[str, str]) -> ApiKey:
    with _at(f"[keys.{name}]"):
        _check_names(table, {"secret", "variable", "models", "at_a_time", "per_minute"})
        if ("secret" in table) == ("variable" in table):
            raise InvalidSlotError('give either variable = "NAME", an environment variable with the key, or secret')
        if "variable" in table:
            require("variable", table["variable"], NAME, InvalidSlotError)
        secret = table["secret"] if "secret" in table else environ.get(table["variable"], "")
        if not secret:
            raise InvalidSlotError(f"the environment variable {table.get('variable')} is not set; it has to be the key")
        limits = {each: table[each] for each in ("at_a_time", "per_minute") if each in table}
        limits |= {"models": _texts(table["models"], "models")} if "models" in table else {}
        return ApiKey(name, secret, **limits)


def _memory(given: Any) -> dict[int, int | Sequence[int]]:
    if isinstance(given, dict) and "total" in given:
        _check_names(given, {"total", "on"})
        on = given.get("on", [1])
        require("memory_gb: on", on, ListOf(int, "a list of numbers of devices, such as [2, 4]"), InvalidSlotError)
        return dict(split_memory(_bytes(given["total"]), on))
    if isinstance(given, list):
        raise InvalidSlotError(
            f"memory_gb is {shown(given)}; give the number of devices with the gigabytes of each, such as"
            " { 2 = [12, 6] }"
        )
    by_number = given if isinstance(given, dict) else {"1": given}
    if not all(map(_NUMBER_OF_DEVICES.fullmatch, by_number)):
        raise InvalidSlotError(
            f"memory_gb is {shown(given)}; give gigabytes by the number of devices, such as {{ 1 = 16 }}"
        )
    return {int(number): _bytes_of_each(each) for number, each in by_number.items()}


def _memory_of_gguf(table: Mapping[str, Any], directory: Path) -> dict[int, int | tuple[int, ...]]:
    """Return the memory of a model whose weights are a GGUF file, as `gguf_memory` estimates it.

    Args:
        table: the model's.
        directory: that of the file of models, to which the path of the GGUF file is relative.
    """
    if "memory_gb" in table:
        raise InvalidSlotError("give either gguf and context, or memory_gb")
    if lacks := [each for each in ("gguf", "context", "concurrency") if each not in table]:
        raise InvalidSlotError(
            f"{lacks[0]} is missing: the memory follows from the GGUF file, from context, the tokens of a request with"
            " its answer, and from concurrency, as each of the requests at a time has a cache of its own"
        )
    given = table["gguf"] if isinstance(table["gguf"], dict) else {"path": table["gguf"]}
    _check_names(given, {"path", "on", "split"})
    require("gguf", given.get("path"), NAME, InvalidSlotError)
    on = given.get("on", [1])
    require("gguf: on", on, ListOf(int, "a list of numbers of devices, such as [1, 2]"), InvalidSlotError)
    split = given.get("split", [])
    require("gguf: split", split, SHARES, InvalidSlotError)
    path = directory / os.path.expanduser(given["path"])
    try:
        with path.open("rb") as file:
            model = read_gguf(file, os.fstat(file.fileno()).st_size)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        why = getattr(error, "strerror", None) or error
        raise InvalidSlotError(f"gguf: {path} can't be read on this machine: {why}; or give memory_gb") from None
    return gguf_memory(model, context=table["context"], concurrency=table["concurrency"], degrees=on, split=split)


def _bytes_of_each(gigabytes: Any) -> int | list[int]:
    return [_bytes(size) for size in gigabytes] if isinstance(gigabytes, list) else _bytes(gigabytes)


def _bytes(gigabytes: Any) -> int:
    require("memory_gb", gigabytes, Number(above=True, most=1e9), InvalidSlotError)
    return round(float(gigabytes) * GB)


def _tables(table: Mapping[str, Any], name: str) -> list[tuple[str, Mapping[str, Any]]]:
    found = table.get(name, {})
    if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
        raise InvalidSlotError(f"{name} is not a table of tables; write [{name}.NAME]")
    return list(found.items())


def _list(given: Any, name: str) -> list[Mapping[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise InvalidSlotError(f"hosts is not a list of tables; write {name}")
    return given


def _texts(given: Any, name: str) -> tuple[str, ...]:
    are_words = Holds(lambda value: is_texts(value) and all(value), "a list of texts that are not empty")
    require(name, given, are_words, InvalidSlotError)
    return tuple(given)


def _choice(kind: type[T], given: Any, name: str) -> T:
    choices: Mapping[str, T] = kind.__members__  # type: ignore[attr-defined]
    if (chosen := choices.get(str(given).upper())) is None:
        raise InvalidSlotError(f"{name} is {given!r}; give one of {', '.join(each.lower() for each in choices)}")
    return chosen


def _check_names(table: Any, known: set[str]) -> None:
    if not isinstance(table, dict):
        raise InvalidSlotError(f"{table!r} is not a table; write name = value on lines of its own")
    for name in table.keys() - known:
        near = nearest(name, known)
        raise InvalidSlotError(f"there is no {name!r}" + (f"; did you mean {near[0]}?" if near else ""))


@contextmanager
def _at(place: str) -> Iterator[None]:
    """Put the place before the messages of errors."""
    try:
        yield
    except (IrisError, TypeError) as error:
        raise InvalidSlotError(f"{place}: {error}") from None
