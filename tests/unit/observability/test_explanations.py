"""What is said of a request while it is under way, and afterwards."""

from __future__ import annotations

import gc
import weakref

from proxy.observability.explanations import Explanation, Explanations, Record


def explained(name: str, endpoint: str = "/v1/messages") -> Explanation:
    return Explanation(name, endpoint)


def test_a_request_is_explained_as_it_stands_until_it_is_settled_and_holds_nothing_afterwards():
    class Request:
        status: int | None = None

    request = Request()
    gone = weakref.ref(request)
    record = Record(lambda record, request=request: Explanation("r", "/", status=request.status, began=record.began))
    assert record.explanation.status is None and record.explanation.began == record.began
    request.status = 200
    assert record.explanation.status == 200
    record.settle()
    request.status = 500
    record.settle()
    del request
    gc.collect()
    assert record.explanation.status == 200 and gone() is None


def test_the_last_requests_are_explained_the_newest_first():
    explanations = Explanations(most=3)
    for number in (0, 1, 2, 3, 4, 3):
        explanations.begin(f"r{number}", None, lambda _, name=f"r{number}": explained(name))
    assert [each.request_id for each in explanations.newest(2)] == ["r3", "r4"]
    assert explanations.get("r1") is None and explanations.get("r2") is not None


def test_a_name_that_two_clients_gave_is_two_requests():
    explanations = Explanations()
    for owner, endpoint in (("ann", "/v1/messages"), ("bob", "/v1/responses"), (None, "/v1/completions")):
        explanations.begin("same", owner, lambda _, endpoint=endpoint: explained("same", endpoint))
    assert [explanations.get("same", owner).endpoint for owner in ("ann", "bob")] == ["/v1/messages", "/v1/responses"]
    assert explanations.get("same", "cid") is None
    assert explanations.of_anyone("same").endpoint == "/v1/completions"
    assert explanations.of_anyone("another") is None
