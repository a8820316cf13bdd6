"""An HTTP server for models in slots that speaks like OpenAI's: completions and chat.

May import: `slots.client`, `model`, `errors`.
Start with `http_front.py`; `openai_words.py` knows the shape of requests and answers.
"""

from iris_ray.slots.front.http_front import HttpFront

__all__ = ["HttpFront"]
"""The server."""
