"""The environment variables that choose the provider's zone."""

LOCATION_VARIABLE = "IRIS_RAY_CLOUD_TPU"
"""The environment variable with the place of the slices, ``projects/<project>/locations/<zone>``."""
ENDPOINT_VARIABLE = "IRIS_RAY_CLOUD_TPU_ENDPOINT"
"""The variable with HOST:PORT of an emulator of the provider's API, on loopback: the traffic is not encrypted."""
