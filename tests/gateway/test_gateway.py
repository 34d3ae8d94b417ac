"""What the gateway does to requests and answers, seen from both sides."""

from __future__ import annotations

import gzip
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, unquote

import httpx
import pytest

from proxy.bench.harness.servers import Server, Servers
from proxy.chat.chat import OUTSIDE_V1
from tests.harness.gateways import (
    CHAT,
    LAST_USER,
    SYSTEM,
    SYSTEM_END,
    TURN_END,
    chat,
    hint_at,
    metric,
    post,
    start_gateway,
    told,
    wait_for,
)
from tests.harness.recording_worker import EVENTS, RecordingWorker, recording_worker


@pytest.fixture
def gateway(fleet: Servers, worker: RecordingWorker) -> Server:
    return start_gateway(fleet, worker)


def test_the_hint_is_spliced_into_the_clients_bytes(gateway, worker):
    raw = json.dumps(chat("Tide?"), indent=3).encode().replace(b"Tide", b"T\\u0069de")
    answer = post(gateway, raw)
    assert answer.status_code == 200 and answer.content == worker.answers[-1]
    sent = worker.requests[-1].body
    hint = hint_at(worker)
    spliced = json.dumps({"seamark_boundaries": hint}, separators=(",", ":")).encode()
    assert sent == raw[:-1] + b',"vllm_xargs":' + spliced + b"}"
    assert hint == [LAST_USER, TURN_END]
    assert answer.headers["x-seamark-boundary"] == f"{LAST_USER};{TURN_END}"
    assert answer.headers["x-seamark-worker"] == worker.url.removeprefix("http://")
    assert answer.headers["x-seamark-cached"] == "160"
    assert answer.headers["x-seamark-predicted"] == "0"


def test_a_known_prefix_is_predicted(gateway, worker):
    post(gateway, chat("one"))
    told(worker)
    answer = post(gateway, chat("two"))
    assert answer.headers["x-seamark-predicted"] == str(SYSTEM_END // 16 * 16)
    assert metric(gateway, 'seamark_boundary_lookups_total{result="learnt"}') == 2


def test_a_stream_arrives_byte_for_byte(gateway, worker):
    answer = post(gateway, chat("Tide?", stream=True, stream_options={"include_usage": True}))
    assert answer.content == worker.answers[-1] and answer.content.startswith(EVENTS[0])
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    wait_for(lambda: metric(gateway, "seamark_cached_tokens_total") == 160)


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_usage_that_only_the_gateway_asked_for_is_taken_out_again(gateway, worker, options):
    answer = post(gateway, chat("Tide?", stream=True, **options))
    assert json.loads(worker.requests[-1].body)["stream_options"] == {"include_usage": True}
    assert answer.content == EVENTS[0] + EVENTS[2]
    wait_for(lambda: metric(gateway, "seamark_cached_tokens_total") == 160)


def test_headers_travel_except_those_of_the_connection(gateway, worker):
    headers = [
        ("authorization", "Bearer key"),
        ("x-mine", "1"),
        ("x-mine", "2"),
        ("connection", "x-hop"),
        ("x-hop", "1"),
        ("te", "trailers"),
        ("x-request-id", "my-request"),
    ]
    answer = post(gateway, chat("Tide?"), headers=headers)
    seen = worker.requests[-1].headers
    assert b", ".join(value for name, value in seen if name == b"x-mine") == b"1, 2"  # equal by RFC 9110, 5.3
    assert (b"authorization", b"Bearer key") in seen and (b"x-request-id", b"my-request") in seen
    assert not {b"x-hop", b"te", b"accept-charset"} & {name for name, _ in seen}
    assert sum(name == b"content-length" for name, _ in seen) == 1
    assert answer.headers["x-request-id"] == "my-request"
    assert answer.headers.get_list("x-twice") == ["1", "2"]


@pytest.mark.parametrize("name", ["one", "/a/b?c=%2F#d e"])
@pytest.mark.parametrize(("path", "in_body"), [(CHAT, False), (CHAT, True), ("/v1/responses", True)])
def test_two_requests_of_one_name_at_once_are_told_apart_at_the_worker(gateway, worker, name, in_body, path):
    """Their name is that of their answers, and of an explanation."""
    asked = chat("Tide?") if path == CHAT else {"model": "m", "input": "Tide?"}
    asked, headers = ({**asked, "request_id": name}, {}) if in_body else (asked, {"x-request-id": name})
    worker.hold.set()
    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(post, gateway, asked, path, headers=headers) for _ in range(2)]
        wait_for(lambda: len(worker.requests) == 2)
        worker.hold.clear()
        assert [answer.result().headers["x-request-id"] for answer in answers] == [name, name]
    names = sorted(dict(request.headers)[b"x-request-id"].decode() for request in worker.requests)
    assert names[0] == name and names[1].startswith(name + ".")
    if in_body:  # by which vLLM stores a response
        assert sorted(json.loads(request.body)["request_id"] for request in worker.requests) == names
    explained = httpx.get(f"{gateway.url}/seamark/requests/{quote(name, safe='')}").json()
    assert (explained["request_id"], explained["endpoint"], explained["status"]) == (name, path, 200)


