"""Whether the sections of a spec reach something that carries them out: the trainer, the executor, another verb.

A section that its backend does not list in `BackendPlugin.honours` is refused, never ignored; one that another verb
reads is said in a note. To make a section optional for backends, add its key to `model.OPTIONAL`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_core.errors import MissingError, Problem, UsageError
from composer_core.plugins.contributions import BackendPlugin, ExecutorPlugin, Kind, RewardPlugin, TeacherPlugin
from composer_core.plugins.registry import Registry
from composer_core.plugins.teacher_settings import NO_PRICE, PRICE_IT, has_price
from composer_core.protocols import Need
from composer_core.spec.capability import PlannedChannel
from composer_core.spec.errors import problem_at
from composer_core.spec.model import OPTIONAL, Plugged, RunSpec
from composer_core.spec.rollouts import NONE
from composer_core.spec.scorers import scorers_of, teachers_of
from composer_core.spec.yaml import Place, dotted

RECORDED = ("data.traces", "data.max_tokens")
"""What `rollouts: none` brings along: a backend that has it reads these then, and another one is refused for it."""
_HOW_TO_SCORE = "a teacher {use: openai, scores: true, ...} whose server is vLLM's"


@dataclass
class Sections:
    """Checks of one spec's sections; what is wrong is in `problems`."""

    spec: RunSpec
    registry: Registry
    places: Mapping[str, Place]
    backend: BackendPlugin
    channels: Sequence[PlannedChannel]
    problems: list[Problem] = field(default_factory=list)

    def check(self) -> None:
        """All checks."""
        self._honoured()
        self._fed()
        self._priced()
        self._measured()
        self._reader()
        self._teachers()
        for index, block in enumerate(self.spec.data.rewards):
            self._sandbox(dotted("data.rewards", index), block)
        for index, block in enumerate(self.spec.loss.channels):
            self._scorers(dotted("loss.channels", index), block)

    def notes(self) -> Iterator[str]:
        """What a user should know about sections that this run does not read."""
        data = self.spec.data
        if data.pairs is not None and not self._reads_pairs():
            yield "data.pairs: no channel of this spec reads pairs"
        if data.traces is not None and not self._reads_rows():
            yield "data.traces: no channel of this spec reads traces"
        elif data.traces is not None and not self._has("data.traces"):
            yield f"data.traces: backend {self.backend.name!r} does not train on traces, composer-run replay reads them"
        scoring = {name for names in scorers_of(self.spec, self.registry).values() for name in names}
        replayed = [name for name in self.spec.teachers if name not in scoring]
        if replayed and scoring:
            yield f"teachers {', '.join(replayed)}, and replay, are read by composer-run replay, not by a training run"
        elif replayed:
            yield "teachers and replay are read by composer-run replay, not by a training run"
        elif not self.spec.teachers and self.spec.limits.teacher_usd is not None:
            yield "limits.teacher_usd: the spec has no teachers"
        asked, agreement = len(self.spec.replay.teachers or self.spec.teachers), self.spec.replay.agreement
        if replayed and 0 < asked < agreement:
            yield f"replay.agreement: {agreement} teachers must agree and {asked} will be asked, so no pair can arise"

    def _refuse(self, key: str, problem: str, fix: str = "", *, missing: bool = False) -> None:
        self.problems.append(problem_at(self.places, key, problem, fix=fix, missing=missing))

    def _honoured(self) -> None:
        for key in OPTIONAL:
            asked = _asked(self.spec, key)
            if asked is None or self._has(key) or self._for_replay(key):
                continue
            able = sorted(
                backend.name
                for _, backend in self.registry
                if isinstance(backend, BackendPlugin) and key in backend.honours
            )
            fix = f"leave it out, or use a backend that has it: {', '.join(able)}" if able else "leave it out"
            if key == "data.traces" and "rollouts" in self.backend.honours:
                fix = "leave it out, or rollouts: none, which learns from recorded data alone"
            what = f"{key}: {asked}" if isinstance(asked, str) else key
            self._refuse(key, f"backend {self.backend.name!r} does not have {what}", fix)

    def _has(self, key: str) -> bool:
        """Whether the backend carries out a section in this spec."""
        return key in self.backend.honours or (self.spec.rollouts == NONE and key in RECORDED)

    def _fed(self) -> None:
        """Without rollouts, a channel learns from recorded traces or from pairs: those it reads must be there."""
        data = self.spec.data
        if self.spec.rollouts != NONE or data.traces is not None:
            return
        for index, block in enumerate(self.spec.loss.channels):
            planned = next((channel for channel in self.channels if channel.name == block.name), None)
            if planned is not None and block.weight and Need.PAIRS not in planned.needs:
                problem = f"rollouts is none, and channel {block.name!r} learns from traces, of which there are none"
                self._refuse(dotted("loss.channels", index), problem, "data.traces: {path: ...}")

    def _measured(self) -> None:
        """A bound on the KL needs an objective that computes one."""
        settings = getattr(self.spec.loss.objective, "settings", None)
        if self.spec.limits.kl is not None and not getattr(settings, "kl_coef", 0):
            fix = "loss.objective.kl_coef: a small number such as 0.001, or leave limits.kl out"
            self._refuse("limits.kl", "the objective computes no KL to bound", fix)

    def _for_replay(self, key: str) -> bool:
        """Whether it is `composer-run replay` that reads or writes this, and the training run has no use for it."""
        if not self.spec.teachers:
            return False
        return key == "data.traces" or (key == "data.pairs" and not self._reads_pairs())

    def _reads_rows(self) -> bool:
        """Whether anything learns from traces; with rollouts, any channel may."""
        if self.spec.rollouts != NONE:
            return bool(self.channels)
        learning = [channel for channel in self.channels if Need.PAIRS not in channel.needs]
        return bool(learning) or self.spec.loss.objective is not None

    def _reads_pairs(self) -> bool:
        return any(Need.PAIRS in channel.needs for channel in self.channels)

    def _priced(self) -> None:
        if self.spec.limits.usd is None:
            return
        block = self.spec.executor
        owner, executor = self.registry.get(block.kind, block.use)
        assert isinstance(executor, ExecutorPlugin)
        try:
            price = executor.usd_per_hour(block.settings)
        except Exception as error:  # a plugin's mistake, whatever its type
            what = f"executor {block.name!r}: usd_per_hour ({owner}) failed"
            self._refuse("executor", f"{what}: {type(error).__name__}: {error}")
            return
        if price is None:
            problem = f"executor {block.name!r} has no known price, so money cannot be counted"
            self._refuse("limits.usd", problem, "limit the time instead: limits.hours")

    def _reader(self) -> None:
        traces = self.spec.data.traces
        if traces is None or traces.format == "auto":
            return
        try:
            self.registry.get(Kind.READER, traces.format)
        except (UsageError, MissingError) as error:
            self._refuse("data.traces.format", error.problem, error.fix, missing=isinstance(error, MissingError))

    def _teachers(self) -> None:
        given, replay = self.spec.teachers, self.spec.replay
        names = ", ".join(given) or "none"
        for index, name in enumerate(replay.teachers):
            if name not in given:
                self._refuse(dotted("replay.teachers", index), f"no teacher is called {name!r}; there are: {names}")

    def _sandbox(self, key: str, block: Plugged) -> None:
        """The sandbox that a reward runs code in must be there."""
        owner, reward = self.registry.get(block.kind, block.use)
        assert isinstance(reward, RewardPlugin)
        try:
            asked = reward.sandbox(block.settings)
        except Exception as error:  # a plugin's mistake, whatever its type
            self._refuse(key, f"reward {block.name!r}: sandbox ({owner}) failed: {type(error).__name__}: {error}")
            return
        if asked is None:
            return
        try:
            self.registry.get(Kind.SANDBOX, asked.use)
        except (UsageError, MissingError) as error:
            self._refuse(f"{key}.sandbox", error.problem, error.fix, missing=isinstance(error, MissingError))

    def _scorers(self, key: str, block: Plugged) -> None:
        """The teachers that a channel names must be there, score, and have a price where money is limited."""
        owner, _ = self.registry.get(block.kind, block.use)
        what = f"channel {block.name!r}: teachers ({owner})"
        try:
            names = teachers_of(block, self.registry)
            for name in names:
                what = f"teacher {name!r}: scores"
                self._scorer(f"{key}.teacher", name)
        except Exception as error:  # a plugin's mistake, whatever its type
            self._refuse(key, f"{what} failed: {type(error).__name__}: {error}")

    def _scorer(self, key: str, name: str) -> None:
        teacher = self.spec.teachers.get(name)
        if teacher is None:
            known = ", ".join(self.spec.teachers) or "none"
            self._refuse(key, f"no teacher is called {name!r}; under teachers: there are: {known}")
            return
        _, contribution = self.registry.get(teacher.kind, teacher.use)
        assert isinstance(contribution, TeacherPlugin)
        if not contribution.scores(teacher.settings):
            problem = f"teacher {name!r} gives no log-probs of a text it is handed, and a channel learns from those"
            self._refuse(key, problem, f"{_HOW_TO_SCORE}, or one of the policy's own: self-frozen")
        elif self.spec.limits.teacher_usd is not None and not has_price(teacher.settings):
            self._refuse(f"teachers.{name}.price", NO_PRICE, PRICE_IT)


def _asked(spec: RunSpec, key: str) -> Any:
    """What stands at a key; None where it is the default."""
    value, default = spec, None
    for part in key.split("."):
        default = type(value).model_fields[part].default
        value = getattr(value, part)
    return None if value == default else value
