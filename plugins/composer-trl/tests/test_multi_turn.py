"""Rollouts of several turns on the real GRPOTrainer: its tool loop, masks, rewards and loss, in Qwen3's chat format.

Only the policy's choice of tokens is scripted (`replies`): each generation is a list of texts, one for each rollout
that still goes on, written by the chat template's rules.
"""

import copy
import importlib.util
import inspect
import json
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig
from trl.chat_template_utils import qwen3_chat_template, qwen3_schema

from composer_core.channels.sdpo import Sdpo
from composer_core.channels.settings import SdpoSettings
from composer_core.data.environments import Environments
from composer_core.data.scoring import checked
from composer_core.loss.composite import ActiveChannel, CompositeLoss
from composer_trl.backend import _sample, rows_dataset
from composer_trl.tools import require_tool_template
from composer_trl.trainer import ComposerGRPOTrainer, Generation

START, END = "<|im_start|>", "<|im_end|>"
PROMPTS = [
    {"prompt": [{"role": "user", "content": "Upper case of a?"}], "answer": "A"},
    {"prompt": [{"role": "user", "content": "Upper case of b?"}], "answer": "B"},
]


def look(key: str) -> str:
    """Look up.

    Args:
        key: What.
    """
    if key == "?":
        raise KeyError("nothing is called so")
    return key.upper()


@pytest.fixture(scope="module")
def tokenizer():
    """Qwen3's chat template and schema over single characters."""
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = {token: i for i, token in enumerate(["<pad>", END, "<unk>", START, *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False))
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=END, unk_token="<unk>", padding_side="left",
        extra_special_tokens=[START], clean_up_tokenization_spaces=False, chat_template=qwen3_chat_template,
    )  # fmt: skip
    if importlib.util.find_spec("jmespath") is None:  # the same schema without the one step that needs that package
        made.response_schema = _without_jmespath(qwen3_schema)
    require_tool_template(made, at="test")
    return made


def _without_jmespath(schema):
    schema = copy.deepcopy(schema)
    calls = schema["properties"]["tool_calls"]
    function = calls["items"]["properties"]["function"] | {"x-parser": "json"}
    calls["items"] = {"type": "object", "properties": {"type": {"const": "function"}, "function": function}}
    return schema


def called(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.fixture(scope="module")
def trained(tokenizer, tmp_path_factory):
    """Runs one optimiser step on scripted replies; gives the trainer, with its rollouts and their rows."""

    def run(*replies, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
            if importlib.util.find_spec("jmespath") is None:
                patch.setattr("trl.trainer.grpo_trainer.is_jmespath_available", lambda: True)
            trainer = spied_trainer(tokenizer, tmp_path_factory.mktemp("trl"), **options)
            trainer.replies = [list(texts) for texts in replies]
            trainer.train()
        assert trainer.replies == []
        return trainer

    return run


def tiny_model(tokenizer):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, bos_token_id=None, pad_token_id=0,
        eos_token_id=1,
    ))  # fmt: skip


