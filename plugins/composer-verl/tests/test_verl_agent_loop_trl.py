"""The same rollout on TRL's own loop and on ours: the same turns give the same tokens, flags, messages and columns.

TRL's functions are called as they are installed, on a stand-in for its trainer that has what they read; turns are
scripted on both sides. In Qwen's chat formats, over single characters.
"""

import asyncio
import copy
import json
from collections import defaultdict
from types import SimpleNamespace

import pytest

pytest.importorskip("trl")
pytest.importorskip("jmespath", reason="trl reads tool calls with it")

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from trl import GRPOTrainer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    qwen2_5_chat_template,
    qwen3_chat_template,
    qwen3_instruct_2507_chat_template,
)

from composer_core.data.tool_checks import tool_schemas
from composer_core.data.tools import RolloutTools
from composer_core.traces.conversation_sites import rollout_columns
from composer_core.traces.tool_format import read_turn, require_tool_format, result_ids
from composer_verl.conversation import Program, begin, call_tools

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATES = {
    "qwen3": qwen3_chat_template,
    "qwen2.5": qwen2_5_chat_template,
    "qwen3-2507": qwen3_instruct_2507_chat_template,
}


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request):
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = {token: i for i, token in enumerate(["<pad>", END, "<unk>", START, *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False))
    backend.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=END, unk_token="<unk>",
        extra_special_tokens=[START], clean_up_tokenization_spaces=False, chat_template=TEMPLATES[request.param],
    )  # fmt: skip
    return add_response_schema(made)


def look(key: str) -> str:
    """Look up.

    Args:
        key: What.
    """
    if key == "?":
        raise KeyError("nothing is called so")
    return key.upper()


async def wait(seconds: int) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    return f"waited {seconds}"


def called(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


GOOD, ASYNC = called("look", '{"key": "a"}'), called("wait", '{"seconds": 2}')
RAISES = called("look", '{"key": "?"}')
SCRIPTS = {
    "no-call": ["It is A."],
    "call-and-answer": [f"Let me see.\n{GOOD}", "A"],
    "thought": [f"<think>\nHm.\n</think>\n\n{GOOD}", "<think>\n\n</think>\n\nA"],
    "several-of-both-kinds": [f"{ASYNC}\n{GOOD}\n{RAISES}", "A"],
    "wrong-name-and-arguments": [called("lok", "{}"), called("look", '{"kee": "a"}'), "lost"],
    "broken-json": [GOOD, called("look", '{"key": }')],
    "words-behind-a-call": [f"{GOOD}\nSo it is."],
    "calls-to-the-last-turn": [GOOD, GOOD, GOOD],
    "result-too-long": [called("look", json.dumps({"key": "b" * 300}))],
    "answer-too-long": [GOOD, "x" * 600],
}
ROW = {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Upper a?"}], "answer": "A"}
ROOM, TURNS = 500, 3


def trl_rollout(tokenizer, script):
    """By `GRPOTrainer._tokenize_prompts` and `_tool_call_loop`; gives prompt, completion, flags, messages."""
    loop = asyncio.new_event_loop()
    template = None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
    replies = [tokenizer.encode(text + END) for text in script]
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, tools=[look, wait], chat_template=template,
        chat_template_kwargs={}, environment_factories=None, _is_vlm=False, max_completion_length=ROOM,
        max_tool_calling_iterations=TURNS - 1, use_vllm=False, async_loop=SimpleNamespace(),
        _sync_tool_dicts=[{"look": look}], _async_tool_dicts=[{"wait": wait}], _metrics=defaultdict(list),
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        _generate_single_turn=lambda *_, **__: ([replies.pop(0)[:ROOM]], None),
    )  # fmt: skip
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(trainer, messages)
    prompts = [copy.deepcopy(ROW["prompt"])]
    prompt_ids, _, _ = GRPOTrainer._tokenize_prompts(trainer, prompts)
    (first,), _ = trainer._generate_single_turn()
    completions = [[parse_response(tokenizer, first)]]
    with pytest.MonkeyPatch.context() as patch:
        # its loop runs in a thread of its own; here it is run where it stands
        patch.setattr(asyncio, "run_coroutine_threadsafe", lambda coro, _: SimpleNamespace(
            result=lambda: loop.run_until_complete(coro)))  # fmt: skip
        mask, completions, ids, *_ = GRPOTrainer._tool_call_loop(
            trainer, prompts, prompt_ids, [first], completions, None, None, {}
        )
    loop.close()
    return prompt_ids[0], ids[0], mask[0], completions[0]


def own_rollout(tokenizer, script):
    """By `composer_verl.conversation`, as the agent loop does it."""
    program = Program(0, TURNS, RolloutTools((look, wait), None), tool_schemas([look, wait]))
    talk = begin(ROW, None, program, tokenizer=tokenizer, limits=(10**6, ROOM), options={})
    for text in script:
        calls = talk.say(tokenizer.encode(text + END), None, with_tools=True)
        if not calls or talk.turns == TURNS:
            break
        results, _ = asyncio.run(call_tools(calls, program.callable_in(None)))
        if not talk.hear(results):
            break
    return talk, program


@pytest.mark.parametrize("case", SCRIPTS)
def test_both_make_the_same_of_the_same_turns(case, tokenizer):
    prompt, ids, mask, messages = trl_rollout(tokenizer, SCRIPTS[case])
    talk, program = own_rollout(tokenizer, SCRIPTS[case])
    assert tokenizer.decode(talk.ids) == tokenizer.decode(ids)
    assert (talk.prompt_ids, talk.ids, talk.action) == (prompt, ids, mask)
    assert talk.completion() == messages
    columns = json.loads(talk.record(program, None))["columns"]
    assert {**ROW, **columns} == rollout_columns(ROW, messages, tool_schemas([look, wait]))


def test_trls_templates_are_of_our_form(tokenizer):
    require_tool_format(tokenizer, at="test")


CALLS_THAT_DIFFER = [
    "",
    "\n",
    f"  {GOOD}",
    f"{GOOD}  \n",
    f"a\n\n{GOOD}",
    "<think>x",
    f"<think>x {GOOD}",
    "a<think>b</think>c",
]


@pytest.mark.parametrize("text", [*CALLS_THAT_DIFFER, *(t for script in SCRIPTS.values() for t in script)])
def test_both_read_the_same_in_a_turn(text, tokenizer):
    ids = tokenizer.encode(text + END)
    assert read_turn(ids, tokenizer) == parse_response(tokenizer, ids)


def test_both_put_the_same_behind_a_turn(tokenizer):
    template = None if is_chat_template_prefix_preserving(tokenizer) else get_training_chat_template(tokenizer)
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, chat_template=template, chat_template_kwargs={}, _is_vlm=False
    )
    results = [{"role": "tool", "name": "look", "content": text} for text in ("A", "", f"{END}0")]
    assert result_ids(results, tokenizer) == GRPOTrainer._get_tool_suffix_ids(trainer, results)
