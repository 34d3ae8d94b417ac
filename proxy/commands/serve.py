"""`seamark serve`: the gateway under uvicorn."""

from __future__ import annotations

import gc
import importlib
import os
import sys

from proxy import settings as settings_of
from proxy.commands.parser import Parser
from proxy.errors import SettingsError
from proxy.printable import printable, printable_lines


def main(argv: list[str]) -> int:
    parser = Parser(
        prog="seamark serve", description="the gateway; every setting also as SEAMARK_<NAME> or in the config file"
    )
    settings_of.add_arguments(parser)
    args = parser.parse_args(argv)
    for sentence in settings_of.unknown_variables(os.environ):
        print(f"seamark serve: {printable(sentence)}", file=sys.stderr)
    try:
        settings = settings_of.load(args, os.environ)
        from proxy.server import process_limits
        from proxy.server.uvicorn_server import bound, server_for

        if settings.redis is not None:
            importlib.import_module("proxy.routing.redis_sync")  # if redis is missing, a line says so before the start
        process_limits.raise_descriptor_limit()
        process_limits.give_large_blocks_back()
        fitted = process_limits.fitted(settings)
        if fitted is not settings:
            bounds = ", ".join(f"{name} is {getattr(fitted, name)}" for name in process_limits.BOUNDS)
            print(f"seamark serve: this process may not have the memory of the settings: {bounds}", file=sys.stderr)
        server = server_for(fitted, LOGGING)
        sockets = bound("port", fitted.host, fitted.port)
    except SettingsError as error:
        print(f"seamark serve: {printable_lines(error)}", file=sys.stderr)
        return 2
    # A request leaves few cycles behind; collecting them after every 700 new objects took a twelfth of its time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    server.run(sockets)
    return 0 if server.started else 3


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "plain": {
            "class": "proxy.printable.PrintableFormatter",
            "format": "%(asctime)s %(levelname)s %(name)s %(message)s",
        }
    },
    "filters": {"limit": {"()": "proxy.printable.LogLimit"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain", "filters": ["limit"]}},
    "loggers": {name: {"handlers": ["stderr"], "level": "INFO", "propagate": False} for name in ("uvicorn", "seamark")},
}
