"""API keys: hashed, read again, limited; which pages and paths each may use."""

from __future__ import annotations

import hashlib
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from proxy.config_files import MOST_NUMBER
from proxy.errors import Forbidden, NotFound, SettingsError, Unauthorized
from proxy.http.auth import ADMIN_OF_WORKERS, ID_BYTES, UNSALTED, KeyRing, admit, client
from tests.harness.api_keys import entry, secret


def scope(path: str = "/v1/chat/completions", key: str = "") -> dict:
    return {"type": "http", "path": path, "headers": [(b"x-api-key", key.encode())] if key else []}


HASH = {name: hashlib.sha256(secret(name).encode()).hexdigest() for name in ("ann", "bob", "eve")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry("ann") + entry("bob", share="team") + entry("cleo", share="team") + entry("root", admin=True))
    return path


ANN, BOB, ROOT = (secret(name) for name in ("ann", "bob", "root"))


@pytest.mark.parametrize(
    ("headers", "whose"),
    [
        ([], None),
        ([("authorization", f"Bearer {ANN}")], "ann"),
        ([("authorization", f"bearer  {ANN}")], "ann"),
        ([("authorization", f"Basic {ANN}")], None),
        ([("cookie", ANN), ("x-key", ANN)], None),
        ([("x-api-key", f" {ANN} ")], "ann"),
        *(([("x-api-key", odd)], None) for odd in (ANN + "x", ANN[:-1], ANN.upper(), HASH["ann"], HASH["ann"].upper())),
        # of two credentials the one that is a key counts; if both are, an admin's beside a client's widens nothing
        ([("authorization", f"Bearer {ANN}"), ("x-api-key", "sk-ant-placeholder")], "ann"),
        ([("authorization", "Bearer sk-ant-placeholder"), ("x-api-key", ANN)], "ann"),
        ([("authorization", f"Bearer {ANN}"), ("x-api-key", ROOT)], "ann"),
        ([("authorization", "Bearer wrong"), ("x-api-key", "wrong-too")], None),
    ],
)
def test_a_key_counts_in_either_header_and_in_any_order(file, headers, whose):
    ring = KeyRing(file, "s")
    for listed in (headers, headers[::-1]):
        asked = {"path": "/", "headers": [(name.encode(), value.encode()) for name, value in listed]}
        with pytest.raises(Unauthorized) if whose is None else nullcontext():
            assert ring.authenticate(asked).name == whose
    both = [(b"x-api-key", BOB.encode()), (b"x-api-key", ANN.encode())]  # of equal ones the first value
    assert ring.authenticate({"path": "/", "headers": both}).name == "bob"


def test_salts_depend_on_key_group_and_secret_alone(file):
    """What one client has cached is found by no other, and by no gateway with another secret."""

    def salts(gateways: str | None) -> dict[str, str]:
        ring = KeyRing(file, gateways)
        assert ring.salts_last is bool(gateways)
        return {name: ring.authenticate(scope(key=secret(name))).salt for name in ("ann", "bob", "cleo", "team")}

    file.write_text(file.read_text() + entry("team"))  # a key is no group of the same name
    assert salts("s") == salts("s") and salts("s")["bob"] == salts("s")["cleo"]
    assert len({salt for gateways in ("s", "other", None, None, "") for salt in salts(gateways).values()}) == 15
    assert salts("s")["ann"] not in repr(KeyRing(file, "s").named("ann"))


def test_while_a_key_is_replaced_the_old_and_the_new_one_are_the_same_client(file):
    """Also without a secret for all gateways, where each hash proves the responses of the key."""
    both, new = f'["{HASH["ann"]}", "{HASH["bob"].upper()}"]', f'"{HASH["bob"]}"'
    file.write_text(f"[keys.ann]\nsha256 = {both}\n")
    ring, unsecret = KeyRing(file, "s"), KeyRing(file, None)
    ann, made = ring.authenticate(scope(key=ANN)), unsecret.named("ann").new_response_id()
    assert ring.authenticate(scope(key=BOB)) is ann and ann.name == "ann"
    file.write_text(f'[keys.ann]\nsha256 = "{HASH["ann"]}"\n')
    assert KeyRing(file, None).named("ann").made(made)
    file.write_text(f"[keys.ann]\nsha256 = {new}\n")
    ring.refresh()
    assert ring.authenticate(scope(key=BOB)) is ann and not KeyRing(file, None).named("ann").made(made)
    with pytest.raises(Unauthorized):
        ring.authenticate(scope(key=ANN))


def test_the_file_is_read_again_and_what_a_key_has_under_way_stays_counted(file):
    ring = KeyRing(file, "s")
    ann = ring.authenticate(scope(key=secret("ann")))
    ann.under_way = 3
    file.write_text(entry("ann", max_inflight=2))
    ring.refresh()
    assert ring.authenticate(scope(key=secret("ann"))) is ann and not ann.has_room
    with pytest.raises(Unauthorized):
        ring.authenticate(scope(key=secret("bob")))