@pytest.mark.parametrize("name", ["", 7, "x" * 257, "é", "a\r\nx-evil: 1"])
def test_what_cannot_be_a_requests_name_is_left_to_the_worker(gateway, worker, name):
    answer = post(gateway, chat("Tide?", request_id=name))
    (sent,) = worker.requests
    assert answer.status_code == 200 and len(answer.headers["x-request-id"]) == 32
    assert dict(sent.headers)[b"x-request-id"].decode() == answer.headers["x-request-id"]
    assert json.loads(sent.body)["request_id"] == name and b"x-evil" not in dict(sent.headers)


def test_a_header_names_a_request_before_its_body(gateway, worker):
    answer = post(gateway, chat("Tide?", request_id="body's"), headers={"x-request-id": "header's"})
    assert answer.headers["x-request-id"] == "header's"


def test_headers_travel_byte_for_byte_in_any_encoding(gateway, worker):
    values = {
        b"x-plain": b"tide",
        b"x-latin": b"caf\xe9",
        b"x-utf8": "café 潮".encode(),
        b"x-neither": b"\xe9 \xc3\xa9\xff",
    }
    answer = post(gateway, chat("Tide?"), headers=list(values.items()))
    assert answer.status_code == 200 and values.items() <= dict(worker.requests[-1].headers).items()


def test_a_request_without_an_id_gets_one(gateway, worker):
    answer = post(gateway, chat("Tide?"))
    assert dict(worker.requests[-1].headers)[b"x-request-id"].decode() == answer.headers["x-request-id"] != ""


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH"])
def test_any_other_v1_path_and_method_passes_through(gateway, worker, method):
    body = b"not json \x00\xff" if method != "GET" else b""
    target = "/v1/some/thing%20odd%2F?a=1&b=%20%2B&c"
    answer = httpx.request(method, gateway.url + target, content=body)
    seen = worker.requests[-1]
    assert (seen.method, unquote(seen.target), seen.body) == (method, unquote(target), body)
    assert answer.status_code == 200


def test_what_vllm_serves_for_clients_outside_v1_reaches_it_and_nothing_else_does(gateway, worker):
    body = {"model": "m", "prompt": "x"}
    for path in (*sorted(OUTSIDE_V1 - {"/tokenize", "/detokenize"}), "/rerank/", "/%72erank"):
        answer = post(gateway, body, path)
        assert answer.status_code == 200 and answer.headers["x-seamark-worker"], path
        assert unquote(worker.requests[-1].target) == unquote(path).rstrip("/")
    worker.requests.clear()
    closed = ("/sleep", "/reset_prefix_cache", "/collective_rpc", "/server_info", "/update_weights", "/invocations")
    near = ("/inference/v1/abort_requests", "/inference/v1/generate/x", "/rerank/..;/sleep", "/score//sleep", "/RERANK")
    for path in (*closed, *near, "/%73leep", "/rerank%2F..%2Fsleep"):
        for answer in (post(gateway, body, path), httpx.get(gateway.url + path)):
            assert answer.status_code == 404 and "at the worker itself" in answer.json()["error"]["message"], path
    assert not worker.requests


