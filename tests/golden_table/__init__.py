"""Which public function computes a golden case, and how its arguments are called there.

One function per family of the manifest, in the module of its kind; it renames, packs and looks up, and computes
nothing itself. A form that the package does not ship goes to `tests/oracles/`. To add a family, write its function and
name it in `FAMILIES` of its module.
"""

from golden_table import distillation, fused, policy, preference
from golden_table.case import Compute

FAMILIES: dict[str, Compute] = {
    **distillation.FAMILIES,
    **fused.FAMILIES,
    **policy.FAMILIES,
    **preference.FAMILIES,
}
"""Family of the manifest -> what computes its cases."""
