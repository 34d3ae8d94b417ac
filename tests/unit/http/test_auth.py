"""API keys: hashed, read again, limited; which pages and paths each may use."""

from __future__ import annotations

import hashlib
import re
from base64 import b64decode
from pathlib import Path

import pytest

from proxy.commands.key import main as key_command
from proxy.config_files import MOST_NUMBER
from proxy.errors import Forbidden, NotFound, SettingsError, Unauthorized
from proxy.http.auth import ID_BYTES, SALT_BYTES, KeyRing, admit, client, is_for_operators
from tests.harness.api_keys import entry, secret


def scope(path: str = "/v1/chat/completions", **headers: str) -> dict:
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "headers": listed}


HASH = {name: hashlib.sha256(secret(name).encode()).hexdigest() for name in ("ann", "bob", "eve")}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(entry("ann") + entry("bob", share="team") + entry("cleo", share="team") + entry("root", admin=True))
    return path


def test_a_key_is_known_in_either_header(file):
    ring = KeyRing(file, "s")
    assert ring.authenticate(scope(authorization="Bearer " + secret("ann"))).name == "ann"
    assert ring.authenticate(scope(authorization="bearer  " + secret("ann"))).name == "ann"
    assert ring.authenticate(scope(x_api_key=secret("bob"))).name == "bob"
    assert ring.authenticate(scope(x_api_key=f" {secret('bob')} ")).name == "bob"


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "whose"),
    [
        (secret("ann"), "sk-ant-placeholder", "ann"),
        ("sk-ant-oat01-placeholder", secret("ann"), "ann"),
        ("", secret("ann"), "ann"),
        (secret("ann"), secret("root"), "ann"),
        (secret("bob"), secret("ann"), "bob"),
    ],
)
def test_of_two_credentials_the_one_that_is_a_key_counts_in_any_order(file, authorization, x_api_key, whose):
    """If both are, an admin's key beside a client's widens nothing."""
    ring = KeyRing(file, "s")
    asked = scope(authorization="Bearer " + authorization, x_api_key=x_api_key)
    turned = {**asked, "headers": asked["headers"][::-1]}
    assert ring.authenticate(asked).name == ring.authenticate(turned).name == whose


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer sk-wrong"},
        {"authorization": "Basic x"},
        {"x_api_key": ""},
        {"authorization": "Bearer sk-wrong", "x_api_key": "sk-wrong-too"},
    ],
)
def test_an_unknown_key_is_refused(file, headers):
    with pytest.raises(Unauthorized):
        KeyRing(file, "s").authenticate(scope(**headers))


def test_salts_depend_on_key_group_and_secret_alone(file):
    def salts(secret_of_gateway: str) -> dict[str, str]:
        ring = KeyRing(file, secret_of_gateway)
        return {name: ring.authenticate(scope(x_api_key=secret(name))).salt for name in ("ann", "bob", "cleo", "root")}

    assert salts("s") == salts("s")
    assert salts("s")["bob"] == salts("s")["cleo"] and len(set(salts("s").values())) == 3
    assert not set(salts("s").values()) & set(salts("other").values())


def test_the_file_is_read_again_and_what_a_key_has_under_way_stays_counted(file):
    ring = KeyRing(file, "s")
    ann = ring.authenticate(scope(x_api_key=secret("ann")))
    ann.under_way = 3
    file.write_text(entry("ann", max_inflight=2))
    ring.refresh()
    assert ring.authenticate(scope(x_api_key=secret("ann"))) is ann and not ann.has_room
    with pytest.raises(Unauthorized):
        ring.authenticate(scope(x_api_key=secret("bob")))


def test_a_revoked_key_is_not_valid_again_because_another_entry_has_its_hash(file):
    """Else of two entries the last would win, and its limits would be the other's."""
    ring = KeyRing(file, "secret")
    file.write_text(entry("ann", max_inflight=1) + entry("eve").replace(HASH["eve"], HASH["ann"]) + "\n")
    ring.refresh()
    assert not ring.file.is_current and ring.named("eve") is None


