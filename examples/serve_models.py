"""Three small language models behind an HTTP server that speaks like OpenAI's. Two of them fit at once.

    pip install openai
    python examples/serve_models.py

Each model learns in a moment which letter follows which four, from a text that comes with Python. A mixed load of
questions has them loaded and evicted.
"""

import importlib
import inspect
import random
import threading
from collections import defaultdict

import openai

from iris_ray.slots import HttpFront, IdleFor, PlacementPolicy, ServingPolicy, SlotClient, SlotHosts
from iris_ray.testing import SimulatedCluster

MB = 2**20
MODULES = ("argparse", "statistics", "pickletools")
"""Of Python. There is a model of each one's text."""
QUICK = ServingPolicy(placement=PlacementPolicy(stale_at=IdleFor(0.5), min_residency_s=1.0))


class LetterModel:
    """Says which letter most often follows four others."""

    def __init__(self, module):
        self.module = module

    def load(self):
        text = inspect.getsource(importlib.import_module(self.module))
        self.following = defaultdict(list)
        for place in range(len(text) - 4):
            self.following[text[place : place + 4]].append(text[place + 4])

    def __call__(self, request):
        chance = random.Random(request.get("seed", 0))
        text = request["prompt"] if "prompt" in request else request["messages"][-1]["content"]
        for _ in range(request.get("max_tokens", 40)):
            letter = chance.choice(self.following.get(text[-4:], [" "]))
            text += letter
            yield letter


def ask(client, number, answers):
    model = random.Random(number).choice(MODULES)
    answer = client.completions.create(model=model, prompt="def ", max_tokens=30, seed=number)
    answers.append((model, answer.choices[0].text))


def main():
    with SlotClient([SlotHosts(memory=1000 * MB)], policy=QUICK) as slots:
        for module in MODULES:
            slots.register(LetterModel, module, memory={1: 400 * MB}, arguments={"module": module}, concurrency=4)
        with HttpFront(slots) as front:
            client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=5)
            chat = client.chat.completions.create(
                model="statistics", messages=[{"role": "user", "content": "clas"}], stream=True
            )
            print("statistics says:", "".join(piece.choices[0].delta.content or "" for piece in chat))
            answers: list[tuple[str, str]] = []
            callers = [threading.Thread(target=ask, args=(client, number, answers)) for number in range(24)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
            for model, text in sorted(answers)[::8]:
                print(f"{model}: {text!r}")
            print(f"{len(answers)} answers from {len({model for model, _ in answers})} models")
            ready = [slot.model for slot in slots.status().slots if slot.state == "ready"]
            print("still loaded:", ", ".join(sorted(ready)))


if __name__ == "__main__":
    with SimulatedCluster({"v4-8": 1}):  # on a real cluster: ray.init() instead
        main()
