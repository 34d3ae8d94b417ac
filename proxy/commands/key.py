"""`seamark key`: a new API key and its entry in the keys file. The key is printed once and stored nowhere."""

from __future__ import annotations

import hashlib
import json
import secrets

from proxy.commands.parser import Parser


def main(argv: list[str]) -> int:
    parser = Parser(prog="seamark key", description="make an API key for the gateway's --api-keys file")
    parser.add_argument("name", help="its owner, as shown in logs and metrics")
    parser.add_argument("--share", metavar="GROUP", help="share cached prefixes with the other keys of this group")
    parser.add_argument("--max-inflight", type=int, metavar="N", help="most requests at workers at once; 0: no limit")
    parser.add_argument("--admin", action="store_true", help="may read /seamark/*, /metrics and /ui")
    args = parser.parse_args(argv)
    if args.max_inflight is not None and args.max_inflight < 0:
        parser.error(f"--max-inflight: {args.max_inflight} is negative; 0 sets no limit")
    key = "sk-seamark-" + secrets.token_urlsafe(32)
    print(f"# The key, shown only now: {key}")
    print(f"[keys.{json.dumps(args.name)}]")
    print(f'sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"')
    if args.share is not None:
        print(f"share = {json.dumps(args.share)}")
    if args.max_inflight is not None:
        print(f"max_inflight = {args.max_inflight}")
    if args.admin:
        print("admin = true")
    return 0
