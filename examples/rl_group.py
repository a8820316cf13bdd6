"""A trainer, samplers on slices of their own and a task that prepares prompts, as one group; a sampler's slice is lost.

python examples/rl_group.py

The trainer publishes its weights at an endpoint. Samplers fetch them and send rollouts back. All start together or not
at all. When a slice of the samplers goes, that one starts again and finds the trainer, which has never stopped.
"""

import json
import time
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import ray

from iris_ray import (
    CoschedulingConfig,
    IrisClient,
    JobGroup,
    ResourceSpec,
    get_job_info,
    lookup_endpoint,
    register_endpoint,
    tpu_device,
)
from iris_ray.testing import SimulatedCluster


def serve(name, answer):
    """Answer each request with what a function makes of its JSON, at an endpoint of this name."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(answer(asked)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    register_endpoint(name, f"{ray.util.get_node_ip_address()}:{server.server_port}")


def ask(address, what):
    request = urllib.request.Request(f"http://{address}", json.dumps(what).encode())
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.loads(answer.read())


def prepare():
    serve("prompts", lambda number: f"prompt {number}")
    time.sleep(3600)  # until the trainer has what it needs: the rest of the group then ends


def train():
    """Learn from each rollout, until a sampler has come back from a lost slice."""
    me = get_job_info()
    assert me is not None
    if me.task_index > 0:
        return None  # with JAX, all hosts of the slice would take part
    weights, rollouts = {"step": 0}, Counter[str]()

    def learn(rollout):
        if rollout is not None:
            weights["step"] += 1
            rollouts[f"sampler {rollout['sampler']}, attempt {rollout['attempt']}"] += 1
        return weights

    serve("weights", learn)
    while not any(name.endswith("attempt 2") and count >= 3 for name, count in rollouts.items()):
        time.sleep(0.1)
    return {"attempt": me.attempt, "step": weights["step"], "rollouts": dict(rollouts)}


def sample():
    me = get_job_info()
    assert me is not None
    prompts = lookup_endpoint("prompts", timeout=60, member="prepare")
    trainer = lookup_endpoint("weights", timeout=60, member="trainer")
    weights = ask(trainer, None)
    while True:
        prompt = ask(prompts, weights["step"])
        time.sleep(0.2)  # generate with these weights
        weights = ask(trainer, {"sampler": me.slice_id, "attempt": me.attempt, "text": f"an answer to {prompt}"})


if __name__ == "__main__":
    group = JobGroup("rl", main="trainer")
    group.add(train, "trainer", resources=ResourceSpec(device=tpu_device("v4-16")))
    group.add(
        sample,
        "samplers",
        resources=ResourceSpec(device=tpu_device("v4-8")),
        coscheduling=CoschedulingConfig(num_groups=2),
        failure_domain="slice",
        max_retries_failure=10,  # such as a fetch at the moment at which the trainer ends
    )
    group.add(prepare, "prepare", resources=ResourceSpec(cpu=1))
    with SimulatedCluster({"v4-16": 1, "v4-8": 2}) as cluster:  # on a real cluster: ray.init() instead
        handle = IrisClient().submit_group(group)
        while (samplers := handle.jobs["samplers"].status()).starting or not samplers.groups:
            time.sleep(0.2)
        time.sleep(3)
        print("lost:", lost := samplers.groups[0])
        cluster.preempt_slice(lost)
        cluster.add_slice("v4-8")
        print("trainer:", handle.jobs["trainer"].results()[0])
        handle.wait()
        for name, status in handle.status().items():
            print(f"{name}: {status.state.value}, {status.error or 'no error'}")
