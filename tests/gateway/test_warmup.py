"""A worker that has restarted gets the hottest prefixes back before it gets requests."""

from __future__ import annotations

import json

from tests.harness.gateways import chat, metric, post, start_gateway, wait_for
from tests.harness.recording_worker import recording_worker


def test_a_restarted_worker_is_given_the_hot_prefixes_first(fleet):
    with recording_worker() as worker, recording_worker() as other:
        gateway = start_gateway(fleet, worker, other, flags=("--health-interval", "0.2"))
        for number in range(4):
            owner = post(gateway, chat(f"{number}", max_tokens=50, stream=True)).headers["x-seamark-worker"]
        restarted, stays = (worker, other) if owner in worker.url else (other, worker)
        restarted.hold.set()  # the replay takes a while
        restarted.requests.clear()
        restarted.boot = "1.8e+09"
        wait_for(lambda: restarted.requests)
        sent = json.loads(restarted.requests[0].body)
        assert (sent["max_tokens"], sent["stream"]) == (1, False)
        assert sent["vllm_xargs"]["seamark_boundaries"]
        during = post(gateway, chat("during"))
        assert during.headers["x-seamark-worker"] in stays.url
        restarted.hold.clear()
        wait_for(lambda: metric(gateway, "seamark_replays_total") >= 1)
        wait_for(lambda: not any(each["warming"] for each in status(gateway)["workers"]))
        # The other holds it too by now; gone, the restarted one is known to hold it.
        stays.models = ()
        wait_for(lambda: [] in [each["models"] for each in status(gateway)["workers"]])
        after = post(gateway, chat("after"))
        assert after.headers["x-seamark-worker"] in restarted.url
        assert int(after.headers["x-seamark-predicted"]) > 0


def test_without_another_worker_nobody_waits_for_a_replay(fleet):
    with recording_worker() as worker:
        gateway = start_gateway(fleet, worker, flags=("--health-interval", "0.2", "--replay-seconds", "6"))
        for number in range(3):
            post(gateway, chat(f"{number}"))
        worker.hang_replays = True
        worker.boot = "1.8e+09"
        wait_for(lambda: any(each["warming"] for each in status(gateway)["workers"]))
        assert post(gateway, chat("at once")).status_code == 200
        assert any(each["warming"] for each in status(gateway)["workers"])
        wait_for(lambda: not any(each["warming"] for each in status(gateway)["workers"]))  # bounded


def status(gateway) -> dict:
    import httpx

    return httpx.get(gateway.url + "/seamark/status").json()
