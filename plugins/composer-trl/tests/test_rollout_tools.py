"""The section `rollout:` at plan time, and the user's tools and environments as the worker loads and checks them."""

import re
import textwrap
from pathlib import Path

import pytest
from trl import GRPOConfig

from composer_core.errors import MissingError, SpecError, UsageError
from composer_core.hf.tiny import tiny_tokenizer
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS, InlineSettings, RegexSettings
from composer_core.plugins.contributions import Kind
from composer_core.spec.model import Plugged, RunSpec
from composer_trl import tools
from composer_trl.config import derive
from composer_trl.settings import TrlSettings
from composer_trl.tools import require_tool_template, rollout_arguments

GOOD = '''\
SEEN = []

def look(key: str, deep: bool = False) -> str:
    """Look something up.

    Args:
        key: What to look up.
        deep: Whether to look twice.
    """
    SEEN.append(key)
    return key.upper()

class Box:
    def __init__(self):
        self.things = SEEN

    def reset(self, **row):
        self.things.append(row["key"])
        return f" The key is {row['key']}."

    def put(self, thing: str) -> str:
        """Put something in.

        Args:
            thing: What to put in.
        """
        self.things.append(thing)
        return "done"

    def _hidden(self):
        return None
'''


@pytest.fixture(autouse=True)
def _no_package_needed(monkeypatch):
    monkeypatch.setattr(tools, "_require_parser", lambda: None)


def spec(rollout, *, model=None, chat=True, held_out=None, options=None):
    def plugged(kind, use, settings):
        return Plugged(kind, use, "composer-core 0.1.0", settings)

    return RunSpec(
        version=1,
        name="t",
        model=model or {"path": "Qwen/Qwen3-0.6B"},
        data={
            "prompts": {"builtin": "digits", "chat": chat},
            "rewards": [plugged(Kind.REWARD, "regex", RegexSettings(pattern="[0-9]"))],
            "eval": held_out,
        },
        rollout=rollout,
        loss={"objective": plugged(Kind.OBJECTIVE, "grpo", OBJECTIVE_SETTINGS["grpo"]())},
        train={"steps": 2, "prompts_per_step": 2, "group_size": 2},
        backend=plugged(Kind.BACKEND, "trl", TrlSettings(options=options or {})),
        executor=plugged(Kind.EXECUTOR, "inline", InlineSettings()),
    )


@pytest.fixture
def file(tmp_path):
    """A file of the user's with this text; gives its path."""

    def write(text, name="own.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def rollout_of(path, *names, environment=None):
    rollout = {"tools": [f"{path}:{name}" for name in names]}
    if environment is not None:
        rollout["environment"] = {"use": "python", "factory": f"{path}:{environment}"}
    return rollout


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_turns_of_the_policy_are_one_more_than_trls_iterations(file, tmp_path):
    path = file(GOOD)
    derived = derive(spec({"max_turns": 4, **rollout_of(path, "look")}))
    assert GRPOConfig(**derived.upstream, output_dir=str(tmp_path)).max_tool_calling_iterations == 3
    assert derived.numbers["longest rollout (assistant turns)"] == 4
    assert derive(spec(rollout_of(path, "look"))).upstream["max_tool_calling_iterations"] == 7  # 8 turns by default


def test_without_the_section_nothing_is_set_and_nothing_is_passed():
    derived = derive(spec(None))
    assert "max_tool_calling_iterations" not in derived.upstream
    assert not any("turn" in name for name in derived.numbers)
    assert rollout_arguments(spec(None)) == {}


def test_a_plan_says_what_surprises_about_turns(file):
    path = file(GOOD)
    assert derive(spec(rollout_of(path, "look", environment="Box"))).notes[-2:] == (
        "train.max_completion_tokens counts what tools return too: a result that does not fit any more ends the "
        "rollout before it is shown",
        "trl makes an environment once and calls its reset(**row) before each rollout",
    )


def refused(*arguments, **options):
    with pytest.raises(SpecError) as error:
        derive(spec(*arguments, **options))
    return [str(problem) for problem in error.value.problems]


def test_turns_without_anything_to_call_are_refused():
    assert refused({"max_turns": 4}) == [
        "rollout: trl goes on after the first turn only where that called a tool, and there are none\n"
        "  fix: give tools or an environment, or leave rollout out"
    ]


def test_one_turn_is_refused(file):
    assert refused({"max_turns": 1, **rollout_of(file(GOOD), "look")}) == [
        "rollout.max_turns: with one turn no tool is ever run: its result is what a second turn would read\n"
        "  fix: at least 2"
    ]


def test_text_prompts_are_refused(file):
    text = "tools need chat prompts: a raw text has no place for their results\n  fix: true, or leave rollout out"
    rollout = rollout_of(file(GOOD), "look")
    assert refused(rollout, chat=False) == [f"data.prompts.chat: {text}"]
    assert refused(rollout, held_out={"builtin": "digits", "chat": False}) == [f"data.eval.chat: {text}"]


def test_the_built_in_model_is_refused(file):
    assert refused(rollout_of(file(GOOD), "look"), model={"builtin": "tiny"}) == [
        "model.builtin: trl cannot read tool calls in the built-in model's chat format\n"
        "  fix: model.path: a model that was trained to call tools, such as Qwen/Qwen3-0.6B"
    ]


def test_two_tools_of_one_name_are_refused(file):
    first, second = file(GOOD), file(GOOD, "other.py")
    rollout = {"tools": [f"{first}:look", f"{second}:look"]}
    problem = "2 tools are called 'look', and the policy calls a tool by its name\n  fix: rename one of the functions"
    assert refused(rollout) == [f"rollout.tools[0]: {problem}", f"rollout.tools[1]: {problem}"]


def test_files_that_are_not_there_are_refused(file, tmp_path):
    gone = tmp_path / "gone.py"
    assert refused(rollout_of(gone, "look", environment="Box")) == [
        f"rollout.tools[0]: no such file: {gone}\n  fix: paths are relative to the spec",
        f"rollout.environment.factory: no such file: {gone}\n  fix: paths are relative to the spec",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD, "no function 'lock' in {path}\n  fix: did you mean look?"),
        ("x = 1\n", "no function 'lock' in {path}\n  fix: it defines no function"),
        ("def lock(:\n", "{path} cannot be read as Python: invalid syntax (<unknown>, line 1)"),
    ],
    ids=["misspelt", "not-there", "no-python"],
)
def test_a_function_that_is_not_in_its_file_is_refused(text, message, file):
    path = file(text)
    assert refused(rollout_of(path, "lock")) == [f"rollout.tools[0]: {message.format(path=path)}"]


