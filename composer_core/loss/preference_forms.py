"""Published preference losses as rows of one table; `preference.py` holds their formulas, under the same names.

No torch here: a spec is checked against this table. To add a form, add a row and a function of `PairLogps`.
Another package ships its own form as a loss channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PreferenceForm:
    """One published loss on preference pairs, with its paper's numbers."""

    name: str
    paper: str
    """arXiv number; empty for what needs none."""
    summary: str
    reference: bool
    """Whether it compares the policy with a reference model's log-probs."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """The numbers its function takes by keyword, and their values."""


PREFERENCE_FORMS: dict[str, PreferenceForm] = {
    form.name: form
    for form in (
        PreferenceForm(
            "dpo", "2305.18290", "Logistic loss on the margin over the reference; label_smoothing > 0 is cDPO",
            reference=True, defaults={"beta": 0.1, "label_smoothing": 0.0},
        ),
        PreferenceForm(
            "robust", "2403.00409", "DPO debiased for a known share of flipped labels; can be negative",
            reference=True, defaults={"beta": 0.1, "label_smoothing": 0.1},
        ),
        PreferenceForm(
            "ipo", "2310.12036", "Squared distance of the margin per token from 1 / (2 beta)",
            reference=True, defaults={"beta": 0.1},
        ),
        PreferenceForm(
            "simpo", "2405.14734", "Margin of mean log-probs beyond gamma, without a reference",
            reference=False, defaults={"beta": 2.0, "gamma": 1.0, "label_smoothing": 0.0},
        ),
        PreferenceForm(
            "sigmoid-norm", "2411.15124", "DPO on log-ratios per token, as in Tulu 3",
            reference=True, defaults={"beta": 5.0},
        ),
        PreferenceForm(
            "apo-zero", "2408.06266", "Raises the chosen and lowers the rejected: teachers better than the policy",
            reference=True, defaults={"beta": 0.1},
        ),
        PreferenceForm(
            "apo-down", "2408.06266", "Lowers both, the rejected more: a policy better than the teachers",
            reference=True, defaults={"beta": 0.1},
        ),
        PreferenceForm(
            "kto", "2402.01306", "Each answer against the policy's drift from the reference (`PairLogps.drift`)",
            reference=True, defaults={"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
        ),
        PreferenceForm(
            "orpo", "2403.07691", "NLL of the chosen, plus beta times an odds-ratio margin; no reference",
            reference=False, defaults={"beta": 0.1},
        ),
        PreferenceForm(
            "imitate", "", "NLL per token of the chosen answer; the rejected one is not read",
            reference=False,
        ),
    )
}  # fmt: skip
