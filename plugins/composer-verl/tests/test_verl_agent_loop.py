"""The agent loop `composer`, with a double for verl's servers that replays scripted turns."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from verl.experimental.agent_loop import agent_loop as upstream
from verl.workers.rollout.replica import TokenOutput

from composer_core.data.tool_checks import tool_schemas
from composer_core.data.tools import load_tools
from composer_core.errors import RunFailed, UsageError
from composer_core.plugins.registry import Registry
from composer_core.spec.load import load_spec
from composer_core.spec.plan import make_plan
from composer_core.spec.sections import RolloutSpec
from composer_core.traces.error_sites import rollout_sites
from composer_verl import agent_loop
from composer_verl.agent_loop import ComposerAgentLoop
from composer_verl.conversation import Program, program_of, seed_of
from composer_verl.records import EXTRA, ROW, Copies, Record, reward_arguments, rollout_texts

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = """
{%- if tools -%}{{- '<|im_start|>system\\nTools:' + (tools | tojson) + '<|im_end|>\\n' -}}{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
OWN = '''\
import asyncio

async def wait(seconds: int) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(0)
    if seconds > 9:
        raise TimeoutError("too long")
    return f"waited {seconds}"


def look(key: str) -> str:
    """Look up.

    Args:
        key: What.
    """
    if key == "?":
        raise KeyError("nothing is called so")
    return key.upper()


class Shelf:
    def __init__(self):
        self._lock = object()

    def reset(self, *, answer, **row):
        if answer == "broken":
            raise ValueError("no shelf")
        self.things = []
        return f" (shelf of {answer})"

    def put(self, thing: str) -> str:
        """Put something there.

        Args:
            thing: What.
        """
        self.things.append(thing)
        return f"{len(self.things)} things"
'''
CHAT = {"prompt": [{"role": "user", "content": "Upper case of a?"}], "answer": "A"}
TEXT = {"prompt": "2 and 2 is ", "answer": "4"}


@pytest.fixture(scope="module")
def tokenizer():
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = {token: i for i, token in enumerate(["<pad>", END, "<unk>", START, *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=END, unk_token="<unk>",
        extra_special_tokens=[START], clean_up_tokenization_spaces=False, chat_template=TEMPLATE,
    )  # fmt: skip


class Server:
    """A double of verl's client of its rollout servers: gives scripted texts, and keeps what it was asked."""

    def __init__(self, tokenizer, turns, *, end=END):
        self.tokenizer, self.turns, self.end, self.asked = tokenizer, list(turns), end, []

    async def generate(self, request_id, *, prompt_ids, sampling_params):
        self.asked.append((request_id, self.tokenizer.decode(prompt_ids), dict(sampling_params)))
        text = self.turns.pop(0)
        ids = self.tokenizer.encode(text + self.end) if isinstance(text, str) else text
        logps = [-float(len(self.asked)) - i / 1000 for i in range(len(ids))]
        step = 6 + len(self.asked)
        extra = {"global_steps": step, "min_global_steps": step, "max_global_steps": step}
        return TokenOutput(token_ids=ids, log_probs=logps, stop_reason="completed", extra_fields=extra)


def called(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def roll(tokenizer, tmp_path, monkeypatch):
    """Runs one rollout on scripted turns; gives verl's output, the record that the driver makes of it, the server."""
    path = tmp_path / "own.py"
    path.write_text(OWN)

    def program(tools, environment, turns):
        if not tools and environment is None:
            return Program(5, 1, None, [])
        section = {"max_turns": turns, "tools": [f"{path}:{name}" for name in tools]}
        if environment is not None:
            section["environment"] = {"use": "python", "factory": f"{path}:{environment}"}
        loaded = load_tools(RolloutSpec(**section))
        return Program(5, turns, loaded, tool_schemas(loaded.all))

    def run(*turns, row=CHAT, tools=(), environment=None, max_turns=8, room=700, name="composer_hf", **options):
        made = options.pop("program", None) or program(tools, environment, max_turns)
        monkeypatch.setattr(agent_loop, "program_of", lambda plan: made)
        server = Server(tokenizer, turns, **options)
        rollout = {"prompt_length": 1000, "response_length": room, "name": name, "calculate_log_probs": True}
        config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout, "composer": {"plan": "{}"}}, "data": {}})
        sample = {ROW: json.dumps(row), "raw_prompt": [], "index": 3, "global_steps": 7, "session_id": 1, "uid": "u"}

        async def one():
            wrap = upstream.DictConfigWrap
            loop = ComposerAgentLoop(wrap(config), server, tokenizer, None, object, wrap(config.data), "qwen3")
            return await loop.run({"temperature": 1.0, "logprobs": True}, **sample)

        out = asyncio.run(one())
        record = Record("u", out.prompt_ids, out.response_ids, out.response_mask, sample[ROW], out.extra_fields[EXTRA])
        return SimpleNamespace(out=out, record=record, server=server, program=made, text=tokenizer.decode)

    return run


def told(rollout, reward=0.0):
    (text,) = rollout_texts([rollout.record], [reward], tokenizer=None)
    return [(site.turn, site.kind) for site in rollout_sites(text) if site.turn >= 0]


# -- one turn ----------------------------------------------------------------------------------------------------------


def test_a_text_prompt_is_tokenised_as_it_is(roll):
    done = roll("4", row=TEXT)
    assert done.text(done.out.prompt_ids) == "2 and 2 is "
    assert done.text(done.out.response_ids) == "4" + END
    assert done.out.response_mask == [1, 1]
    assert done.out.response_logprobs == [-1.0, -1.001]
    assert reward_arguments([done.record]) == (
        ["4"],
        {"answer": ["4"], "prompts": ["2 and 2 is "], "completion_ids": [done.out.response_ids]},
    )


def test_a_chat_prompt_ends_where_the_policy_begins_and_its_completion_is_a_message(roll):
    done = roll("<tool_call>{", row=CHAT)
    assert done.text(done.out.prompt_ids) == f"{START}user\nUpper case of a?{END}\n{START}assistant\n"
    completions, columns = reward_arguments([done.record])
    assert completions == [[{"role": "assistant", "content": "<tool_call>{"}]]
    assert columns["prompts"] == [CHAT["prompt"]]
    assert (done.out.num_turns, told(done)) == (2, [])  # without tools it is only a text


def test_the_server_is_asked_with_the_rollouts_seed_and_its_room(roll):
    ((_, _, params),) = roll("A", room=40).server.asked
    seed = seed_of(5, step=7, prompt=3, session=1, turn=0)
    assert params == {"temperature": 1.0, "logprobs": True, "seed": seed, "max_tokens": 40}


def test_sglang_is_asked_without_a_seed(roll):
    ((_, _, params),) = roll("A", name="sglang").server.asked
    assert params == {"temperature": 1.0, "logprobs": True, "max_tokens": 700}


def test_every_place_has_a_seed_of_its_own_that_never_changes():
    place = {"step": 7, "prompt": 3, "session": 1, "turn": 0}
    seeds = [seed_of(5, **place), seed_of(6, **place), *(seed_of(5, **(place | {name: 9})) for name in place)]
    assert len(set(seeds)) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    # sha256 of "[5, 7, 3, 1, 0]" begins with these 8 bytes
    assert seeds[0] == int("3a93f156cde4b1f6", 16) >> 1


def test_a_turn_that_fills_the_room_without_an_end_is_truncated(roll):
    cut, whole, ended = roll("abc", room=3), roll("abc", room=9), roll("ab", room=3)
    assert [done.record.said["truncated"] for done in (cut, whole, ended)] == [True, False, False]
    assert cut.text(cut.out.response_ids) == "abc"
    assert (cut.out.response_mask, len(cut.out.response_logprobs)) == ([1, 1, 1], 3)


# -- turns and tools ---------------------------------------------------------------------------------------------------

HEARD = f"\n{START}tool\n{{}}{END}\n{START}assistant\n"


def test_sampled_tokens_stay_as_they_were_and_what_tools_said_is_masked(roll):
    first = called("look", key="a").replace(": ", ":")  # not as the template would write it
    done = roll(first, "A", tools=["look"])
    heard = HEARD.format("A")
    assert done.text(done.out.response_ids) == first + END + heard + "A" + END
    # one token for each character, and one for each end and start of a turn
    long, short, silent = len(first) + 1, 2, len(heard) - len(END) + 1 - 2 * (len(START) - 1)
    assert done.out.response_mask == [1] * long + [0] * silent + [1] * short
    logps = done.out.response_logprobs
    assert logps[long : long + silent] == [0.0] * silent
    assert logps[-short:] == [-2.0, -2.001]
    assert done.out.num_turns == 4


def test_each_turn_reads_all_of_before_and_has_the_room_that_is_left(roll):
    done = roll(called("look", key="a"), "A", tools=["look"])
    (first, second) = done.server.asked
    assert second[1] == done.text(done.out.prompt_ids) + done.text(done.out.response_ids)[: -len("A" + END)]
    assert second[2]["max_tokens"] == 700 - (len(done.out.response_ids) - 2)
    assert second[2]["seed"] == seed_of(5, step=7, prompt=3, session=1, turn=1) != first[2]["seed"]
    assert first[0] == second[0]  # one request: the server has its cache


def test_the_prompt_shows_the_tools(roll):
    done = roll("A", tools=["look"])
    assert done.text(done.out.prompt_ids).startswith(f'{START}system\nTools:[{{"type": "function", "function": ')


def test_rewards_get_the_whole_conversation(roll):
    done = roll("Hm." + called("look", key="a"), "A", tools=["look"])
    function = {"name": "look", "arguments": {"key": "a"}}
    assert reward_arguments([done.record])[0] == [[
        {"role": "assistant", "content": "Hm.", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "look", "content": "A"},
        {"role": "assistant", "content": "A"},
    ]]  # fmt: skip


def test_a_failing_call_is_a_site_of_its_turn(roll):
    turns = [called("look", kee="a"), called("lok"), called("look", key="?"), "lost"]
    done = roll(*turns, tools=["look"])
    assert told(done) == [(0, "type_error"), (1, "tool_not_found"), (2, "runtime_error")]
    assert done.record.columns["tools"][0]["function"]["name"] == "look"
    assert (done.record.said["calls"], done.record.said["failed_calls"], done.record.said["turns"]) == (3, 3, 4)
    contents = [message["content"] for message in done.record.said["completion"] if message["role"] == "tool"]
    assert contents == [
        str({"error": "look() got an unexpected keyword argument 'kee'"}),
        "{'error': 'Tool lok not found.'}",
        str({"error": "'nothing is called so'"}),
    ]


def test_a_call_that_does_not_parse_is_a_site_and_ends_the_rollout(roll):
    done = roll('<tool_call>{"name": "look", </tool_call>', tools=["look"])
    assert told(done) == [(0, "json_decode")]


def test_what_async_tools_return_comes_last(roll):
    three = called("wait", seconds=1) + called("wait", seconds=10) + called("look", key="a")
    done = roll(three, "hm", tools=["wait", "look"])
    said = [(m["name"], m["content"]) for m in done.record.said["completion"] if m["role"] == "tool"]
    assert said == [("look", "A"), ("wait", "waited 1"), ("wait", "{'error': 'too long'}")]
    assert done.record.said["failed_calls"] == 1


def test_the_last_turn_may_call_but_nothing_is_run_any_more(roll):
    done = roll(called("look", key="a"), called("look", key="?"), tools=["look"], max_turns=2)
    assert told(done) == []
    assert (done.record.said["calls"], done.server.turns) == (1, [])


def test_a_result_that_does_not_fit_is_not_shown_and_ends_the_rollout(roll):
    turn = called("look", key="a" * 300)
    done = roll(turn, tools=["look"], room=600)
    assert done.text(done.out.response_ids) == turn + END
    assert [message["role"] for message in done.record.said["completion"]] == ["assistant"]
    assert done.record.said["truncated"] is False


def test_a_result_that_just_fits_is_shown_and_ends_the_rollout(roll):
    turn = called("look", key="a")
    longer = roll(turn, "A", tools=["look"])
    room = len(longer.out.response_ids) - 2
    done = roll(turn, tools=["look"], room=room)
    assert done.out.response_ids == longer.out.response_ids[:room]
    assert [message["role"] for message in done.record.said["completion"]] == ["assistant", "tool"]
    assert done.record.said["truncated"] is True


def test_the_weights_of_all_turns_are_told(roll):
    done = roll(called("look", key="a"), "A", tools=["look"])
    del done.out.extra_fields[EXTRA]
    assert done.out.extra_fields == {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 8}


# -- environments ------------------------------------------------------------------------------------------------------


def test_an_environments_words_end_the_prompt_and_its_state_reaches_the_rewards(roll):
    done = roll(called("put", thing="x"), "done", environment="Shelf")
    assert f"Upper case of a? (shelf of A){END}" in done.text(done.out.prompt_ids)
    _, columns = reward_arguments([done.record] * 2, Copies(done.program.tools.environments))
    first, second = columns["environments"]
    assert (first.things, second.things) == (["x"], ["x"])
    assert first is not second
    assert columns["prompts"][0] == [{"role": "user", "content": "Upper case of a? (shelf of A)"}]
    assert "environment" not in done.record.columns


def test_environments_are_used_again_and_reset_for_each_rollout(roll):
    first = roll(called("put", thing="x"), "done", environment="Shelf")
    second = roll(called("put", thing="y"), "done", environment="Shelf", program=first.program)
    assert second.record.said["environment"] == {"things": ["y"]}
    assert len(first.program.spare) == 1


def test_copies_for_rewards_forget_what_they_were_before(roll):
    done = roll("done", environment="Shelf")
    copies = Copies(done.program.tools.environments)
    (one,) = copies.of([{"things": ["x"], "more": 1}])
    (same,) = copies.of([{"things": []}])
    assert one is same
    assert (same.things, hasattr(same, "more")) == ([], False)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_failed_rollout_raises_its_error_in_the_driver(roll, tmp_path):
    done = roll("A", environment="Shelf", row={**CHAT, "answer": "broken"})
    assert (done.out.response_mask, done.out.response_logprobs, done.out.num_turns) == ([0], [0.0], 0)
    with pytest.raises(RunFailed) as error:
        list(rollout_texts([done.record], [None], tokenizer=None))
    line = 1 + OWN.splitlines().index('            raise ValueError("no shelf")')
    assert str(error.value) == f"{tmp_path}/own.py:{line}: environment 'Shelf': reset raised ValueError: no shelf"
    with pytest.raises(RunFailed):
        reward_arguments([done.record])


def test_a_prompt_that_does_not_fit_is_refused_in_the_driver_too(roll):
    done = roll("A", row={**TEXT, "prompt": "x" * 1001})
    with pytest.raises(UsageError) as error:
        reward_arguments([done.record])
    assert str(error.value) == (
        "data.prompts: a prompt has 1001 tokens with its tools and what the environment said, and 1000 fit\n"
        "  fix: shorter prompts, or a higher data.max_tokens"
    )


def test_an_error_of_nobodys_is_told_by_its_kind(roll):
    done = roll("A", row={"answer": "no prompt"})
    with pytest.raises(RunFailed) as error:
        reward_arguments([done.record])
    assert str(error.value) == "a rollout failed: KeyError: 'prompt'"


def test_a_turn_without_tokens_is_an_error(roll):
    done = roll([])
    with pytest.raises(RunFailed) as error:
        reward_arguments([done.record])
    assert str(error.value) == "the rollout server returned a turn with 0 tokens and log-probs of 0"


# -- the driver's half -------------------------------------------------------------------------------------------------


def test_channels_get_ids_flags_and_columns(roll):
    done = roll(called("look", kee="a"), "A", tools=["look"])
    (text,) = rollout_texts([done.record], [0.5], tokenizer="T")
    assert (text.uid, text.reward, text.tokenizer) == ("u", 0.5, "T")
    assert (text.prompt_ids, text.completion_ids) == (done.out.prompt_ids, done.out.response_ids)
    assert text.action == [flag == 1 for flag in done.out.response_mask]
    assert {name: text.columns[name] for name in CHAT} == CHAT
    assert [site["kind"] for site in text.columns["error_sites"]] == ["type_error"]


SPEC = """\
version: 1
name: t
seed: 5
model: {path: ./model}
data:
  prompts: {path: prompts.jsonl}
  rewards: [{use: exact-match}]
rollout: {max_turns: 3, tools: ["./own.py:look"], environment: {use: python, factory: "./own.py:Shelf"}}
loss: {objective: {use: grpo}}
train: {steps: 2, prompts_per_step: 2, group_size: 2, max_completion_tokens: 32}
backend: {use: verl}
executor: {use: inline}
"""


def test_a_plan_gives_its_program_once_in_a_process(tmp_path):
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(CHAT) + "\n")
    (tmp_path / "model").mkdir()
    registry = Registry.discover()
    plan = json.dumps(make_plan(load_spec(tmp_path / "spec.yaml", registry), registry).to_json())
    program = program_of(plan)
    assert (program.seed, program.max_turns) == (5, 3)
    assert [schema["function"]["name"] for schema in program.schemas] == ["look", "put"]
    with program.environment() as one, program.environment() as other:
        assert one is not other
        assert program.callable_in(other)["put"].__self__ is other
    assert program_of(plan) is program


def test_verl_finds_the_loop_by_its_name():
    agent_loop.register()
    assert upstream._agent_loop_registry["composer"] == {"_target_": "composer_verl.agent_loop.ComposerAgentLoop"}
