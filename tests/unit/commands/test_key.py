"""`seamark key` prints a new key once, and an entry of the keys file that the gateway takes for it."""

from __future__ import annotations

import hashlib
import tomllib

import pytest

from proxy.commands import key


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, dict[str, dict[str, object]]]:
    """The key, and the entries by their names."""
    assert key.main(list(arguments)) == 0
    first, _, entry = capsys.readouterr().out.partition("\n")
    said, _, secret = first.partition(": ")
    assert said == "# The key, shown only now" and secret not in entry
    return secret, tomllib.loads(entry)["keys"]


@pytest.mark.parametrize(
    ("flags", "fields"),
    [
        ([], {}),
        (["--share", 'team "a"'], {"share": 'team "a"'}),
        (["--share", ""], {"share": ""}),
        (["--max-inflight", "0"], {"max_inflight": 0}),
        (["--max-inflight", "8", "--admin"], {"max_inflight": 8, "admin": True}),
    ],
)
def test_an_entry_has_the_hash_of_the_key_and_what_was_asked_for(flags, fields, capsys):
    secret, entries = made(capsys, 'ann "b"', *flags)
    assert entries == {'ann "b"': {"sha256": hashlib.sha256(secret.encode()).hexdigest(), **fields}}


def test_each_key_is_a_long_one_of_its_own(capsys):
    keys = {made(capsys, "ann")[0] for _ in range(5)}
    assert len(keys) == 5 and all(each.startswith("sk-seamark-") and len(each) >= 50 for each in keys)
