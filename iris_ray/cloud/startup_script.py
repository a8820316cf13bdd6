"""The script by which a new TPU host joins the Ray cluster."""

HEAD_MARK = "@RAY_HEAD@"
"""The placeholder for HOST:PORT of the cluster's head in start-up scripts."""
STARTUP_SCRIPT = f"""\
#!/bin/bash
# From `iris-ray provision`: this TPU host joins a Ray cluster. All who see the TPU can read this: no secrets here.
export PATH="/usr/local/bin:$PATH"
until ray start --address='{HEAD_MARK}'; do
  sleep 10
done
"""
"""The default, for images with Ray and iris_ray installed."""