def test_a_revoked_key_is_not_valid_again_because_another_entry_has_its_hash(file):
    """Else of two entries the last would win, and its limits would be the other's."""
    ring = KeyRing(file, "secret")
    file.write_text(entry("ann", max_inflight=1) + entry("eve").replace(HASH["eve"], HASH["ann"]) + "\n")
    ring.refresh()
    assert not ring.file.is_current and ring.named("eve") is None


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[keys.ann]\n", "sha256"),
        ('[keys.ann]\nsha256 = "abc"\n', "64 hexadecimal digits"),
        (entry("ann", max_inflight=-1), "max_inflight"),
        *((entry("ann", max_queued=number), "max_queued") for number in (-1, MOST_NUMBER + 1)),
        *(
            (f"[keys.ann]\nsha256 = {odd}\n", "sha256")
            for odd in ("[]", "7", f'["{HASH["ann"]}", 7]', f'"{HASH["ann"]}0"')
        ),
        (entry("ann") + "[other]\n", "other"),
        (entry("ann", max_inflight=10**400), "max_inflight"),
        (entry("ann") + entry("bob").replace(HASH["bob"], HASH["ann"]), "keys: bob and ann have the same sha256"),
        (entry("ann") + entry("bob").replace(HASH["bob"], HASH["ann"].upper()), "keys: bob and ann have the same"),
        (entry("ann").replace(f'"{HASH["ann"]}"', f'["{HASH["ann"]}", "{HASH["ann"]}"]'), "ann and ann have the same"),
        (entry('"a\\u001b[2J"'), r"keys: the name 'a\x1b[2J' has characters"),
        (entry('"a\\nforged"'), r"keys: the name 'a\nforged' has characters"),
    ],
)
def test_a_wrong_file_is_refused_by_name_without_what_it_holds(tmp_path, text, named):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=re.escape(named)) as refused:
        KeyRing(path, "s")
    assert "api_keys" in str(refused.value) and "abc" not in str(refused.value)
    _, correct = str(refused.value).split("A correct entry:\n")
    path.write_text(correct.replace("<64 hexadecimal digits>", "0" * 64))
    assert KeyRing(path, "s").authenticate  # the example has the form that is asked for


def test_a_response_is_known_as_its_keys_by_every_gateway_with_the_secret(file):
    ring = KeyRing(file, "s")
    ann, same, others = ring.named("ann"), *(KeyRing(file, secret).named("ann") for secret in ("s", "other"))
    one, other = ann.new_response_id(), ann.new_response_id()
    assert one != other and len(one) == len("resp_") + 4 * ID_BYTES
    assert ann.made(one) and ann.made(other) and same.made(one)
    assert not KeyRing(file, "s").named("bob").made(one) and not others.made(one)
    for wrong in ("", one[:-1], one + "0", one.upper(), one.removeprefix("resp_"), "resp_" + "0" * 64, "x" + one):
        assert not ann.made(wrong), wrong
    file.write_text(file.read_text().replace(HASH["ann"], HASH["eve"]))
    ring.refresh()
    heir = ring.named("ann")  # of the name
    assert not heir.made(one) and heir.owner != ann.owner and not KeyRing(file, "s").named("ann").made(one)


SHOWN = ("/v1/chat/completions/render", "/v1/chat/completions/render/")
OPERATORS = ("/metrics", "/seamark/", "/seamark/status", "/ui/x")


@pytest.mark.parametrize(
    ("paths", "ann", "nobody"),
    [
        (("/v1/chat/completions", "/v1/models", "/v1/rendered"), None, Unauthorized),
        ((*SHOWN, *ADMIN_OF_WORKERS), Forbidden, Unauthorized),
        (UNSALTED, NotFound, Unauthorized),
    ],
)
def test_what_shows_the_salt_or_loads_files_is_for_admins_and_what_has_no_salt_for_nobody(file, paths, ann, nobody):
    ring = KeyRing(file, "s")
    for path in paths:
        root = NotFound if path in UNSALTED else None
        for error, key in ((ann, ANN), (nobody, ""), (root, ROOT)):
            with pytest.raises(error) if error else nullcontext():
                assert client(scope(path, key), ring).name in ("ann", "root")


@pytest.mark.parametrize(
    ("paths", "ann", "nobody", "elsewhere"),
    [
        (OPERATORS, Forbidden, Unauthorized, NotFound),
        # whose explanations these are is looked at there
        (("/seamark/requests/r",), None, Unauthorized, NotFound),
        (("/v1/other", "/metrics/x", "/uix", "/seamark"), None, Unauthorized, None),
        (("/ui", "/ui/"), None, None, NotFound),
        (("/", "/health", "/ready"), None, None, None),
    ],
)
def test_pages_for_operators_are_for_admins_and_at_an_address_of_their_own_nowhere_else(
    file, paths, ann, nobody, elsewhere
):
    ring = KeyRing(file, "s")
    for path in paths:
        assert admit(scope(path), None, False, False) is None  # a gateway without keys
        admit(scope(path, ROOT), ring, False, False)
        for error, key in ((ann, ANN), (nobody, "")):
            for own_address, wanted in ((False, error), (True, elsewhere or error)):
                with pytest.raises(wanted) if wanted else nullcontext():
                    admit(scope(path, key), ring, own_address, False)
        if elsewhere is not None:
            assert admit(scope(path), ring, True, True) is None
            with pytest.raises(NotFound):
                admit(scope(path, ROOT), ring, True, False)
