"""An HTTP server for models in slots that speaks like OpenAI's.

May import: `slots.client`, `http_server`, `model`, `errors`.
Start with `http_front.py`. `openai_words.py` has the shapes of requests and answers, `api_keys.py` the callers' keys.
"""

from iris_ray.slots.front.api_keys import ApiKey
from iris_ray.slots.front.http_front import HttpFront

__all__ = ["ApiKey", "HttpFront"]
"""The server."""
