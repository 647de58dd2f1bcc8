"""One of two processes of TRL of which only the first meets a loss that is no number (`poisoned_rank.py RANK FOLDER`).

The models are in FOLDER. What the trainer raised, and whether a weight moved, is written to `FOLDER/<rank>.json`.
"""

import json
import sys
from pathlib import Path

import torch
from join_trl import make_trainer
from parity_table import HINT, Case

from composer_core.errors import NonFinite


def main(rank, folder):
    """See the module."""
    torch.set_num_threads(1)
    # untied: the input embedding of a token that only hints hold, and only the first process has hints
    case = Case("poisoned", model="llama", sdpo={"teacher": "self-live"}, micro_batch=2)
    trainer = make_trainer(case, folder, folder / f"out-{rank}", world=2)
    trainer.model.get_input_embeddings().weight.data[HINT[-1]] = torch.nan
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    said = "nothing"
    try:
        trainer.train()
    except NonFinite as error:
        said = error.problem
    same = all(torch.equal(p.nan_to_num(7), before[n].nan_to_num(7)) for n, p in trainer.model.named_parameters())
    (folder / f"{rank}.json").write_text(json.dumps({"said": said, "unchanged": same}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
