"""What each of verl's processes imports through `actor_rollout_ref.model.external_lib`: it registers our parts there.

The rollout and the agent loop. The platform comes earlier (platform_cpu.py); engine and trainer are registered by the
worker and by the driver themselves. Another part for every process is one line here.
"""

from __future__ import annotations

from composer_verl import agent_loop, rollout

rollout.register()
agent_loop.register()