@pytest.mark.parametrize("path", ["/v1/../metrics", "/v1/%2e%2e/metrics", "/v1/a%2F..%2F..%2Fmetrics", "/v1/./models"])
def test_no_path_leads_out_of_v1(gateway, worker, path):
    port = int(gateway.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port)) as raw:  # HTTP clients would tidy the path up
        raw.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert raw.makefile("rb").readline().split()[1] == b"404"
    assert not worker.requests


def test_a_body_of_five_megabytes_passes(gateway, worker):
    raw = json.dumps(chat("x" * 5_000_000)).encode()
    assert post(gateway, raw).status_code == 200
    assert worker.requests[-1].body.startswith(raw[:-1])


def test_a_body_over_the_limit_is_refused(fleet, worker):
    gateway = start_gateway(fleet, worker, flags=("--max-body-bytes", "1000"))
    answer = post(gateway, chat("x" * 2000))
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"
    assert not worker.requests


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"nonsense", b"\xff\xfe"])
def test_what_is_not_a_json_object_is_refused_in_openais_envelope(gateway, worker, raw):
    answer = post(gateway, raw)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"} and not worker.requests


@pytest.mark.parametrize("messages", ["text", 7, [], [5], [{"role": "assistant", "content": "x"}]])
def test_a_chat_without_a_boundary_goes_on_unchanged(gateway, worker, messages):
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    assert post(gateway, raw).status_code == 200
    assert worker.requests[-1].body == raw
    assert metric(gateway, 'seamark_boundary_lookups_total{result="none"}') == 1


def test_renders_that_fail_cost_the_hint_and_that_is_counted(fleet, worker):
    worker.render_status, worker.cached = 500, 0
    gateway = start_gateway(fleet, worker)
    raw = json.dumps(chat("Tide?")).encode()
    answer = post(gateway, raw)
    assert answer.status_code == 200 and worker.requests[-1].body == raw
    assert "x-seamark-boundary" not in answer.headers
    assert metric(gateway, 'seamark_miss_total{model="m",reason="no_facts"}') == 1


def test_a_worker_without_the_plugin_is_served_without_hints(fleet):
    with recording_worker(patched=False) as plain:
        gateway = start_gateway(fleet, plain)
        raw = json.dumps(chat("Tide?")).encode()
        assert post(gateway, raw).status_code == 200
        assert plain.requests[-1].body == raw
        assert metric(gateway, "seamark_engine_patched") == 0 and metric(gateway, "seamark_worker_up") == 1
        assert metric(gateway, 'seamark_miss_total{model="m",reason="unpatched"}') == 1


def test_requests_with_one_prefix_go_to_one_worker(fleet):
    with recording_worker() as one, recording_worker() as two:
        gateway = start_gateway(fleet, one, two)
        for number in range(6):
            post(gateway, chat(f"{number}"))
        assert sorted((len(one.requests), len(two.requests))) == [0, 6]


def test_equal_cold_prefixes_that_arrive_together_go_together(fleet):
    with recording_worker() as one, recording_worker() as other, ThreadPoolExecutor(6) as pool:
        gateway = start_gateway(fleet, one, other)
        list(pool.map(lambda number: post(gateway, chat(f"{number}")), range(6)))
        assert sorted(len(worker.requests) for worker in (one, other)) == [0, 6]


def test_a_worker_that_serves_the_model_is_chosen(fleet):
    with recording_worker() as one, recording_worker(models=("n",)) as two:
        gateway = start_gateway(fleet, one, two)
        for _ in range(3):
            post(gateway, {**chat("x"), "model": "n"})
            post(gateway, {"model": "n", "input": "x"}, path="/v1/embeddings")
        assert (len(one.requests), len(two.requests)) == (0, 6)
        listed = httpx.get(gateway.url + "/v1/models").json()
        assert [(entry["id"], entry["max_model_len"]) for entry in listed["data"]] == [("m", 8192), ("n", 8192)]


