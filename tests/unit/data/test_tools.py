"""The user's tools and environments, as a worker loads and checks them."""

import textwrap

import pytest

from composer_core.data.environments import environment_tools, state_of, take_state
from composer_core.data.tool_checks import tool_schemas
from composer_core.data.tools import load_tools
from composer_core.errors import RunFailed, UsageError
from composer_core.spec.sections import RolloutSpec

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


@pytest.fixture
def file(tmp_path):
    """A file of the user's with this text; gives its path."""

    def write(text, name="own.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


def tools_of(path, *names, environment=None):
    made = {"tools": [f"{path}:{name}" for name in names]}
    if environment is not None:
        made["environment"] = {"use": "python", "factory": f"{path}:{environment}"}
    return load_tools(RolloutSpec(**made))


def test_tools_and_environment_of_one_file_share_what_it_holds(file):
    tools = tools_of(file(GOOD), "look", environment="Box")
    (look,), box = tools.functions, tools.environments()
    assert [tool.__name__ for tool in tools.all] == ["look", "put"]
    assert look("a") == "A"
    assert box.reset(key="b", prompt=[]) == " The key is b."
    assert box.things == ["a", "b"]


def test_an_environments_tools_are_its_own_public_methods(file):
    environments = tools_of(file(GOOD), environment="Box").environments
    first, second = environments(), environments()
    (put,) = environment_tools(second)
    put(thing="x")
    assert put.__self__ is second is not first


def test_each_call_of_the_factory_gives_another_environment_and_none_is_made_in_vain(file):
    text = GOOD + "\nMADE = []\n\ndef make():\n    MADE.append(Box())\n    return MADE[-1]\n"
    factory = tools_of(file(text), environment="make").environments
    first, second = factory(), factory()
    made = type(first).__init__.__globals__["MADE"]
    assert [first, second] == made


def test_schemas_are_those_that_the_chat_template_gets(file):
    (schema,) = tool_schemas(tools_of(file(GOOD), "look").all)
    assert schema["function"]["name"] == "look"
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "key": {"type": "string", "description": "What to look up."},
            "deep": {"type": "boolean", "description": "Whether to look twice."},
        },
        "required": ["key"],
    }


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
        "{path}:1: tool 'search': it returns a list, which chats take for the parts of a message with images\n"
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
        tools_of(path, "search")
    assert str(error.value) == message.format(path=path)


def test_an_async_tool_is_a_tool(file):
    path = file(
        'async def wait(seconds: int) -> str:\n    """Wait.\n\n    Args:\n        seconds: How long.\n    """\n'
    )
    assert [tool.__name__ for tool in tools_of(path, "wait").functions] == ["wait"]


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
        tools_of(path, environment="Box")
    assert str(error.value) == message.format(path=path)


def test_a_tool_and_a_method_of_one_name_are_refused(file):
    path = file(GOOD + '\ndef put(thing: str):\n    """Put.\n\n    Args:\n        thing: What.\n    """\n')
    with pytest.raises(UsageError) as error:
        tools_of(path, "put", environment="Box")
    assert str(error.value) == "rollout: two tools are called 'put'\n  fix: rename one of the functions"


RESETS = {
    "raises": ("return row['kee']", "{path}:3: environment 'Box': reset raised KeyError: 'kee'"),
    "no-text": ("return 3", "{path}:2: environment 'Box': reset returned int, not a text or None"),
}


@pytest.mark.parametrize("case", RESETS)
def test_a_reset_that_misbehaves_ends_the_run_with_its_line(case, file):
    body, message = RESETS[case]
    path = file(f"class Box:\n    def reset(self, **row):\n        {body}\n    {ACT}")
    box = tools_of(path, environment="Box").environments()
    with pytest.raises(RunFailed) as error:
        box.reset(key="a")
    assert str(error.value) == message.format(path=path)


def test_an_environment_that_cannot_be_made_again_ends_the_run(file):
    path = file(f"made = []\nclass Box:\n    def __init__(self):\n        made.append(1)\n        1 / (2 - len(made))\n"
                f"    def reset(self, **row):\n        pass\n    {ACT}")  # fmt: skip
    factory = tools_of(path, environment="Box").environments
    factory()
    with pytest.raises(RunFailed) as error:
        factory()
    assert str(error.value) == f"{path}:5: environment 'Box' cannot be made: ZeroDivisionError: division by zero"


def test_one_environment_for_two_rollouts_ends_the_run(file):
    path = file(
        f"class Box:\n    def reset(self, **row):\n        pass\n    {ACT}\nBOX = Box()\ndef make():\n    return BOX\n"
    )
    factory = tools_of(path, environment="make").environments
    factory()
    with pytest.raises(RunFailed) as error:
        factory()
    assert str(error.value) == (
        f"{path}:9: environment 'make': the same object came twice, and rollouts would share its state\n"
        "  fix: make a new one in each call"
    )


# -- to another process ------------------------------------------------------------------------------------------------


class Ward:
    def __init__(self):
        self.beds = [1]
        self._lock = object()

    def reset(self, **row):
        self.beds = []


def test_state_is_what_json_holds_without_what_is_private():
    ward = Ward()
    ward.reset = ward.reset  # as a watched one has it
    ward.names = {"a": [1.5, None]}
    assert state_of(ward) == {"beds": [1], "names": {"a": [1.5, None]}}


def test_a_state_replaces_the_one_of_before_and_leaves_what_is_private():
    ward = Ward()
    lock, ward.old = ward._lock, 3
    take_state(ward, {"beds": [7]})
    assert vars(ward) == {"beds": [7], "_lock": lock}


@pytest.mark.parametrize("value", [(1, 2), {3}, object(), {1: 2}], ids=["tuple", "set", "object", "numbers-as-keys"])
def test_a_state_that_json_would_change_is_refused(value):
    ward = Ward()
    ward.beds = value
    with pytest.raises(RunFailed) as error:
        state_of(ward)
    assert str(error.value) == (
        f"environment Ward: its attribute 'beds', {type(value).__name__}, is not made of lists, texts and numbers "
        "alone, so it cannot travel to the rewards\n  fix: call it _beds if no reward needs it, or keep it as JSON has "
        "it: lists, not tuples or sets"
    )
