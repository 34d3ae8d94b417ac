"""TODO docstring."""

from __future__ import annotations

import re

# A client's own X-Request-Id is kept in memory for a while; longer ones are replaced.
MAX_ID_CHARACTERS = 256

# How a JSON object begins, in any of its encodings; audio and images do not.
_OBJECT = re.compile(rb"(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff|[\s\0])*\{")
