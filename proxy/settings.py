"""The gateway's settings: defaults, then a TOML file, then `SEAMARK_<NAME>`, then the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from proxy.config_files import complaint_of, read_toml, service_url, worker_url
from proxy.errors import SettingsError, did_you_mean

PREFIX = "SEAMARK_"

# Variables with our prefix that are for vLLM's environment. One file of variables often serves gateway and workers.
PLUGIN_VARIABLES = frozenset(
    {
        "SEAMARK_ENGINE",
        "SEAMARK_FAN_OUT",
        "SEAMARK_STATE_SHARE",
        "SEAMARK_PIN_SHARE",
        "SEAMARK_CHUNK_ENDS",
        "SEAMARK_DRAFTS",
        "SEAMARK_HINTS_FROM",
        "SEAMARK_KV_EVENTS",
        "SEAMARK_REPORTS_AT",
    }
)

# What Kubernetes sets in each pod for a Service called `seamark` or `seamark-...`, beside an address in `..._PORT`.
_SERVICE_LINK = re.compile(r"SEAMARK_(\w+_)?(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_\w+)")

_SERVICE_ADDRESS = ("tcp://", "udp://", "sctp://")

_OF_SERVICE = "Kubernetes made it for a Service of that name (enableServiceLinks: false in the pod keeps it away)"

RewriteRule = Literal["billing_header", "tools_sorted"]
REWRITE_RULES: tuple[RewriteRule, ...] = get_args(RewriteRule)

REDIS_SCHEMES = ("redis", "rediss", "unix")

# Flags that are given once for each value, and what a value is.
REPEATED = {"worker": "URL", "prefill_worker": "URL", "workers_dns": "NAME:PORT"}

# Settings whose values may hold a password. They are never printed.
SECRET = frozenset({"redis", "otlp_traces_endpoint"})

_BOOL = TypeAdapter(bool)

# What `shadow` implies for settings that are not given: each of these would change a request or an answer.
IN_SHADOW: Mapping[str, Any] = {"ask_usage": False, "rewrite": (), "heartbeat": 0.0, "self_check_interval": 0.0}


class Settings(BaseModel):
    """All settings, each with what `--help` says of it. `load` builds them once, when the gateway starts."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    worker: tuple[str, ...] = Field((), repr=False)
    """base URL of a vLLM server (repeat for several); credentials in it (user:password@) are sent as Basic
    authorization in place of any other"""
    workers_file: Path | None = None
    """TOML file with [[worker]] entries (url, max_inflight) or worker = [], read again when it changes"""
    prefill_worker: tuple[str, ...] = Field((), repr=False)
    """base URL of a vLLM server that computes long prompts for the others and hands them over through NIXL (repeat for
    several); it answers no requests"""
    workers_dns: tuple[str, ...] = ()
    """NAME:PORT (repeat for several): each address of that name, IPv4 and IPv6, is a worker, as with a headless service
    of Kubernetes; workers join once they are found well, and finish their requests when gone"""
    workers_dns_interval: PositiveFloat = 5.0
    """seconds between two looks at workers_dns"""
    workers_dns_keep: NonNegativeFloat = 60.0
    """seconds that workers stay whose name in workers_dns is not resolved any more"""
    host: str = "127.0.0.1"
    """address to listen on; `::`: all, of both families"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """port to listen on"""
    health_interval: PositiveFloat = 5.0
    """seconds between two health checks of each worker"""
    connect_timeout: PositiveFloat = 2.0
    """seconds to wait for a connection to a worker"""
    render_timeout: PositiveFloat = 5.0
    """seconds a worker gets to render a small chat; no request waits for that"""
    max_body_bytes: PositiveInt = 64 * 2**20
    """largest request body"""
    max_bodies_bytes: PositiveInt = 2**30
    """memory for all request bodies together, parsed ones included; one API key may hold twice what is free of it"""
    memory_bytes: PositiveInt = 128 * 2**20
    """memory for the positions of prefixes, and for the index of which worker holds which prefix"""
    text_bytes: NonNegativeInt = 128 * 2**20
    """memory for the text of recent prompts: it serves to read a long conversation's next turn from where it goes on,
    to learn what prompts share inside, to say what changed, and to continue stored responses; 0: none of these"""
    prefixes_file: Path | None = None
    """JSON file of prompts that every worker keeps in its cache; read again when it changes"""
    response_cache: NonNegativeInt = 0
    """memory in bytes for whole answers: an identical deterministic request, of the same key or sharing group, gets the
    same bytes again if it, or response_cache_models, allows that; 0: no response cache"""
    response_cache_models: tuple[str, ...] = ()
    """models, separated by commas, whose deterministic requests the response cache answers without x-seamark-cache:
    allow; *: all"""
    rewrite: tuple[RewriteRule, ...] = Field(
        ("billing_header",),
        description=f"rewrite rules to apply, out of {', '.join(REWRITE_RULES)}; an empty text: none",
    )
    excerpts: bool = False
    """show some characters of prompts in /seamark/requests/{id}"""
    load_slack: NonNegativeInt = 8
    """requests by which a worker that holds the prefix may exceed the least loaded one"""
    max_inflight: NonNegativeInt = 1024
    """requests at one worker at once; more wait in the gateway; 0: no limit"""
    max_queue: NonNegativeInt = 1024
    """requests waiting in the gateway; more are refused with 503"""
    queue_timeout: PositiveFloat = 30.0
    """seconds a request waits for a slot at a worker"""
    silence_timeout: PositiveFloat = 900.0
    """seconds without a byte from the worker after which the gateway gives a request up"""
    client_timeout: PositiveFloat = 60.0
    """seconds for the head of a request, and to wait for the next piece of its body"""
    min_body_rate: NonNegativeFloat = 1024.0
    """bytes a second at which a body has to come on the whole, behind client_timeout seconds of grace; slower ones are
    refused with 408; 0: no limit"""
    send_timeout: PositiveFloat = 120.0
    """seconds in which a client takes no byte of its answer, after which it is cut off"""
    keepalive_timeout: PositiveFloat = 95.0
    """keep-alive: seconds for which an idle connection is kept; what stands before the gateway has to close it earlier
    (ALB does after 60, Traefik and Go after 90), or its next request is lost; with three of four max_connections taken:
    5"""
    max_collected_bytes: NonNegativeInt = 2**20
    """largest JSON answer that the gateway collects, so that its headers say what came from the cache; larger ones are
    passed on as they come, without these headers"""
    ask_usage: bool = True
    """ask streams for their token counts even if the client did not; the client does not see them"""
    heartbeat: NonNegativeFloat = 15.0
    """seconds of silence after which a stream gets a comment; 0: never"""
    stop_delay: NonNegativeFloat = 5.0
    """seconds between SIGTERM and the end of listening, in which /ready says 503 and requests are still served: load
    balancers need time to learn it; 0, SIGINT or a second signal: none"""
    drain_timeout: PositiveFloat = 60.0
    """seconds to finish requests when the gateway stops"""
    replay_seconds: NonNegativeFloat = 30.0
    """seconds for replaying hot prefixes on a restarted worker before it gets requests; 0: no replay"""
    api_keys: Path | None = None
    """TOML file with the API keys of clients; read again when it changes"""
    salt_secret_file: Path | None = None
    """file with the secret from which the cache salts of API keys are derived, and the proofs of whose a stored
    response is, the same for all gateways; without it each start draws a new secret for salts"""
    worker_api_key_file: Path | None = None
    """file with the API key that the workers require (vLLM's --api-key)"""
    admin_port: Annotated[int | None, Field(ge=0, le=65535)] = None
    """port for /metrics, /ui and /seamark/*, which the main port then no longer serves"""
    admin_host: str = "127.0.0.1"
    """address for the admin port"""
    max_header_bytes: PositiveInt = 65536
    """largest request head: target and headers"""
    max_connections: NonNegativeInt = 0
    """connections of clients at once; requests on more are refused with 503; 0: as many as there are descriptors for,
    two each (RLIMIT_NOFILE, which the gateway raises to the hard limit)"""
    # Python's JSON reader gives up at about a thousand levels; no chat, tool or schema comes near this number.
    max_json_depth: Annotated[int, Field(gt=0, le=900)] = 128
    """deepest nesting of a JSON body"""
    # Each costs the event loop a microsecond or two; the longest chats of agents have some thousand.
    max_json_values: PositiveInt = 200_000
    """most objects, arrays and named values in a JSON body, and a tenth of the most elements of arrays"""
    max_boundary_values: NonNegativeInt = 20_000
    """values in a JSON body, counted as for max_json_values, up to which boundaries are sought in it; a request with
    more is forwarded without a hint"""

    self_check_interval: NonNegativeFloat = 30.0
    """seconds between two checks of an idle worker: are its answers from the cache right? 0: no checks"""
    self_check_tokens: Annotated[int, Field(ge=256)] = 16384
    """most tokens of a prompt in such a check"""
    shadow: bool = False
    """leave requests and answers unchanged, send no hints, and report what is lost without them"""

    sidecar: bool = False
    """one gateway beside each vLLM, behind a balancer that knows prefixes: one worker, whose /metrics are shown with
    the gateway's own; nothing is shared with others"""
    otlp_traces_endpoint: str | None = Field(None, repr=False)
    """URL, path included, of a collector that gets OpenTelemetry spans of requests, OTLP over HTTP
    (http://collector:4318/v1/traces); needs the extra `tracing`; unset: none"""
    trace: Path | None = None
    """JSONL file that gets a line for each answered request, in Mooncake's format and without its text: when it came,
    tokens, session, and salted hashes of its prompt's blocks; for that the worker renders each prompt once more"""
    redis: str | None = Field(None, repr=False)
    """URL of a Redis server through which gateways share what they learn"""

    @property
    def json_limits(self) -> tuple[int, int]:
        """How deep a JSON body may be nested, and how many values it may have."""
        return self.max_json_depth, self.max_json_values

    @model_validator(mode="before")
    @classmethod
    def _shadow(cls, values: dict[str, Any]) -> dict[str, Any]:
        try:
            on = _BOOL.validate_python(values.get("shadow", False))
        except ValidationError:
            return values  # the field itself says what is wrong
        return {**IN_SHADOW, **values} if on else values

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if not set(self.worker).isdisjoint(self.prefill_worker):
            raise ValueError("prefill_worker: it names a worker that worker names, too; each has one part")
        if self.sidecar:
            if len(self.worker) != 1:
                raise ValueError("sidecar: it stands beside one vLLM: name that one with --worker")
            for name in ("workers_file", "workers_dns", "prefill_worker", "redis"):
                if getattr(self, name):
                    raise ValueError(f"sidecar: it knows no other gateway or worker: leave out {name}")
        return self

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _collector(cls, url: str | None) -> str | None:
        if url is None or not url.strip():
            return None
        parts = urlsplit(url.strip())
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("the URL must read http://host:port/v1/traces, or https")
        return url.strip()

    @field_validator("redis")
    @classmethod
    def _redis(cls, url: str | None) -> str | None:
        if url is None or not url.strip():
            return None
        parts = urlsplit(url.strip())
        if parts.scheme not in REDIS_SCHEMES:
            raise ValueError(f"its URL must begin with one of {', '.join(f'{scheme}://' for scheme in REDIS_SCHEMES)}")
        path = parts.path.strip("/")
        if parts.scheme == "unix":
            sound = bool(path)
        else:
            # `port` raises a `ValueError` that shows the port and nothing else.
            sound = bool(parts.hostname) and (parts.port is None or parts.port > 0) and (not path or path.isdecimal())
        if not sound:
            raise ValueError("the URL must read redis://[user:password@]host[:port][/database] or unix:///path")
        if any(not name.startswith("ssl_") and name != "db" for name, _ in parse_qsl(parts.query)):
            raise ValueError("its URL may hold no options but db and those that begin with ssl_")
        return url.strip()

    @field_validator("worker", "prefill_worker", "workers_dns", mode="before")
    @classmethod
    def _workers(cls, value: Any, info: ValidationInfo) -> tuple[str, ...]:
        given = value.split(",") if isinstance(value, str) else value
        is_name = info.field_name == "workers_dns"
        if not isinstance(given, Sequence) or (value and not any(str(each).strip() for each in given)):
            raise ValueError(f"it must be {'NAME:PORT' if is_name else 'a URL'} or a list of these")
        read = service_url if is_name else worker_url
        return tuple(dict.fromkeys(read(each) for each in given if str(each).strip()))

    @field_validator("rewrite", "response_cache_models", mode="before")
    @classmethod
    def _rules(cls, value: Any) -> Any:
        if isinstance(value, str) and value.startswith(("'", '"')):
            raise ValueError("leave the quotes out: here they would be part of a name")
        return tuple(filter(None, map(str.strip, value.split(",")))) if isinstance(value, str) else value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with these settings")
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        text = field.description or ""
        if name in REPEATED:
            parser.add_argument(flag, action="append", metavar=REPEATED[name], help=text)
            continue
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        text += "" if default is None else f" (default {str(default).lower()})"
        is_switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        parser.add_argument(flag, metavar=name.upper(), help=text, **is_switch)


def load(args: argparse.Namespace, environment: Mapping[str, str]) -> Settings:
    """Merge the sources and validate. Raises `SettingsError` naming the setting."""
    names = list(Settings.model_fields)
    values: dict[str, Any] = {}
    config = args.config or (Path(environment[PREFIX + "CONFIG"]) if environment.get(PREFIX + "CONFIG") else None)
    if config is not None:
        values.update(read_toml("config", config))
        if unknown := [no_setting(name) for name in values if name not in names]:
            raise SettingsError(f"config: {config}: {'; '.join(unknown)}")
    environment = {name: value for name, value in environment.items() if not _is_service(name, value)}
    variables = {name: environment.get(PREFIX + name.upper()) for name in names}
    # An empty variable was left as .env.example has it. Only for the rewrite rules does it mean something: none.
    values.update({name: value for name, value in variables.items() if value or (value == "" and name == "rewrite")})
    values.update({name: getattr(args, name) for name in names if getattr(args, name) is not None})
    if not any(values.get(name) for name in ("worker", "workers_file", "workers_dns")):
        raise SettingsError(
            "worker: none is given; name at least one vLLM server, for example --worker http://127.0.0.1:8000"
        )
    try:
        return Settings(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_complaints(error.errors()))) from None


def no_setting(name: str) -> str:
    """That there is no setting of this name, and which ones read like it."""
    return f"no setting {name!r}{did_you_mean(name.replace('-', '_').lower(), Settings.model_fields)}"


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each variable with our prefix that is not read. It is no error: others put some there, too."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | {PREFIX + "CONFIG"} | PLUGIN_VARIABLES
    return [
        f"{name} is ignored: {_OF_SERVICE if name in known else no_setting(name.removeprefix(PREFIX).lower())}"
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX) and not _SERVICE_LINK.fullmatch(name) and (name in known) == _is_service(name, value)
    ]


def _is_service(name: str, value: str) -> bool:
    return name.endswith("_PORT") and value.startswith(_SERVICE_ADDRESS)


def _complaints(errors: Sequence[Any]) -> list[str]:
    complaints = []
    for error in errors:
        # Of settings that do not go together, nothing is shown; a worker's URL may hold a password.
        hidden = not error["loc"] or error["loc"][0] in SECRET or "@" in str(error["input"])
        complaints.append(complaint_of(error) + ("" if hidden else f" (got {error['input']!r})"))
    return complaints