def test_a_worker_that_refuses_connections_is_passed_over(fleet):
    with recording_worker() as survivor:
        with recording_worker() as dying:
            gateway = start_gateway(fleet, survivor, dying, flags=("--health-interval", "3600"))
            wait_for(lambda: metric(gateway, "seamark_worker_up") == 2)
        for number in range(4):  # the gateway still believes in both
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number}" * 50}]}
            assert post(gateway, body).status_code == 200
        assert len(survivor.requests) == 4 and metric(gateway, "seamark_worker_up") == 1


class Gone:
    """A worker that is no longer there."""

    def __init__(self, url: str) -> None:
        self.url = url


def test_something_else_at_a_workers_address_does_not_stop_the_watch(fleet, worker):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=talk_nonsense, args=(listener,), daemon=True).start()
        odd = Gone(f"http://127.0.0.1:{listener.getsockname()[1]}")
        gateway = start_gateway(fleet, odd, worker, flags=("--health-interval", "0.1"))
        worker.models = ("m", "later")
        wait_for(lambda: len(httpx.get(gateway.url + "/v1/models").json()["data"]) == 2)
        assert metric(gateway, "seamark_worker_up") == 1


def talk_nonsense(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.recv(1000)
            connection.sendall(b"this is not HTTP\r\n\r\n")


def test_a_mistyped_model_changes_nothing_for_the_others(gateway, worker):
    post(gateway, {**chat("x"), "model": "made-up"})
    post(gateway, chat("x"))
    assert hint_at(worker) == [LAST_USER, TURN_END]


def test_without_any_worker_it_is_healthy_not_ready_and_says_so(fleet):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gateway = fleet.gateway(Gone(f"http://127.0.0.1:{unused.getsockname()[1]}"))
        gateway.wait_until_ready("/health", seconds=30)
        assert httpx.get(gateway.url + "/ready").status_code == 503
        for answer in (post(gateway, chat("x")), httpx.get(gateway.url + "/v1/models")):
            assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
            assert answer.json()["error"]["code"] == "no_worker"


def test_a_stream_that_breaks_off_ends_with_an_error_event(gateway, worker):
    worker.cut_stream = True
    answer = post(gateway, chat("Tide?", stream=True))
    assert answer.content.startswith(EVENTS[0])
    last = answer.content.split(b"\n\n")[-2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "worker_failed"
    assert b"[DONE]" not in answer.content


@pytest.mark.parametrize("fields", [{}, {"stream": True}])
def test_a_client_that_leaves_while_waiting_frees_the_worker(gateway, worker, fields):
    worker.hang = True
    with pytest.raises(httpx.ReadTimeout):
        post_briefly(gateway, chat("Tide?", **fields))
    assert worker.gone.wait(30)
    wait_for(lambda: metric(gateway, "seamark_inflight") == 0)
    assert metric(gateway, "seamark_requests_total") == 1


def test_a_client_that_leaves_while_streaming_frees_the_worker(gateway, worker):
    worker.hang_in_stream = True
    with pytest.raises(httpx.ReadTimeout):
        post_briefly(gateway, chat("Tide?", stream=True))
    assert worker.gone.wait(30)
    wait_for(lambda: metric(gateway, "seamark_inflight") == 0)


def post_briefly(gateway: Server, body: dict) -> None:
    httpx.post(gateway.url + CHAT, json=body, timeout=httpx.Timeout(30, read=0.5))


def test_a_slash_behind_a_known_endpoint_means_nothing(gateway, worker):
    models = httpx.get(gateway.url + "/v1/models/")
    assert models.status_code == 200 and [model["id"] for model in models.json()["data"]] == ["m"]
    answer = post(gateway, chat("Tide?"), CHAT + "/?a=1")
    assert answer.status_code == 200 and "x-seamark-boundary" in answer.headers
    assert worker.requests[-1].target == CHAT + "?a=1"
    assert metric(gateway, f'seamark_requests_total{{code="200",endpoint="{CHAT}"') == 1


@pytest.mark.parametrize(
    ("location", "seen"),
    [
        ("{worker}/v1/some/thing?a=1", "/v1/some/thing?a=1"),
        ("//{host}/v1/some/thing", "/v1/some/thing"),
        ("{worker}//elsewhere/x", "/elsewhere/x"),
        ("/v1/some/thing", "/v1/some/thing"),
        ("http://inside.cluster:8000/v1/some/thing", None),
        ("http://[broken/v1", None),
    ],
)
def test_a_redirect_of_a_worker_does_not_show_its_address(gateway, worker, location, seen):
    host = worker.url.removeprefix("http://")
    worker.status, worker.location = 307, location.format(worker=worker.url, host=host)
    answer = httpx.get(gateway.url + "/v1/some/thing/")
    assert answer.status_code == 307 and answer.headers.get("location") == seen
    shown = {name: value for name, value in answer.headers.items() if name != "x-seamark-worker"}
    assert host not in str(shown) and "inside" not in str(shown)


def test_pages_are_there_by_head_and_with_a_slash(gateway):
    for path in ("/health", "/health/", "/ready", "/ready/", "/", "/ui", "/metrics", "/v1/models", "/seamark/status"):
        got, asked = httpx.get(gateway.url + path), httpx.head(gateway.url + path)
        assert asked.status_code == got.status_code == (307 if path == "/" else 200), path
        assert asked.headers.get("content-type") == got.headers.get("content-type") and not asked.content, path
        assert int(asked.headers["content-length"]) > 0 or path == "/"


def test_a_balancer_that_asks_by_head_learns_that_no_worker_is_there(fleet):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        gateway = fleet.gateway(Gone(f"http://127.0.0.1:{unused.getsockname()[1]}"))
        gateway.wait_until_ready("/health", seconds=30)
        assert [httpx.head(gateway.url + path).status_code for path in ("/ready", "/health")] == [503, 200]


@pytest.mark.parametrize("offered", ["websocket", "WebSocket", "h2c, websocket"])
def test_a_websocket_is_refused_in_words(gateway, worker, offered):
    fields = {"connection": "keep-alive, Upgrade", "upgrade": offered, "sec-websocket-version": "13"}
    with httpx.Client(base_url=gateway.url) as client:
        for path in ("/v1/realtime", "/ui"):
            answer = client.get(path, headers={**fields, "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="})
            assert answer.status_code == 426 and answer.headers["upgrade"] == "HTTP/1.1"
            assert answer.json()["error"]["code"] == "no_websockets"
        assert client.get("/v1/realtime").status_code == 200  # on the same connection
    assert [request.target for request in worker.requests] == ["/v1/realtime"]


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/audio/transcriptions", "/tokenize"])
def test_a_compressed_body_is_refused_since_vllm_reads_none(gateway, worker, path):
    raw = json.dumps(chat("Tide?")).encode()
    for coding in ("gzip", "zstd", "identity, GZIP"):
        headers = {"content-encoding": coding, "content-type": "application/json"}
        answer = httpx.post(gateway.url + path, content=gzip.compress(raw), headers=headers)
        assert answer.status_code == 415 and answer.headers["accept-encoding"] == "identity"
        assert coding.lower().removeprefix("identity, ") in answer.json()["error"]["message"]
    assert not worker.requests
    assert post(gateway, raw, CHAT, headers={"content-encoding": "identity"}).status_code == 200


def test_an_unknown_path_is_refused_in_openais_envelope(gateway):
    answer = httpx.get(gateway.url + "/nowhere")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_a_model_name_from_a_client_never_becomes_a_label(gateway, worker):
    for checks_names, code, label in ((False, 200, "m"), (True, 404, "unknown")):
        worker.checks_names = checks_names
        post(gateway, {**chat("x"), "model": "made-up"})
        counted = f'seamark_requests_total{{code="{code}",endpoint="/v1/chat/completions",model="{label}"'
        assert metric(gateway, counted) == 1


def test_logs_and_metrics_hold_no_prompt_text(gateway, worker):
    post(gateway, chat("a very secret tide"))
    worker.render_status = 500
    post(gateway, chat("another secret", tools=[]))
    seen = gateway.log.read_text() + httpx.get(gateway.url + "/metrics").text
    assert "secret" not in seen and "harbour" not in seen


ODD = [
    {"prompt_cache_key": "session \ud800"},
    {"prompt_cache_key": 7, "cache_salt": "x"},
    {"chat_template_kwargs": 3},
    {"tools": [7], "tool_choice": {"type": []}},
    {"messages": [{"role": ["user"], "content": "x" * 600}, 7, {"role": "user", "content": "?"}]},
    {"messages": [7, {"role": "user", "content": "?"}, {"role": {}, "content": [{"text": 7, "cache_control": 7}]}]},
    {"stream_options": 7, "vllm_xargs": 7, "truncate_prompt_tokens": -1},
]


@pytest.mark.parametrize("fields", ODD)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
def test_odd_bodies_reach_the_worker_and_log_no_error(gateway, worker, path, fields):
    for _ in range(2):
        body = {**chat("Tide?"), "input": [SYSTEM, *fields.get("messages", [])], "prompt": "Tide?", **fields}
        assert post(gateway, body, path).status_code == 200
    assert sum(not request.target.endswith("/render") for request in worker.requests) == 2
    assert " failed: " not in gateway.log_end() and "boundary of request" not in gateway.log_end()


def test_an_answer_is_not_lost_for_its_explanation(fleet, worker):
    """Tools that differ deep inside: looking for what changed must not cost what was answered."""
    gateway = start_gateway(fleet, worker, flags=("--max-json-depth", "900"))
    nested = "[" * 600 + "]" * 600
    for name in ("tide", "wind"):
        function = f'{{"name": "{name}", "parameters": {{"x": {nested}}}}}'
        raw = json.dumps(chat("Tide?"))[:-1] + f', "tools": [{{"type": "function", "function": {function}}}]}}'
        assert post(gateway, raw.encode()).status_code == 200


@pytest.mark.parametrize("nonsense", [{"prompt_tokens": -5}, {"prompt_tokens": 10**400}, {"cached": -3}])
def test_an_answer_is_not_lost_for_nonsense_in_its_usage(gateway, worker, nonsense):
    for name, value in nonsense.items():
        setattr(worker, name, value)
    answer = post(gateway, chat("Tide?"))
    assert answer.status_code == 200 and answer.content == worker.answers[-1]


def test_a_very_long_request_id_is_replaced(gateway, worker):
    answer = post(gateway, chat("Tide?"), headers={"x-request-id": "x" * 5000})
    assert len(answer.headers["x-request-id"]) == 32


def test_the_status_page_tells_of_workers(gateway, worker):
    status = httpx.get(gateway.url + "/seamark/status").json()
    assert status["workers"][0]["engine"]["match_unit"] == 16
    assert status["workers"][0]["up"] is True and status["workers"][0]["models"] == ["m"]


def test_a_request_that_the_worker_refused_left_nothing_to_predict(worker, gateway):
    worker.status = 400
    assert post(gateway, chat("Tide?")).status_code == 400
    worker.status = 200
    assert post(gateway, chat("Tide?")).headers["x-seamark-predicted"] == "0"
    told(worker)
    assert int(post(gateway, chat("Tide?")).headers["x-seamark-predicted"]) > 400


def test_a_worker_is_told_whose_a_request_is_and_what_there_is_to_compute(fleet, worker):
    gateway = start_gateway(fleet, worker)
    for _ in range(2):
        post(gateway, chat("Tide?"), headers={"x-seamark-load": "aa,1,1"})
    told = [dict(request.headers)[b"x-seamark-load"].decode().split(",") for request in worker.requests[-2:]]
    identity = httpx.get(gateway.url + "/health").json()["gateway"]
    assert [name for name, _, _ in told] == [identity, identity]
    (first, again) = ((int(prompt), int(left)) for _, prompt, left in told)
    assert 0 <= again[1] < first[1] <= first[0] and again[1] <= again[0]
