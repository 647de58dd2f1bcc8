"""Five tokenizers made offline: one trained byte-level BPE, and the chat format of five families of models.

The templates are short ones of our own that render each family's published format; what makes each family special
for hints is named above it. `make(name)` gives a fresh tokenizer.
"""

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# Every message stands alone: the easy case.
CHATML = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content -}}
{%- for call in message.tool_calls or [] -%}{{- '\n' + (call.function | tojson) -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Contents are trimmed, a tool's result is quoted as JSON, and the header ends with an empty line.
LLAMA3 = """
{{- '<|begin_of_text|>' -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message.role == 'tool' else message.role -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' -}}
{%- if message.tool_calls -%}
{%- set function = message.tool_calls[0].function -%}
{{- '{"name": ' + (function.name | tojson) + ', "parameters": ' + (function.arguments | tojson) + '}' -}}
{%- elif message.role == 'tool' -%}{{- message.content | tojson -}}
{%- else -%}{{- message.content | trim -}}
{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""

# Thinking before the last user message is taken out, the last turn always thinks, and results share a user's turn.
QWEN3 = """
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last and (loop.last or message.reasoning_content) -%}
{{- '<think>\n' + (message.reasoning_content or '') + '\n</think>\n\n' -}}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Users and the model alternate strictly; there is neither a system message nor a tool's result.
GEMMA = """
{{- '<bos>' -}}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
{{- (message.content | trim) + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

# No header at all, users alternate, a system message moves along to the last user message, and ids of calls have
# nine characters.
MISTRAL = """
{{- '<s>' -}}
{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- set chat = messages[1:] if system else messages -%}
{%- set ns = namespace(user=true, last=-1) -%}
{%- for message in chat -%}
{%- for call in message.tool_calls or [] -%}
{%- if call.id | length != 9 -%}{{- raise_exception('Tool call IDs should be of length 9!') -}}{%- endif -%}
{%- endfor -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- if message.role != 'tool' and not message.tool_calls -%}
{%- if (message.role == 'user') != ns.user -%}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') -}}
{%- endif -%}
{%- set ns.user = not ns.user -%}
{%- endif -%}
{%- endfor -%}
{%- for message in chat -%}
{%- if message.role == 'user' -%}
{{- '[INST]' + (system + '\n\n' if system and loop.index0 == ns.last else '') + message.content + '[/INST]' -}}
{%- elif message.role == 'tool' -%}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' -}}
{%- elif message.tool_calls -%}{{- '[TOOL_CALLS]' + (message.tool_calls[0].function | tojson) + '</s>' -}}
{%- else -%}{{- message.content + '</s>' -}}
{%- endif -%}
{%- endfor -%}
"""

# Not one of the five: a new user message rewrites the turn after it, so no form of a hint leaves the rest alone.
UNSTABLE = """
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + (messages | map(attribute='content') | join | length | string) + '\n' -}}
{{- message.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

SPECIALS = {
    "chatml": ["<|im_start|>", "<|im_end|>"],
    "llama3": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "qwen3": ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>"],
    "mistral": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "unstable": ["<|im_start|>", "<|im_end|>"],
}
TEMPLATES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "unstable": UNSTABLE,
}
TURN_END = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "unstable": "<|im_end|>",
}
FIVE = ("chatml", "llama3", "qwen3", "gemma", "mistral")

TEXT = """The agent opens the file, reads it, edits a line and runs the tests again. No such file or directory.
Hint: calling bash fails with this message. The tools are: read, write, bash. {"name": "bash", "arguments": {"a": 1}}
def division(a: float, b: float) -> float: return a / b   # user assistant system model ipython tool
"""


def make(name):
    """The tokenizer of one family."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_trained(name),
        eos_token=TURN_END[name],
        extra_special_tokens=SPECIALS[name],
        chat_template=TEMPLATES[name].strip(),
        clean_up_tokenization_spaces=False,
    )


@cache
def _trained(name):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIALS[name]
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer
