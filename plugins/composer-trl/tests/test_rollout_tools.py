"""The section `rollout:` at plan time, and the user's tools and environments as the worker loads and checks them."""

import re
import textwrap
from pathlib import Path

import pytest
from trl import GRPOConfig

from composer_core.errors import MissingError, RunFailed, SpecError, UsageError
from composer_core.hf.tiny import tiny_tokenizer
from composer_core.plugins.builtin_settings import OBJECTIVE_SETTINGS, InlineSettings, RegexSettings
from composer_core.plugins.contributions import Kind
from composer_core.spec.model import Plugged, RunSpec
from composer_trl import tools
from composer_trl.config import derive
from composer_trl.settings import TrlSettings
from composer_trl.tools import require_tool_template, rollout_arguments, tool_schemas

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


def test_each_call_of_the_factory_gives_another_environment_and_none_is_made_in_vain(file):
    text = GOOD + "\nMADE = []\n\ndef make():\n    MADE.append(Box())\n    return MADE[-1]\n"
    factory = rollout_arguments(spec(rollout_of(file(text), environment="make")))["environment_factory"]
    first, second = factory(), factory()
    made = type(first).__init__.__globals__["MADE"]
    assert [first, second] == made


def test_schemas_are_those_that_the_chat_template_gets(file):
    (schema,) = tool_schemas(rollout_arguments(spec(rollout_of(file(GOOD), "look")))["tools"])
    assert schema["function"]["name"] == "look"
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "key": {"type": "string", "description": "What to look up."},
            "deep": {"type": "boolean", "description": "Whether to look twice."},
        },
        "required": ["key"],
    }


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


# -- what is wrong with a tool -----------------------------------------------------------------------------------------

