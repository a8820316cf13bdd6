"""The service of metadata servers on a host: it passes on the notices of the host's server."""

from importlib import import_module

from iris_ray.actors.host.services import HostPart


class MetadataOnHost(HostPart):
    """Watches the metadata server of a host that this actor's tasks have to themselves."""

    async def run(self) -> None:
        if self.host.exclusive:
            watch = await self.in_thread(import_module, "iris_ray.metadata.watch")  # imports aiohttp, slowly
            await watch.MetadataWatch(tell=self.host.goes, call_off=self.host.stays).run()
