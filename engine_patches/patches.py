"""Every change Seamark makes to vLLM, as data: rows that stand over what replaces each function, in these modules.

`python -m engine_patches patches` prints them; how to read one is said of `ledger.Patch`. The cores of recurrent
layers, and the builders of their metadata, have no rows of their own: `promise` and `builders` replace those of the
model that is loaded, by the tables in `families.py` and `forward/layers.py`.

CONTRIBUTING.md says how to support a new vLLM. A cure whose defect no supported version has (tests/upstream) can go.
"""

from __future__ import annotations

from engine_patches import upstream_fixes
from engine_patches.forward import conv_states, layers, loaded_weights, scan_states, step_writes
from engine_patches.ledger import rows_of
from engine_patches.reporting import hooks as reporting
from engine_patches.scheduler import (
    adapters,
    cache_keys,
    draft_windows,
    fan_out,
    hooks,
    kv_events,
    not_kept,
    state_writes,
    transfers,
)
from engine_patches.trial import own_requests

PATCHES = rows_of(
    *(upstream_fixes, adapters, hooks, kv_events, not_kept, state_writes, fan_out, cache_keys, draft_windows),
    *(transfers, loaded_weights, own_requests, reporting, layers, step_writes, scan_states, conv_states),
)