def test_a_file_that_becomes_wrong_changes_nothing(file):
    ring = KeyRing(file, "s")
    for wrong in ("[keys", "[keys.ann]\n", '[keys.ann]\nsha256 = "abc"\n'):
        file.write_text(wrong)
        ring.refresh()
        assert ring.authenticate(scope(x_api_key=secret("ann"))).name == "ann"
    file.unlink()
    ring.refresh()
    assert ring.authenticate(scope(x_api_key=secret("ann"))).name == "ann"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[keys", "TOML"),
        ("[keys.ann]\n", "sha256"),
        ('[keys.ann]\nsha256 = "abc"\n', "64 hexadecimal digits"),
        (entry("ann", max_inflight=-1), "max_inflight"),
        (entry("ann", shares="x"), "shares"),
        (entry("ann", max_inflight=10**400), "max_inflight"),
        (entry("ann") + entry("bob").replace(HASH["bob"], HASH["ann"]), "keys: bob and ann have the same sha256"),
        (entry("ann") + entry("bob").replace(HASH["bob"], HASH["ann"].upper()), "keys: bob and ann have the same"),
        (entry("ann").replace(f'"{HASH["ann"]}"', f'["{HASH["ann"]}", "{HASH["ann"]}"]'), "ann and ann have the same"),
        (entry('"a\\u001b[2J"'), r"keys: the name 'a\x1b[2J' has characters"),
        (entry('"a\\nforged"'), r"keys: the name 'a\nforged' has characters"),
        (entry('"\\u202Enna"'), r"keys: the name '\u202enna' has characters"),
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


@pytest.mark.parametrize("most", [4, 0])
def test_the_command_makes_an_entry_for_the_key_it_prints(tmp_path, capsys, most):
    assert key_command(["dora", "--share", "team", "--max-inflight", str(most)]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "keys.toml").write_text(printed)
    key = printed.splitlines()[0].rsplit(" ", 1)[1]
    found = KeyRing(tmp_path / "keys.toml", "s").authenticate(scope(x_api_key=key))
    assert (found.name, found.entry.share, found.entry.max_inflight) == ("dora", "team", most)


def test_a_key_counts_by_its_hash_alone(tmp_path):
    (tmp_path / "keys.toml").write_text(entry("ann"))
    ring = KeyRing(tmp_path / "keys.toml", "s")
    digest = hashlib.sha256(secret("ann").encode()).hexdigest()
    for known in (digest, digest.upper(), secret("ann") + "x", secret("ann")[:-1], secret("ann").upper()):
        with pytest.raises(Unauthorized, match="does not know"):
            ring.authenticate(scope(x_api_key=known))
    with pytest.raises(Unauthorized, match="No API key"):
        ring.authenticate(scope(cookie=secret("ann")))


def test_while_a_key_is_replaced_the_old_and_the_new_one_are_the_same_client(file):
    hashes = [hashlib.sha256(secret(name).encode()).hexdigest() for name in ("old", "new")]
    file.write_text(f'[keys.ann]\nsha256 = ["{hashes[0]}", "{hashes[1].upper()}"]\n')
    ring = KeyRing(file, "s")
    old, new = (ring.authenticate(scope(x_api_key=secret(name))) for name in ("old", "new"))
    assert old is new and old.name == "ann"
    file.write_text(f'[keys.ann]\nsha256 = "{hashes[1]}"\n')
    ring.refresh()
    assert ring.authenticate(scope(x_api_key=secret("new"))) is new
    with pytest.raises(Unauthorized):
        ring.authenticate(scope(x_api_key=secret("old")))


def test_a_group_is_no_key_of_the_same_name(file):
    file.write_text(entry("ann") + entry("bob", share="ann"))
    ring = KeyRing(file, "s")
    ann, bob = (ring.authenticate(scope(x_api_key=secret(name))) for name in ("ann", "bob"))
    assert ann.salt != bob.salt and ann.salt not in repr(ann)
    file.write_text(entry("ann", share="ann") + entry("bob", share="ann"))
    ring.refresh()
    assert ann.salt == bob.salt  # both are still the same objects


def test_without_a_secret_salts_are_those_of_one_process(file):
    salts = {KeyRing(file, None).authenticate(scope(x_api_key=secret("ann"))).salt for _ in range(2)}
    assert len(salts) == 2


@pytest.mark.parametrize(("limit", "inflight", "has_room"), [(0, 99, True), (2, 1, True), (2, 2, False), (2, 3, False)])
def test_a_key_has_room_for_as_many_requests_as_its_entry_says(file, limit, inflight, has_room):
    file.write_text(entry("ann", max_inflight=limit))
    ann = KeyRing(file, "s").authenticate(scope(x_api_key=secret("ann")))
    ann.under_way = inflight
    assert ann.has_room == has_room


ADMINS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/chat/completions/render", "/v1/completions/render/")


@pytest.mark.parametrize("path", ADMINS)
def test_what_shows_the_salt_or_loads_files_is_for_admins(file, path):
    ring = KeyRing(file, "s")
    with pytest.raises(Forbidden, match="admin = true"):
        client(scope(path, x_api_key=secret("ann")), ring)
    assert client(scope(path, x_api_key=secret("root")), ring).name == "root"
    with pytest.raises(Unauthorized):
        client(scope(path), ring)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/rendered"])
def test_all_other_paths_of_workers_are_for_every_key_and_for_nobody_else(file, path):
    ring = KeyRing(file, "s")
    assert client(scope(path, x_api_key=secret("ann")), ring).name == "ann"
    with pytest.raises(Unauthorized):
        client(scope(path), ring)


OPERATORS = ("/metrics", "/seamark/status", "/seamark/live", "/ui/data")


@pytest.mark.parametrize("path", OPERATORS)
def test_pages_for_operators_are_for_admins(file, path):
    ring = KeyRing(file, "s")
    assert admit(scope(path, x_api_key=secret("root")), ring, False, False).name == "root"
    with pytest.raises(Forbidden, match="admin = true"):
        admit(scope(path, x_api_key=secret("ann")), ring, False, False)
    with pytest.raises(Unauthorized):
        admit(scope(path), ring, False, False)
    assert admit(scope(path), None, False, False) is None  # a gateway without keys


@pytest.mark.parametrize("path", ["/seamark/requests/r", "/v1/other"])
def test_other_pages_are_for_every_key(file, path):
    """A client may read the explanations of its own requests; whose they are is looked at there."""
    ring = KeyRing(file, "s")
    assert admit(scope(path, x_api_key=secret("ann")), ring, False, False).name == "ann"
    with pytest.raises(Unauthorized):
        admit(scope(path), ring, False, False)


@pytest.mark.parametrize("path", ["/health", "/ready", "/ui", "/ui/"])
def test_some_pages_need_no_key(file, path):
    assert admit(scope(path), KeyRing(file, "s"), False, False) is None


@pytest.mark.parametrize("name", ["root", "ann", None])
def test_operators_pages_with_an_address_of_their_own_are_nowhere_else(file, name):
    ring, headers = KeyRing(file, "s"), {} if name is None else {"x_api_key": secret(name)}
    for path in (*OPERATORS, "/ui", "/seamark/requests/r"):
        with pytest.raises(NotFound):
            admit(scope(path, **headers), ring, True, False)
        with pytest.raises(NotFound):
            admit(scope(path, **headers), None, True, False)
        assert admit(scope(path, **headers), ring, True, True) is None
    assert admit(scope("/health"), ring, True, False) is None


def test_with_pages_on_an_address_of_their_own_all_other_paths_need_a_key_as_before(file):
    ring = KeyRing(file, "s")
    assert admit(scope("/v1/other", x_api_key=secret("ann")), ring, True, False).name == "ann"
    with pytest.raises(Unauthorized):
        admit(scope("/v1/other"), ring, True, False)


# Names of stored responses.

GATEWAYS = "s"


def key_of(file: Path, name: str = "ann", *, ring_secret: str | None = GATEWAYS):
    found = KeyRing(file, ring_secret).named(name)
    assert found is not None
    return found


def test_a_response_is_known_as_its_keys_by_every_gateway_with_the_secret(file):
    ann = key_of(file)
    one, other = ann.new_response_id(), ann.new_response_id()
    assert one != other and len(one) == len("resp_") + 4 * ID_BYTES
    assert ann.made(one) and ann.made(other) and key_of(file).made(one)
    assert not key_of(file, "bob").made(one) and not key_of(file, ring_secret="other").made(one)
    for wrong in ("", one[:-1], one + "0", one.upper(), one.removeprefix("resp_"), "resp_" + "0" * 64, "x" + one):
        assert not ann.made(wrong), wrong


def test_without_a_secret_a_response_is_proved_by_each_hash_of_its_key(file):
    """While one key replaces another, responses of both are known."""
    file.write_text(f'[keys.ann]\nsha256 = ["{HASH["ann"]}", "{HASH["bob"]}"]\n[keys.bob]\nsha256 = "{HASH["eve"]}"\n')
    both = key_of(file, ring_secret=None)
    made = both.new_response_id()
    assert both.made(made) and not key_of(file, "bob", ring_secret=None).made(made)
    file.write_text(f'[keys.ann]\nsha256 = "{HASH["ann"]}"\n')
    assert key_of(file, ring_secret=None).made(made)
    file.write_text(f'[keys.ann]\nsha256 = ["{HASH["bob"]}", "{HASH["ann"]}"]\n')
    assert key_of(file, ring_secret=None).made(made)
    file.write_text(f'[keys.ann]\nsha256 = "{HASH["bob"]}"\n')
    assert not key_of(file, ring_secret=None).made(made)


@pytest.mark.parametrize(("gateway_secret", "last"), [("s", True), (None, False), ("", False)])
def test_salts_last_where_they_are_derived_from_a_secret(file, gateway_secret, last):
    assert KeyRing(file, gateway_secret).salts_last is last
    salts = {key_of(file, ring_secret=gateway_secret).salt for _ in range(2)}
    assert len(salts) == (1 if last else 2)
    assert all(len(b64decode(salt, altchars=b"-_")) == SALT_BYTES for salt in salts)


def test_an_entry_that_says_nothing_else_has_the_documented_limits(file):
    ann = key_of(file)
    assert (ann.entry.max_inflight, ann.entry.max_queued, ann.entry.share, ann.entry.admin) == (0, 64, None, False)
    assert (ann.under_way, ann.queued) == (0, 0)
    assert KeyRing(file, "s").named("nobody") is None


@pytest.mark.parametrize(
    ("lines", "is_sound"),
    [
        ('sha256 = "{0}"\nmax_inflight = 0\nmax_queued = 0', True),
        ('sha256 = "{0}"\nmax_inflight = {most}\nmax_queued = {most}', True),
        ('sha256 = "{0}"\nmax_queued = -1', False),
        ('sha256 = "{0}"\nmax_queued = {more}', False),
        ('sha256 = "{0}"\nmax_inflight = {more}', False),
        ("sha256 = []", False),
        ('sha256 = ["{0}", "{0}"]', False),
        ('sha256 = ["{0}", 7]', False),
        ('sha256 = "{0}0"', False),
        ('sha256 = "{0:.63}g"', False),
        ("sha256 = 7", False),
    ],
)
def test_an_entry_is_sound_or_the_file_is_refused(file, lines, is_sound):
    file.write_text("[keys.ann]\n" + lines.format(HASH["ann"], most=MOST_NUMBER, more=MOST_NUMBER + 1) + "\n")
    if is_sound:
        KeyRing(file, "s")
    else:
        with pytest.raises(SettingsError, match="ann"):
            KeyRing(file, "s")


def test_names_that_cannot_be_shown_and_fields_beside_the_keys_are_refused(file):
    for text in (entry("ann").replace("keys.ann", r'keys."a\u0007"'), entry("ann") + "[other]\n"):
        file.write_text(text)
        with pytest.raises(SettingsError):
            KeyRing(file, "s")


# Which header counts.


def test_of_each_header_the_first_value_counts_and_no_other_header_does(file):
    ring = KeyRing(file, "s")

    def whose(*headers: tuple[str, str]) -> str | None:
        asked = {"path": "/", "headers": [(name.encode(), value.encode()) for name, value in headers]}
        try:
            return ring.authenticate(asked).name
        except Unauthorized:
            return None

    ann, bob = secret("ann"), secret("bob")
    assert whose(("x-api-key", ann), ("x-api-key", bob)) == "ann"
    assert whose(("x-api-key", "wrong"), ("x-api-key", bob)) is None
    assert whose(("authorization", f"Bearer {ann}"), ("authorization", f"Bearer {bob}")) == "ann"
    assert whose(("authorization", f"Basic {ann}"), ("authorization", f"Bearer {bob}")) == "bob"
    assert whose(("proxy-authorization", f"Bearer {ann}")) is whose(("x-key", ann)) is None
    assert whose(("authorization", ann)) is whose(("authorization", f"Bearer{ann}")) is None


@pytest.mark.parametrize("name", ["ann", "root", None])
def test_a_path_whose_cache_has_no_salt_is_for_nobody(file, name):
    headers = {} if name is None else {"x_api_key": secret(name)}
    with pytest.raises(NotFound if name else Unauthorized):
        client(scope("/v2/embed", **headers), KeyRing(file, "s"))


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        *((path, True) for path in ("/metrics", "/ui", "/ui/", "/ui/x", "/seamark/", "/seamark/x")),
        *((path, False) for path in ("/", "/health", "/metrics/x", "/uix", "/seamark", "/v1/models")),
    ],
)
def test_pages_that_show_all_requests_are_operators(path, wanted):
    assert is_for_operators(path) is wanted


def test_the_root_needs_no_key(file):
    assert admit(scope("/"), KeyRing(file, "s"), False, False) is None
    assert admit(scope("/"), KeyRing(file, "s"), True, False) is None
