"""An HTTP server for models in slots that speaks like OpenAI's.

May import: `slots.client`, `http_server`, `model`, `errors`.
Start with `http_front.py`; `openai_words.py` knows the shape of requests and answers, `api_keys.py` who may ask.
"""

from iris_ray.slots.front.api_keys import ApiKey
from iris_ray.slots.front.http_front import HttpFront

__all__ = ["ApiKey", "HttpFront"]
"""The server."""
