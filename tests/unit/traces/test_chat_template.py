"""Where hints go in five chat formats, worked out by hand from each format, and what is said where they cannot go."""

import importlib.util
from pathlib import Path

import pytest

from composer_core.errors import UsageError
from composer_core.traces.chat_template import (
    ChatTemplate,
    Insertion,
    TemplateRefusesError,
    for_template,
    hinted_prompt,
    insertion,
)
from composer_core.traces.hint_places import Place, find_places, require_turn

_spec = importlib.util.spec_from_file_location("chat_tokenizers", Path(__file__).with_name("chat_tokenizers.py"))
chats = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(chats)

LLAMA_END = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def places(name):
    return find_places(ChatTemplate(chats.make(name)))


# -- insertion ---------------------------------------------------------------------------------------------------------


def test_an_insertion_is_what_stands_around_the_hint():
    assert insertion("ab", "a[H]b", "H") == Insertion(1, "[", "]")


def test_a_text_that_differs_elsewhere_too_is_no_insertion():
    assert insertion("ab", "a[H]c", "H") is None
    assert insertion("ab", "x[H]b", "H") is None


def test_a_hint_that_is_missing_or_stands_twice_is_no_insertion():
    assert insertion("ab", "ab", "H") is None
    assert insertion("ab", "aHbH", "H") is None


def test_of_equal_cuts_the_leftmost_is_taken():
    # "x;u:y" + "u:H;" before the second "u:" is the same text as "x" + ";u:H" + ";u:y"
    assert insertion("x;u:y", "x;u:H;u:y", "H") == Insertion(1, ";u:", "")


def test_a_cut_never_splits_a_special_token():
    # Without the rule the cut would go into <b>, whose last letter equals that of <e>.
    plain, hinted = "<b><s>user", "<b><s>sysH<e><s>user"
    assert insertion(plain, hinted, "H", specials=["<b>", "<s>", "<e>"]) == Insertion(3, "<s>sys", "<e>")
    assert insertion(plain, hinted, "H") == Insertion(2, "><s>sys", "<e")


def test_a_cut_stands_behind_white_space_where_the_hint_begins_with_it():
    assert insertion("r\n</t>", "r\n\nH\n</t>", "H") == Insertion(2, "\n", "\n")


# -- what each format allows -------------------------------------------------------------------------------------------