def spied_trainer(tokenizer, folder, *, reward=None, rows=None, turns=8, micro_batches=1, loss=None, **arguments):
    rows = PROMPTS if rows is None else rows
    config = GRPOConfig(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=2 * len(rows) // micro_batches,
        gradient_accumulation_steps=micro_batches, num_generations=2, max_completion_length=700,
        max_tool_calling_iterations=turns - 1, shuffle_dataset=False, learning_rate=1e-3, disable_dropout=True,
        gradient_checkpointing=False, bf16=False, use_cpu=True, report_to="none", save_strategy="no",
        logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    return Spied(
        tiny_model(tokenizer),
        [checked("exact", 1.0, reward or exact).score],
        config,
        train_dataset=rows_dataset(list(rows)),
        processing_class=tokenizer,
        loss=loss or CompositeLoss([ActiveChannel("sdpo", 0.5, Sdpo(SdpoSettings()))], None),
        **arguments,
    )


class Spied(ComposerGRPOTrainer):
    """Scripted where the policy would sample; what the channels saw is kept."""

    def _generate_single_turn(self, prompt_ids, *rest, **options):
        texts = self.replies.pop(0)
        assert len(texts) == len(prompt_ids)
        self.read = [self._tokenizer.decode(ids) for ids in prompt_ids]
        return [self._tokenizer.encode(text + END, add_special_tokens=False) for text in texts], None

    def _prepare_rows(self, composition, inputs, batch):
        prepare = composition.rows

        def rows(rollouts):
            self.rollouts = list(rollouts)
            self.rows = prepare(self.rollouts)
            return self.rows

        composition.rows = rows
        super()._prepare_rows(composition, inputs, batch)

    def _compute_loss(self, model, inputs):
        self.inputs = inputs
        return super()._compute_loss(model, inputs)

    def text(self, ids):
        return self._tokenizer.decode(ids)


def exact(completions, answer, **_):
    return [float(messages[-1]["content"] == wanted) for messages, wanted in zip(completions, answer, strict=True)]


GOOD, MISSPELT = called("look", '{"key": "a"}'), called("look", '{"kee": "a"}')


def sites(rollout):
    return [(site["turn"], site["kind"]) for site in rollout.columns.get("error_sites", [])]


# -- from a failing call to the tokens that are taught -----------------------------------------------------------------


FOUR = (
    [MISSPELT, GOOD, called("look", '{"key": "b"}'), "no idea"],
    ["lost", "A", called("lok", '{"key": "b"}')],
    ["lost too"],
)
"""Of prompt a: a misspelt argument at turn 0, and all well. Of prompt b: a wrong name at turn 1, and no call."""


@pytest.fixture(scope="module")
def four(trained):
    return trained(*FOUR, tools=[look])


def test_a_failing_call_is_a_site_of_its_turn_with_what_was_said(four):
    misspelt, well, wrong_name, without = four.rollouts
    assert [rollout.reward for rollout in four.rollouts] == [0.0, 1.0, 0.0, 0.0]
    (first,) = misspelt.columns["error_sites"]
    assert (first["turn"], first["kind"]) == (0, "type_error")
    assert first["evidence"] == "look() got an unexpected keyword argument 'kee'"
    assert first["context"]["arguments"] == {"kee": "a"}
    assert first["context"]["tool_schema"]["required"] == ["key"]
    (second,) = wrong_name.columns["error_sites"]
    assert (second["turn"], second["kind"], second["evidence"]) == (1, "tool_not_found", "Tool lok not found.")
    assert (sites(well), sites(without)) == ([], [])


def test_the_hint_teaches_exactly_what_the_policy_wrote_in_that_turn(four):
    for index, text in ((0, MISSPELT + END), (2, called("lok", '{"key": "b"}') + END)):
        rollout, row = four.rollouts[index], four.rows[index]["sdpo"]
        ids = [*rollout.prompt_ids, *rollout.completion_ids]
        taught = [ids[at] for at in row["student"]]
        assert four.text(taught) == text
        assert [row["teacher_ids"][at] for at in row["teacher"]] == taught
        flags = [*[False] * len(rollout.prompt_ids), *rollout.action]
        assert all(flags[at] for at in row["student"])


def test_the_teacher_reads_what_the_student_read_and_the_hint_before_the_turn(four):
    rollout, row = four.rollouts[2], four.rows[2]["sdpo"]
    ids = [*rollout.prompt_ids, *rollout.completion_ids]
    student, teacher = four.text(ids[: row["student"][0]]), four.text(row["teacher_ids"][: row["teacher"][0]])
    header = f"{START}assistant\n"
    assert student.endswith(f"B\n</tool_response>{END}\n{header}")
    assert teacher.endswith(header)
    start = next(i for i, (a, b) in enumerate(zip(student, teacher, strict=False)) if a != b)
    inserted = teacher[start : start + len(teacher) - len(student)]
    assert student[:start] + inserted + student[start:] == teacher
    assert "Hint: There is no tool lok. The tools are: look." in inserted


def test_no_error_and_full_reward_is_no_row_and_no_error_but_no_reward_is_one_about_the_whole(four):
    kinds = [row["sdpo"] and (row["sdpo"]["kind"], row["sdpo"]["site"]) for row in four.rows]
    assert kinds == [("type_error", [0]), None, ("tool_not_found", [1]), ("low_reward", [-1])]


def test_what_tools_said_is_masked_and_the_loss_counts_the_taught_tokens(four):
    silent = (four.inputs["completion_mask"] * (1 - four.inputs["tool_mask"])).bool()
    said = [four.text(ids[mask]) for ids, mask in zip(four.inputs["completion_ids"], silent, strict=True)]
    one = f"\n{START}user\n<tool_response>\n{{}}\n</tool_response>{END}\n{START}assistant\n"
    answers = sorted([
        one.format("{'error': \"look() got an unexpected keyword argument 'kee'\"}"), one.format("A"),
        one.format("B") + one.format("{'error': 'Tool lok not found.'}"), "",
    ])  # fmt: skip
    assert sorted(said) == answers  # the batch is shuffled
    line = four.state.log_history[0]
    (tokens,) = [value for name, value in line.items() if name.endswith("tokens/sdpo")]
    assert tokens == sum(len(row["sdpo"]["student"]) for row in four.rows if row["sdpo"])
    assert line["tools/failure_frequency"] == 0.5  # 2 of 4 calls


def test_split_into_micro_batches_the_rollouts_teach_the_same(four, trained):
    whole, split = four.state.log_history[0], trained(*FOUR, tools=[look], micro_batches=4).state.log_history[0]
    ours = [name for name in whole if "sdpo" in name]
    assert len(ours) >= 6
    # fp32, of a loss of 4e-6
    assert {name: split[name] for name in ours} == pytest.approx({name: whole[name] for name in ours}, rel=1e-3)


def test_a_call_that_does_not_parse_is_hinted_and_ends_the_rollout(trained):
    broken = '<tool_call>\n{"name": "look", "arguments": {"key": }}\n</tool_call>'
    trainer = trained([broken, "A"], rows=PROMPTS[:1], tools=[look])
    assert sites(trainer.rollouts[0]) == [(0, "json_decode")]
    row = trainer.rows[0]["sdpo"]
    ids = [*trainer.rollouts[0].prompt_ids, *trainer.rollouts[0].completion_ids]
    assert trainer.text([ids[at] for at in row["student"]]) == broken + END
    assert "must be one valid JSON object" in trainer.text(row["teacher_ids"])


def test_the_last_turn_may_call_but_nothing_is_run_any_more(trained):
    asked = called("look", '{"key": "?"}')
    trainer = trained([GOOD, "A"], [asked], rows=PROMPTS[:1], turns=2, tools=[look])
    assert [sites(rollout) for rollout in trainer.rollouts] == [[], []]
    assert trainer.text(trainer.rollouts[0].completion_ids).count("<tool_response>") == 1


def test_a_result_that_does_not_fit_ends_the_rollout_without_a_site(trained):
    def look(key: str) -> str:
        """Look up.

        Args:
            key: What.
        """
        return "Error: " + key * 700

    trainer = trained([GOOD, "A"], rows=PROMPTS[:1], tools=[look])
    assert [sites(rollout) for rollout in trainer.rollouts] == [[], []]
    assert trainer.text(trainer.rollouts[0].completion_ids) == GOOD + END
    assert all(trainer.rollouts[0].action)


def test_the_kept_sample_of_a_rollout_shows_its_calls_and_their_results():
    function = {"name": "look", "arguments": {"key": "a"}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "look", "content": "A"},
        {"role": "assistant", "content": "It is A."},
    ]
    generation = Generation(1, prompts=["p"], completions=[messages], rewards={}, advantages=[0.0])
    assert _sample(generation, 0).completion == '{"name": "look", "arguments": {"key": "a"}}\nA\nIt is A.'


