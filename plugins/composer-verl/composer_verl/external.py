"""What each of verl's processes imports through `actor_rollout_ref.model.external_lib`: it registers our parts there.

The rollout and the agent loop. The platform comes earlier (platform_cpu.py); engine and trainer are registered by the
worker and by the driver themselves. Another part for every process is one line here.
"""

from __future__ import annotations

from verl.models.transformers import monkey_patch

from composer_verl import agent_loop, rollout


def leave_trl_alone() -> None:
    """Keep verl from patching a class of trl's for critics, of which there are none here.

    verl 0.9.1 does so for every model where trl is installed, and trl 1.16 has no such class: without this no engine
    could be built in an environment that holds both.
    """
    monkey_patch.is_trl_available = lambda: False  # type: ignore[attr-defined, assignment]


leave_trl_alone()
rollout.register()
agent_loop.register()