@pytest.mark.parametrize("text", ["lock = print\n", "from os import stat as lock\n", "from os import *\n"])
def test_a_name_that_may_be_a_function_is_left_to_the_worker(text, file):
    derive(spec(rollout_of(file(text), "lock")))


def test_a_file_named_by_the_environment_is_looked_for_by_the_worker():
    assert derive(spec({"tools": ["${env:TOOLS}/tools.py:look"]})).upstream["max_tool_calling_iterations"] == 7


def test_trls_own_name_for_it_is_no_option(file):
    rollout = rollout_of(file(GOOD), "look")
    assert refused(rollout, options={"max_tool_calling_iterations": 3}) == [
        "backend.options.max_tool_calling_iterations: another part of the spec decides this\n"
        "  fix: set rollout.max_turns"
    ]


# -- what is passed ----------------------------------------------------------------------------------------------------


def test_tools_and_environment_of_one_file_share_what_it_holds(file):
    arguments = rollout_arguments(spec(rollout_of(file(GOOD), "look", environment="Box")))
    (look,), factory = arguments["tools"], arguments["environment_factory"]
    box = factory()
    assert look("a") == "A"
    assert box.reset(key="b", prompt=[]) == " The key is b."
    assert box.things == ["a", "b"]


def test_a_missing_parser_is_named(monkeypatch, file):
    monkeypatch.undo()  # the real check
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(tools, "version", lambda name: "5.12.1")
    with pytest.raises(MissingError) as error:
        rollout_arguments(spec(rollout_of(file(GOOD), "look")))
    assert str(error.value) == (
        "transformers 5.12.1 needs the package jmespath to read tool calls\n  fix: pip install jmespath"
    )
    monkeypatch.setattr(tools, "version", lambda name: "5.13.0")
    assert len(rollout_arguments(spec(rollout_of(file(GOOD), "look")))["tools"]) == 1


def test_the_page_about_tools_shows_what_trl_takes(file):
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    own = {name: re.search(rf"`{name}`.*?```python\n(.*?)```", page, re.DOTALL)[1] for name in ("tools.py", "shop.py")}
    tool, shop = (file(text, name) for name, text in own.items())
    rollout = {"tools": [f"{tool}:price"], "environment": {"use": "python", "factory": f"{shop}:Shop"}}
    arguments = rollout_arguments(spec(rollout))
    assert arguments["tools"][0](fruit="pear", amount=2) == "90 cents"
    environment = arguments["environment_factory"]()
    assert environment.reset(stock=5, left=3, prompt=[]) == " There are 5 apples."
    assert environment.sell(amount=2) == "3 apples are left"


# -- chat templates ----------------------------------------------------------------------------------------------------

FIX = "\n  fix: take a model whose chat template trl knows, such as Qwen/Qwen3-0.6B, or leave rollout out"


def test_a_template_that_swallows_calls_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    with pytest.raises(UsageError) as error:
        require_tool_template(tokenizer, at="./model")
    assert str(error.value) == f"./model: this model's chat template does not render tool calls and their results{FIX}"


def test_a_template_whose_calls_trl_cannot_read_is_refused():
    with pytest.raises(UsageError) as error:
        require_tool_template(tiny_tokenizer(), at="./model")
    said = str(error.value)
    assert said.startswith("./model: trl cannot use this model's chat template for tools: Unrecognized chat template")
    assert said.endswith(FIX)


def test_a_template_that_trl_knows_gets_what_reads_its_calls():
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = qwen3_chat_template
    require_tool_template(tokenizer, at="./model")
    assert getattr(tokenizer, "response_schema", None) or getattr(tokenizer, "response_template", None)
