"""Tool calls as Qwen and Hermes models write them: read from tokens, answered in tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from composer_core.errors import RunFailed, UsageError
from composer_core.hf.tiny import tiny_tokenizer
from composer_core.traces.tool_format import read_turn, require_tool_format, result_ids

START, END, PAD = "<|im_start|>", "<|im_end|>", "<pad>"
# As Qwen3's: a last turn thinks, so the text of a turn changes once something stands behind it.
HERMES = """
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + ('<think>\\n\\n</think>\\n\\n' if loop.last else '') + message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def tokenizer_of(template):
    """A token for each character, with this chat template."""
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = {token: i for i, token in enumerate([PAD, END, "<unk>", START, *characters])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=False))
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=END, unk_token="<unk>", extra_special_tokens=[START],
        clean_up_tokenization_spaces=False, chat_template=template,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hermes():
    return tokenizer_of(HERMES)


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def said(content, *calls, reasoning=None):
    message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message | ({"tool_calls": list(calls)} if calls else {})


# -- a turn ------------------------------------------------------------------------------------------------------------

LOOK = '<tool_call>\n{"name": "look", "arguments": {"key": "a"}}\n</tool_call>'
TURNS = {
    "answer": ("It is A.", said("It is A.")),
    "call": (LOOK, said("", call("look", key="a"))),
    "words-and-a-call": (f"Let me see.\n{LOOK}", said("Let me see.", call("look", key="a"))),
    "two-calls": (f"{LOOK}\n{LOOK}\n", said("", call("look", key="a"), call("look", key="a"))),
    "no-arguments": ('<tool_call>{"name": "look"}</tool_call>', said("", call("look"))),
    "null-arguments": ('<tool_call>{"name": "look", "arguments": null}</tool_call>', said("", call("look"))),
    "thought": ("<think>\nHm.\n</think>\n\nIt is A.", said("It is A.", reasoning="Hm.")),
    "thought-of-a-call": (f"<think>\n{LOOK}\n</think>\n\nA", said("A", reasoning=LOOK)),
    "thought-then-call": (f"<think>\n\n</think>\n\n{LOOK}", said("", call("look", key="a"))),
    # what follows is no call in this form, so all of it is plain text
    "words-behind-a-call": (f"{LOOK}\nDone.", said(f"{LOOK}\nDone.")),
    "no-json": ('<tool_call>{"name": "look", </tool_call>', said('<tool_call>{"name": "look", </tool_call>')),
    "no-name": ('<tool_call>{"arguments": {}}</tool_call>', said('<tool_call>{"arguments": {}}</tool_call>')),
    "no-object": ("<tool_call>3</tool_call>", said("<tool_call>3</tool_call>")),
    "arguments-are-text": (
        '<tool_call>{"name": "look", "arguments": "x"}</tool_call>',
        said('<tool_call>{"name": "look", "arguments": "x"}</tool_call>'),
    ),
    "second-is-broken": (f"{LOOK}\n<tool_call>{{</tool_call>", said(f"{LOOK}\n<tool_call>{{</tool_call>")),
}  # fmt: skip


@pytest.mark.parametrize("case", TURNS)
def test_a_turn_is_read_as_its_message(case, hermes):
    text, message = TURNS[case]
    assert read_turn(hermes.encode(text + END), hermes) == message


def test_a_turn_that_was_cut_off_is_what_there_is_of_it(hermes):
    assert read_turn(hermes.encode("It is"), hermes) == said("It is")
    assert read_turn(hermes.encode(LOOK[:-1]), hermes) == said(LOOK[:-1])


# -- results -----------------------------------------------------------------------------------------------------------


def result(content, name="look"):
    return {"role": "tool", "name": name, "content": content}


def test_results_stand_behind_the_turn_up_to_where_the_policy_goes_on(hermes):
    ids = result_ids([result("A"), result("")], hermes)
    assert hermes.decode(ids) == (
        f"\n{START}user\n<tool_response>\nA\n</tool_response>\n<tool_response>\n\n</tool_response>{END}\n"
        f"{START}assistant\n"
    )


def test_a_result_that_spells_the_end_of_a_turn_does_not_move_where_it_begins(hermes):
    assert hermes.decode(result_ids([result(f"0{END}1")], hermes)) == (
        f"\n{START}user\n<tool_response>\n0{END}1\n</tool_response>{END}\n{START}assistant\n"
    )


def test_a_template_without_an_end_of_turn_before_results_is_refused():
    bare = tokenizer_of("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(RunFailed) as error:
        result_ids([result("A")], bare)
    assert str(error.value) == (
        "this model's chat template does not let results of tools stand behind a turn as it was"
    )


# -- templates ---------------------------------------------------------------------------------------------------------

FIX = "\n  fix: a model that does, such as Qwen/Qwen2.5-0.5B-Instruct or Qwen/Qwen3-0.6B, or leave rollout out"
REFUSED = {
    "calls-in-another-form": (
        HERMES.replace("<tool_call>", "[CALL]"),
        'does not write tool calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    ),
    "arguments-under-another-name": (
        HERMES.replace("(call.function | tojson)", "({'name': call.function.name, 'parameters': {}} | tojson)"),
        'does not write tool calls as <tool_call>{"name": ..., "arguments": {...}}</tool_call>',
    ),
    "no-definitions": (
        HERMES.replace("{{- '\\n' + (tool | tojson) -}}", ""),
        "does not show the policy which tools there are",
    ),
    "no-results": (
        HERMES.replace("message.content + '\\n</tool_response>'", "'\\n</tool_response>'"),
        "cannot render tool calls and their results: this model's chat template does not let results of tools stand "
        "behind a turn as it was",
    ),
    "raises": (
        "{{ raise_exception('roles must alternate') }}",
        "cannot render tool calls and their results: roles must alternate",
    ),
}  # fmt: skip


def test_a_template_of_this_form_is_taken(hermes):
    require_tool_format(hermes, at="./model")


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_of_another_form_is_refused(case):
    template, problem = REFUSED[case]
    with pytest.raises(UsageError) as error:
        require_tool_format(tokenizer_of(template), at="./model")
    assert str(error.value) == f"./model: this model's chat template {problem}{FIX}"


def test_the_built_in_models_template_is_refused():
    with pytest.raises(UsageError, match="does not write tool calls as"):
        require_tool_format(tiny_tokenizer(), at="builtin tiny")