BAD_TOOLS = {
    "missing": (
        'def look(a: str):\n    """Look."""\n',
        "{path}: no function 'search' in this file\n  fix: it defines look",
    ),
    "broken-file": (
        "import no_such_module\n",
        "{path}: this rollout file does not load: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "no-function": (
        "search = 3\n",
        "{path}: 'search' is int, not a function\n  fix: `def search(...)` with type hints and a docstring",
    ),
    "no-docstring": (
        "\ndef search(query: str):\n    return query\n",
        "{path}:2: tool 'search': it has no docstring, which is what the policy reads of it\n"
        '  fix: """What it does.\n\n      Args:\n          query: What it is.\n      """',
    ),
    "no-type-hint": (
        'def search(query):\n    """Search.\n\n    Args:\n        query: What for.\n    """\n',
        "{path}:1: tool 'search': parameter 'query' has no type hint\n  fix: query: str",
    ),
    "not-described": (
        'def search(query: str, pages: int = 1):\n    """Search.\n\n    Args:\n        query: What for.\n    """\n',
        "{path}:1: tool 'search': its docstring does not describe parameter 'pages'\n"
        "  fix: below `Args:` a line `pages: what it is`",
    ),
    "any-arguments": (
        'def search(query: str, **more: str):\n    """Search."""\n',
        "{path}:1: tool 'search': it takes *more, and the policy must know each argument\n  fix: name its parameters",
    ),
    "by-position": (
        'def search(query: str, /):\n    """Search."""\n',
        "{path}:1: tool 'search': parameter 'query' is taken by position only, and tools are called by keyword\n"
        "  fix: leave out the /",
    ),
    "returns-a-list": (
        'def search() -> list[str]:\n    """Search."""\n',
        "{path}:1: tool 'search': it returns a list, which trl takes for the parts of a message with images\n"
        "  fix: return a text, or str of the list",
    ),
    "type-of-nothing": (
        'def search(query: "Query"):\n    """Search.\n\n    Args:\n        query: What for.\n    """\n',
        "{path}:1: tool 'search': no description can be made of it: name 'Query' is not defined\n"
        "  fix: type hints such as str, int, float, bool, list[str], Literal; a docstring in Google style",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_TOOLS)
def test_what_a_tool_lacks_is_said_with_its_place(case, file):
    text, message = BAD_TOOLS[case]
    path = file(text)
    with pytest.raises(UsageError) as error:
        rollout_arguments(spec(rollout_of(path, "search")))
    assert str(error.value) == message.format(path=path)


def test_an_async_tool_is_a_tool(file):
    path = file(
        'async def wait(seconds: int) -> str:\n    """Wait.\n\n    Args:\n        seconds: How long.\n    """\n'
    )
    assert [tool.__name__ for tool in rollout_arguments(spec(rollout_of(path, "wait")))["tools"]] == ["wait"]


# -- what is wrong with an environment ---------------------------------------------------------------------------------

ACT = 'def act(self) -> str:\n        """Act."""\n        return ""\n'
BAD_ENVIRONMENTS = {
    "no-class": (
        "Box = 3\n",
        "{path}: 'Box' is int, not a function or class\n  fix: a class, or `def Box():` that returns an environment",
    ),
    "cannot-be-made": (
        "class Box:\n    def __init__(self):\n        self.x = {}['y']\n",
        "{path}:3: environment 'Box' cannot be made: KeyError: 'y'",
    ),
    "no-reset": (
        f"class Box:\n    {ACT}",
        "{path}: environment 'Box' (Box) has no method `reset`, which begins a rollout\n"
        "  fix: def reset(self, **row) -> str | None",
    ),
    "reset-without-columns": (
        f"class Box:\n    def reset(self, key):\n        pass\n    {ACT}",
        "{path}:2: environment 'Box' (Box): `reset` takes no **row, but is called with every column of the data\n"
        "  fix: def reset(self, **row) -> str | None",
    ),
    "async-reset": (
        f"class Box:\n    async def reset(self, **row):\n        pass\n    {ACT}",
        "{path}:2: environment 'Box' (Box): `reset` is async, and is called as a plain method\n"
        "  fix: def reset(self, **row) -> str | None",
    ),
    "a-reward-of-its-own": (
        f"class Box:\n    def reset(self, **row):\n        pass\n    def get_reward(self):\n        pass\n    {ACT}",
        "{path}:4: environment 'Box' (Box) has a method `get_reward`, which would be a reward beside those of the "
        "spec\n  fix: data.rewards: [{{use: python, function: ./reward.py:score}}] with `def score(completions, "
        "environments, **columns)`, which gets the environments of the rollouts",
    ),
    "slots": (
        f"class Box:\n    __slots__ = ()\n    def reset(self, **row):\n        pass\n    {ACT}",
        "{path}: environment 'Box': its class has __slots__, so its `reset` cannot be watched\n"
        "  fix: leave __slots__ out",
    ),
    "undescribed-method": (
        'class Box:\n    def reset(self, **row):\n        pass\n    def act(self, how):\n        """Act."""\n',
        "{path}:4: tool 'act': parameter 'how' has no type hint\n  fix: how: str",
    ),
    "nothing-to-call": (
        "class Box:\n    def reset(self, **row):\n        pass\n",
        "rollout.environment: this environment has no public method but reset, so there is nothing that the policy "
        "could call\n  fix: a method for each action, or rollout.tools",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_ENVIRONMENTS)
def test_what_an_environment_lacks_is_said_with_its_place(case, file):
    text, message = BAD_ENVIRONMENTS[case]
    path = file(text)
    with pytest.raises(UsageError) as error:
        rollout_arguments(spec(rollout_of(path, environment="Box")))
    assert str(error.value) == message.format(path=path)


def test_a_tool_and_a_method_of_one_name_are_refused(file):
    path = file(GOOD + '\ndef put(thing: str):\n    """Put.\n\n    Args:\n        thing: What.\n    """\n')
    with pytest.raises(UsageError) as error:
        rollout_arguments(spec(rollout_of(path, "put", environment="Box")))
    assert str(error.value) == "rollout: two tools are called 'put'\n  fix: rename one of the functions"


RESETS = {
    "raises": ("return row['kee']", "{path}:3: environment 'Box': reset raised KeyError: 'kee'"),
    "no-text": ("return 3", "{path}:2: environment 'Box': reset returned int, not a text or None"),
}


@pytest.mark.parametrize("case", RESETS)
def test_a_reset_that_misbehaves_ends_the_run_with_its_line(case, file):
    body, message = RESETS[case]
    path = file(f"class Box:\n    def reset(self, **row):\n        {body}\n    {ACT}")
    box = rollout_arguments(spec(rollout_of(path, environment="Box")))["environment_factory"]()
    with pytest.raises(RunFailed) as error:
        box.reset(key="a")
    assert str(error.value) == message.format(path=path)


def test_an_environment_that_cannot_be_made_again_ends_the_run(file):
    path = file(f"made = []\nclass Box:\n    def __init__(self):\n        made.append(1)\n        1 / (2 - len(made))\n"
                f"    def reset(self, **row):\n        pass\n    {ACT}")  # fmt: skip
    factory = rollout_arguments(spec(rollout_of(path, environment="Box")))["environment_factory"]
    factory()
    with pytest.raises(RunFailed) as error:
        factory()
    assert str(error.value) == f"{path}:5: environment 'Box' cannot be made: ZeroDivisionError: division by zero"


def test_one_environment_for_two_rollouts_ends_the_run(file):
    path = file(
        f"class Box:\n    def reset(self, **row):\n        pass\n    {ACT}\nBOX = Box()\ndef make():\n    return BOX\n"
    )
    factory = rollout_arguments(spec(rollout_of(path, environment="make")))["environment_factory"]
    factory()
    with pytest.raises(RunFailed) as error:
        factory()
    assert str(error.value) == (
        f"{path}:9: environment 'make': the same object came twice, and rollouts would share its state\n"
        "  fix: make a new one in each call"
    )


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
