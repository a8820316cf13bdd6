"""``iris-ray cluster dashboard``: web pages that show the cluster."""

import os

import click

from iris_ray.cli.address import cluster, node_address_option


@click.command()
@click.option("--port", type=click.IntRange(0, 65535), default=8267, show_default=True, metavar="PORT",
              help="The port to listen on; 0: a free one.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
              help="The address to listen on. If other machines can reach it, readers need a token.")  # fmt: skip
@node_address_option
def dashboard(port: int, host: str) -> None:
    """Web pages of the fleet, the queue, jobs, users and events, live. Ctrl-C ends it.

    \b
      iris-ray cluster dashboard
      iris-ray cluster dashboard --port 0
      IRIS_RAY_DASHBOARD_TOKEN=... iris-ray cluster dashboard --host 0.0.0.0

    It only reads, and only this machine reaches it; from a laptop: ssh -L 8267:localhost:8267 HEAD. With another --host
    readers log in with $IRIS_RAY_DASHBOARD_TOKEN.
    """
    import asyncio

    from iris_ray.actors.calls.controller_connection import ControllerConnection
    from iris_ray.dashboard import place
    from iris_ray.dashboard.access import require_token
    from iris_ray.dashboard.server import serve

    token = require_token(host, os.environ)
    with cluster():
        import ray

        address = ray.get_runtime_context().gcs_address

        def ready(url: str) -> None:
            place.announce(url)
            click.echo(f"the dashboard of {address}: {url}  (Ctrl-C ends it)")

        try:
            asyncio.run(serve(ControllerConnection, address, host, port, token, ready))
        finally:
            place.withdraw()
