"""Named teachers of a run: asked once whether they can do it, handed to the channels, closed at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from composer_core.errors import ComposerError, MissingError, UsageError
from composer_core.loss.channel import TakesScorers
from composer_core.loss.composite import CompositeLoss
from composer_core.plugins.registry import Registry
from composer_core.protocols import ScoreRequest
from composer_core.run.context import RunContext
from composer_core.spec.scorers import scorers_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from composer_core.teachers.scoring import TeacherScorer

PROBE = "A teacher must have the policy's own tokenizer: 0123456789, def f(x): return x"


@contextmanager
def scoring_teachers(loss: CompositeLoss, run: RunContext, registry: Registry, *, scope: str) -> Iterator[None]:
    """Channels have their teachers inside; on leaving, an event `teacher` for each says what was scored and spent.

    Each process asks for its own rollouts; events are those of the main one, money is that of all of them.

    Args:
        loss: whose channels ask.
        run: of which this is a part.
        registry: knows the teachers.
        scope: what money is counted by, the same for a resumed run.

    Raises:
        MissingError: a teacher cannot be reached, or does not score.
        UsageError: its tokens are not the policy's, or its settings do not fit.
    """
    wanted = scorers_of(run.spec, registry)
    with ExitStack() as stack:
        scorers: dict[str, TeacherScorer] = {}
        for name in dict.fromkeys(name for names in wanted.values() for name in names):
            scorers[name] = stack.enter_context(closing(_open(name, run, registry, scope)))
            _try_out(scorers[name], _tokenizer(run))
        for active in loss.active:
            if isinstance(active.channel, TakesScorers):
                active.channel.take_scorers({name: scorers[name] for name in wanted.get(active.name, ())})
        try:
            yield
        finally:
            for scorer in scorers.values():
                run.event("teacher", **scorer.facts())


def _open(name: str, run: RunContext, registry: Registry, scope: str) -> TeacherScorer:
    from composer_core.teachers.named import named_teacher
    from composer_core.teachers.scoring import TeacherScorer

    limits = run.spec.limits
    return TeacherScorer(
        name,
        partial(named_teacher, run.spec, registry, name),
        scope=scope,
        usd=limits.teacher_usd,
        tokens=limits.teacher_tokens,
        warn=lambda reason: run.event("warning", reason=reason),
    )


def _tokenizer(run: RunContext) -> PreTrainedTokenizerBase:
    from composer_core.hf.models import load_tokenizer

    return load_tokenizer(run.model_folder(), trust_remote_code=run.spec.model.trust_remote_code)


def _try_out(scorer: TeacherScorer, tokenizer: PreTrainedTokenizerBase) -> None:
    """One short text before the first step: a run whose teacher is not there should not begin."""
    at = f"teachers.{scorer.name}"
    ids = list(tokenizer.encode(PROBE, add_special_tokens=False))
    try:
        answer = scorer.try_out(ScoreRequest(ids, 1, "before the first step"))
    except ComposerError as error:
        raise type(error)(error.problem, at=f"{at}.{error.at}" if error.at else at, fix=error.fix) from error
    if answer.reply is None or answer.reply.message is None:
        raise MissingError(f"this teacher scored no text: {answer.error}", at=at)
    other = _other_token(ids[1:], answer.reply.message["tokens"], tokenizer)
    if other:
        raise UsageError(
            f"this teacher has another tokenizer than the policy: {other}",
            at=f"{at}.model",
            fix="name a model of the policy's own family, or a teacher: self-...",
        )


def _other_token(ids: Sequence[int], said: Sequence[str | None], tokenizer: PreTrainedTokenizerBase) -> str:
    """An example where a teacher takes most ids for other text than the policy does; empty where it does not.

    Most, not any: servers show single tokens of a text in slightly different ways (leading spaces, parts of letters).
    """
    texts = [(token, str(tokenizer.decode([token])), text) for token, text in zip(ids, said, strict=True)]
    known = [(token, own, text) for token, own, text in texts if text is not None]
    differing = [f"token {token} is {own!r} here and {text!r} there" for token, own, text in known if own != text]
    return differing[0] if 2 * len(differing) > len(known) else ""
