"""vLLM's kernels for CUDA in Triton's interpreter: a state written inside a pass is that of a chunk that ends there.

Bit for bit, with the metadata of both model runners; and planted defects are seen. How fast a GPU is, or in which order
it adds, it does not say.
"""

from __future__ import annotations

import pytest

from tests.harness.versions import interpreted, source_of

NEWEST = "0.33.0"

MAMBA2, GDN = "mamba2", "gdn"

LAYOUTS = ("V1: block tables", "V2: aligned indices")

DEFECTS = {MAMBA2: 4, GDN: 5}  # that are planted

# Gated delta kernels take no float32 inputs, and convert none.
ON_REQUEST = [
    (MAMBA2, "bfloat16", "float32", None),
    (GDN, "bfloat16", "bfloat16", None),
    (MAMBA2, "float32", "float32", NEWEST),
    *((family, "bfloat16", cache, NEWEST) for family in (MAMBA2, GDN) for cache in ("float32", "bfloat16")),
]
CASES = [
    (MAMBA2, "bfloat16", "bfloat16", None),
    *(pytest.param(*case, marks=pytest.mark.on_request) for case in ON_REQUEST),
]


def wrong(differences: dict[str, dict[str, int]]) -> dict[str, int]:
    """What differs, with the number of values that do."""
    return {f"{kind}: {name}": many for kind, found in differences.items() for name, many in found.items() if many}


def check_exact(found: dict[str, dict[str, dict[str, int]]]) -> None:
    for layout in LAYOUTS:
        assert wrong(found[layout]) == {}
        # Four states, in two cache groups, of two parts each; outputs and running states of three rows.
        sizes = {kind: len(of_kind) for kind, of_kind in found[layout].items()}
        assert sizes == {"states": 16, "outputs": 6, "running": 6}


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "dtype", "cache", "version"), CASES)
def test_states_outputs_and_running_states_are_bit_equal(family, dtype, cache, version):
    source = source_of(version) if version else None
    check_exact(interpreted("gpu_kernels", family, dtype, cache, source=source))


@pytest.mark.parametrize(
    ("family", "dtype"), [(MAMBA2, "float32"), pytest.param(GDN, "bfloat16", marks=pytest.mark.thorough)]
)
def test_with_a_float32_cache_they_are_equal_and_every_planted_defect_is_seen(family, dtype):
    found = interpreted("gpu_kernels", family, dtype, "float32", "defects")
    check_exact(found)
    seen = [defect for defect in found.keys() - set(LAYOUTS) if wrong(found[defect])]
    assert len(seen) == len(found) - len(LAYOUTS) == DEFECTS[family]