def test_several_calls_in_one_turn_are_one_turn(trained):
    nothing = called("look", '{"key": "?"}')
    both = f"Both.\n{GOOD}\n{nothing}"
    trainer = trained([both, "A"], ["hm"], rows=PROMPTS[:1], tools=[look])
    ((site,), row) = trainer.rollouts[0].columns["error_sites"], trainer.rows[0]["sdpo"]
    assert (site["turn"], site["kind"], site["evidence"]) == (0, "runtime_error", "'nothing is called so'")
    assert site["context"]["arguments"] == {"key": "?"}
    ids = [*trainer.rollouts[0].prompt_ids, *trainer.rollouts[0].completion_ids]
    assert trainer.text([ids[at] for at in row["student"]]) == both + END


def test_a_hint_goes_into_the_system_message_beside_the_definitions_of_the_tools(trained):
    channel = Sdpo(SdpoSettings(hints={"at": "system"}))
    trainer = trained(
        [MISSPELT, "A"], ["lost"], rows=PROMPTS[:1], tools=[look],
        loss=CompositeLoss([ActiveChannel("sdpo", 0.5, channel)], None),
    )  # fmt: skip
    teacher = trainer.text(trainer.rows[0]["sdpo"]["teacher_ids"])
    assert teacher.startswith(f"{START}system\nHint: mind the arguments of look. They follow this schema: ")
    assert teacher.index("\n\n# Tools") < teacher.index("Upper case of a?")


