"""JSON for machines."""

import json
from typing import Any

import click

from iris_ray.actors.wire.json_values import as_json


def print_json(value: Any) -> None:
    click.echo(json.dumps(as_json(value), indent=2, ensure_ascii=False))
