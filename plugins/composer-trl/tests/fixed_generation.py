"""A real trainer that samples what a test says: prompts, completions and rewards go in through TRL's `rollout_func`."""

import os

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig

from composer_trl.trainer import ComposerGRPOTrainer


def fixed_trainer(folder, scratch, *, prompts, completions, rewards, model=None, columns=None, loss=None, **fields):
    """Groups of equal size lie one behind the other: completion i answers prompt i // group size."""
    size = len(completions) // len(prompts)

    def rollouts(asked, trainer):
        assert [int(prompt) for prompt in asked] == [i // size for i in range(len(completions))]
        ids = [prompts[int(prompt)] for prompt in asked]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None, **(columns or {})}

    def reward(completion_ids, **_):
        return [rewards[completions.index(list(ids))] for ids in completion_ids]

    native = fields.pop("native", True)
    config = GRPOConfig(
        output_dir=str(scratch),
        num_generations=size,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        **{
            "per_device_train_batch_size": len(completions),
            "gradient_accumulation_steps": 1,
            "max_completion_length": max(map(len, completions)),
            "max_steps": 1,
            "max_grad_norm": 0.0,
            "optim": "sgd",
            "bf16": False,
            "gradient_checkpointing": False,
            "loss_type": "grpo",
            **fields,
        },
    )
    trainer = ComposerGRPOTrainer(
        model if model is not None else AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        reward,
        config,
        train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(prompts))]}),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        rollout_func=rollouts,
        loss=loss,
        native=native,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