def test_without_tools_a_text_like_a_call_is_only_a_text(trained):
    trainer = trained(["<tool_call>{", "A"], rows=PROMPTS[:1])
    assert [sites(rollout) for rollout in trainer.rollouts] == [[], []]
    assert trainer.rows[0]["sdpo"]["kind"] == "low_reward"


# -- environments ------------------------------------------------------------------------------------------------------


class Shelf:
    """Things that one rollout put there."""

    def __init__(self):
        self.things = []

    def reset(self, **row):
        """Empty; says where it stands."""
        self.things = []
        return f" (shelf of {row['answer']})"

    def put(self, thing: str) -> str:
        """Put something there.

        Args:
            thing: What.
        """
        if thing in self.things:
            raise ValueError(f"{thing} is there already")
        self.things.append(thing)
        return f"{len(self.things)} things"


def shelved(completions, environments, **_):
    return [float(environment.things == ["x"]) for environment in environments]


def test_each_rollout_has_an_environment_of_its_own_which_rewards_see(trained):
    x, y = called("put", '{"thing": "x"}'), called("put", '{"thing": "y"}')
    trainer = trained(
        [x, y, x, x],
        [x, "done", "done", "done"],
        ["done"],
        reward=shelved,
        environment_factory=Environments(Shelf, "Shelf", at="test.py"),
    )
    # rollout 0 puts x twice: its own second call fails; nobody else's x is in its way
    assert [rollout.reward for rollout in trainer.rollouts] == [1.0, 0.0, 1.0, 1.0]
    assert [sites(rollout) for rollout in trainer.rollouts] == [[(1, "runtime_error")], [], [], []]
    assert len({id(environment) for environment in trainer.environments}) == 4
    prompts = [trainer.text(rollout.prompt_ids) for rollout in trainer.rollouts]
    assert [("(shelf of A)" in text, "(shelf of B)" in text) for text in prompts] == [(True, False)] * 2 + [
        (False, True)
    ] * 2


def test_state_does_not_outlast_a_rollout(trained, tokenizer):
    factory = Environments(Shelf, "Shelf", at="test.py")
    used = factory()
    used.put("old")
    factory._spare.append(used)
    trainer = trained(
        [called("put", '{"thing": "old"}')] * 2, ["done"] * 2, rows=PROMPTS[:1], reward=shelved,
        environment_factory=factory,
    )  # fmt: skip
    assert [sites(rollout) for rollout in trainer.rollouts] == [[], []]


# -- the whole program -------------------------------------------------------------------------------------------------

SPEC = """\
version: 1
name: t
model: {path: ./model}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: python, function: "./own.py:score"}]
rollout: {max_turns: 3, tools: ["./own.py:look"], environment: {use: python, factory: "./own.py:Shelf"}}
loss:
  objective: {use: grpo}
  channels: [{use: sdpo, weight: 0.1}]
train: {steps: 2, prompts_per_step: 2, group_size: 2, max_completion_tokens: 32}
backend: {use: trl}
executor: {use: inline, threads: 1}
"""
OWN = f"""\
{inspect.getsource(look)}

{inspect.getsource(Shelf)}

def score(completions, environments, **columns):
    return [float(len(environment.things)) for environment in environments]
"""


@pytest.fixture
def folder(tokenizer, tmp_path):
    """A spec with a tool and an environment, and a model that has never seen either."""
    pytest.importorskip("jmespath", reason="trl reads tool calls with it")
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "own.py").write_text(OWN)
    rows = [{"prompt": row["prompt"][0]["content"], "answer": row["answer"]} for row in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def composer_run(folder, *arguments):
    program = [sys.executable, "-c", "import sys; from composer_core.cli.main import main; sys.exit(main())"]
    return subprocess.run([*program, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_spec_with_tools_and_an_environment_runs(folder):
    done = composer_run(folder, "spec.yaml")
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "latest"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["upstream/tools/call_frequency"] for line in lines] == [0, 0]  # a random model calls nothing
    assert all(line["active/sdpo"] == 1 for line in lines)  # and is told the answers
    assert json.loads((run / "plan.json").read_text())["upstream"]["max_tool_calling_iterations"] == 2


@pytest.mark.slow
def test_a_tool_that_is_none_ends_the_run_before_it_begins(folder):
    with (folder / "own.py").open("a") as own:
        own.write("\nnothing = 3\n")
    done = composer_run(folder, "spec.yaml", 'rollout.tools=["./own.py:nothing"]')
    assert done.returncode == 2
    assert f"{folder}/own.py: 'nothing' is int, not a function\n  fix: `def nothing(...)` with" in done.stderr
    assert "Traceback" not in done.stderr
