"""The start-up script by which a new TPU host joins the Ray cluster. Pure.

A host of the Cloud TPU API tells Ray by its metadata which slice it belongs to. A VM of Compute Engine does not, so the
script tells Ray as GKE does, by variables: the slice is the VM's instance group, and the rest is in ``tpu-env``.
"""

import re

from iris_ray.errors import InvalidRequestError
from iris_ray.model.checks import shown

HEAD_MARK = "@RAY_HEAD@"
"""The placeholder for HOST:PORT of the cluster's head in start-up scripts."""
_ADDRESS = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*:\d{1,5}")
_IMAGE = re.compile(r"(?P<registry>[a-z0-9][a-z0-9.:-]*)/[A-Za-z0-9_./:@-]+")

_WHO_AM_I = """\
#!/bin/bash
# From `iris-ray cluster provision`: this TPU host joins a Ray cluster. All who see the TPU can read this: no secrets!
export PATH="$PATH:/usr/local/bin"
attribute() {
  curl -sf -H 'Metadata-Flavor: Google' \\
    "http://${GCE_METADATA_HOST:-metadata.google.internal}/computeMetadata/v1/instance/attributes/$1"
}
if ! attribute agent-worker-number > /dev/null && tpu_env=$(attribute tpu-env); then  # a VM of Compute Engine
  of_tpu_env() { sed -n "s/^$1: *'\\{0,1\\}\\([^']*\\)'\\{0,1\\} *$/\\1/p" <<< "$tpu_env" | head -n 1; }
  group=$(attribute created-by)
  export TPU_NAME="${group##*/}"
  TPU_WORKER_ID=$(of_tpu_env TPU_WORKER_ID) && export TPU_WORKER_ID
  TPU_ACCELERATOR_TYPE=$(of_tpu_env TPU_ACCELERATOR_TYPE) && export TPU_ACCELERATOR_TYPE
  TPU_TOPOLOGY=$(of_tpu_env TOPOLOGY) && export TPU_TOPOLOGY
fi
"""

STARTUP_SCRIPT = f"""\
{_WHO_AM_I}until ray start --address='{HEAD_MARK}'; do
  sleep 10
done
"""
"""The default script, for images of hosts with Ray and iris_ray installed."""

_IN_DOCKER = f"""\
{_WHO_AM_I}image='@IMAGE@'
until docker pull "$image"; do
  gcloud auth configure-docker '@REGISTRY@' --quiet
  sleep 10
done
docker rm --force ray 2> /dev/null
# docker starts it again if the head is not there yet, and after a restart of the host
docker run --detach --name=ray --restart=unless-stopped --privileged --network=host --ipc=host \\
  --user=root --ulimit=nofile=65536 --ulimit=memlock=-1 --volume=/dev:/dev \\
  --env=TPU_NAME --env=TPU_WORKER_ID --env=TPU_ACCELERATOR_TYPE --env=TPU_TOPOLOGY \\
  "$image" ray start --address='{HEAD_MARK}' --block
"""


def script_for_docker(image: str) -> str:
    """Return a start-up script that runs Ray in a container, with `HEAD_MARK` for the address.

    Raises:
        InvalidRequestError: the image is not named with its registry.
    """
    if (found := _IMAGE.fullmatch(image)) is None:
        raise InvalidRequestError(
            f"--docker-image is {shown(image)}; give it with its registry, such as"
            " us-east5-docker.pkg.dev/my-project/images/iris-ray:1"
        )
    return _IN_DOCKER.replace("@IMAGE@", image).replace("@REGISTRY@", found["registry"])


def startup_script(text: str, head: str) -> str:
    """Return the script with the head's address in it.

    Raises:
        InvalidRequestError: the script needs the address, and no other host could join at it.
    """
    if HEAD_MARK not in text:
        return text
    if not _ADDRESS.fullmatch(head) or not 0 < int(head.rpartition(":")[2]) < 1 << 16:
        raise InvalidRequestError(
            f"the cluster's address is {shown(head)}; give --head HOST:PORT, as other hosts see it"
        )
    return text.replace(HEAD_MARK, head)
