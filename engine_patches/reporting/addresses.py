"""How the processes of one server find one another's reports."""

from __future__ import annotations

# Set by the process that starts the engines, for its children: a folder of this user's own, in which sockets are.
FOLDER = "SEAMARK_INTERNAL_REPORTS"
SENT_TO = "sent"  # where engines send reports, a socket of ZeroMQ
READ_INSIDE = "read"  # where other processes of the same server read them
MAX_WAITING = 1000  # reports that were sent and not taken: some kilobytes each
READ_AT = "SEAMARK_INTERNAL_REPORTS_READ_AT"  # HOST:PORT where gateways do
