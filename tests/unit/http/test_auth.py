"""API keys: hashed, read again, limited; which pages and paths each may use."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from proxy.commands.key import main as key_command
from proxy.config_files import MOST_NUMBER
from proxy.errors import NotFound, SettingsError, Unauthorized
from proxy.http.auth import ID_BYTES, KeyRing, client
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


@pytest.mark.parametrize("name", ["ann", "root", None])
def test_a_path_whose_cache_has_no_salt_is_for_nobody(file, name):
    headers = {} if name is None else {"x_api_key": secret(name)}
    with pytest.raises(NotFound if name else Unauthorized):
        client(scope("/v2/embed", **headers), KeyRing(file, "s"))