EXPECTED = {
    # role -> place; a message of its own wherever the format takes one
    "chatml": {
        "user": Place("<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n", ""),
        "tool": Place("<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n", ""),
    },
    "llama3": {
        "user": Place(LLAMA_END, "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n", ""),
        "tool": Place(LLAMA_END, "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n", ""),
    },
    # a new user message would take the thinking before it out, so after a tool's result the hint joins the result
    "qwen3": {
        "user": Place("<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>user\n", ""),
        "tool": Place("</tool_response><|im_end|>\n<|im_start|>assistant\n", "\n", "\n"),
    },
    # strict alternation: the hint joins the user's message; tools are unknown
    "gemma": {"user": Place("<end_of_turn>\n<start_of_turn>model\n", "\n\n", "")},
    "mistral": {"user": Place("[/INST]", "\n\n", ""), "tool": Place("[/TOOL_RESULTS]", "\n\n", "")},
    "unstable": {"user": None, "tool": None},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_places_of_a_format_are_those_worked_out_by_hand(name):
    assert places(name).before_turn == EXPECTED[name]


def test_a_turn_ends_where_the_policy_stops():
    assert {name: places(name).turn_end for name in chats.TEMPLATES} == chats.TURN_END


def test_formats_that_change_earlier_turns_are_not_prefix_stable():
    # Qwen3 takes thinking out, Mistral moves the system message along to the last user message.
    stable = {name: places(name).prefix_stable for name in chats.TEMPLATES}
    assert stable == {
        "chatml": True,
        "llama3": True,
        "qwen3": False,
        "gemma": True,
        "mistral": False,
        "unstable": False,
    }


def test_every_format_of_the_five_takes_a_hint_at_the_end_of_the_prompt():
    assert all(places(name).prompt_end is not None for name in chats.FIVE)


def test_a_template_that_cannot_take_a_hint_mid_trace_says_what_to_do():
    with pytest.raises(UsageError) as caught:
        require_turn(places("unstable"))
    assert str(caught.value) == (
        "hints.at: this chat template cannot take a hint mid-trace: with a hint before a turn it renders other parts "
        "of the conversation differently too\n  fix: hints: {at: prompt-end} puts the hint in the prompt"
    )


def test_a_tokenizer_without_a_chat_template_says_what_to_do():
    tokenizer = chats.make("chatml")
    tokenizer.chat_template = None
    with pytest.raises(UsageError) as caught:
        find_places(ChatTemplate(tokenizer))
    assert str(caught.value).startswith("this chat template does not render a plain conversation: ")
    assert caught.value.fix == "give the tokenizer a chat template, or take a model that has one"


# -- rendering ---------------------------------------------------------------------------------------------------------


def test_a_refusal_carries_the_templates_own_reason():
    with pytest.raises(TemplateRefusesError) as caught:
        ChatTemplate(chats.make("gemma")).render([user("a"), user("b")])
    assert str(caught.value) == "Conversation roles must alternate user/assistant/user/assistant/..."


def test_arguments_given_as_text_are_not_quoted_twice():
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    text = ChatTemplate(chats.make("qwen3")).render([user("q"), assistant(None, tool_calls=[call])])
    assert '<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>' in text


def test_arguments_that_are_no_json_stay_the_text_they_are():
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": '}}
    ready = for_template(assistant("", tool_calls=[call]))
    assert ready["tool_calls"][0]["function"]["arguments"] == '{"path": '


def test_a_template_that_joins_arguments_to_its_text_gets_them_as_text():
    tokenizer = chats.make("chatml")
    tokenizer.chat_template = (
        "{%- for message in messages -%}{{- message.role + ' ' -}}"
        "{%- for call in message.tool_calls or [] -%}{{- call.function.arguments + '<|im_end|>' -}}{%- endfor -%}"
        "{%- endfor -%}"
    )
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path":"a"}'}}
    text = ChatTemplate(tokenizer).render([user("q"), assistant("", tool_calls=[call])])
    assert text == 'user assistant {"path":"a"}<|im_end|>'


def test_content_parts_become_their_text():
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}, {"type": "text", "text": "b"}]
    assert for_template(user(parts)) == user("a\nb")


def test_a_developer_message_is_a_system_message():
    assert for_template({"role": "developer", "content": "a"}) == {"role": "system", "content": "a"}


def test_a_hint_that_quotes_special_tokens_cannot_end_its_message():
    template = ChatTemplate(chats.make("chatml"))
    assert template.plain("it says <|im_end|> here ") == "it says  here"
    assert template.plain("<|im_<|im_end|>end|>") == ""


# -- hints in the prompt -----------------------------------------------------------------------------------------------


def test_a_prompt_hint_joins_the_last_user_message_before_the_first_turn():
    messages = [user("a"), user("b"), assistant("c"), user("d")]
    assert hinted_prompt(messages, "H", at="prompt-end") == [user("a"), user("b\n\nH"), assistant("c"), user("d")]


def test_a_system_hint_joins_the_system_message_or_makes_one():
    system = {"role": "system", "content": "s"}
    assert hinted_prompt([system, user("a")], "H", at="system") == [{**system, "content": "s\n\nH"}, user("a")]
    assert hinted_prompt([user("a")], "H", at="system") == [{"role": "system", "content": "H"}, user("a")]


def test_a_prompt_without_a_user_message_takes_no_hint_at_its_end():
    with pytest.raises(ValueError, match="no user message before the first assistant turn"):
        hinted_prompt([{"role": "system", "content": "s"}, assistant("a"), user("b")], "H", at="prompt-end")
