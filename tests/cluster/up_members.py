"""`adaserve cluster up` with stand-ins for its servers: `python up_members.py RUN_FOLDER TARGETS DRAFTS [ray]`.

The targets say of their health what the file `said` in the run folder has, while there is one.
"""

from __future__ import annotations

import sys
from pathlib import Path

from adaserve_jax.cluster.local import run_up
from adaserve_jax.cluster.plan import ClusterPlan
from adaserve_jax.cluster.run_folder import ClusterFolder
from adaserve_jax.cluster.settings import RouterSettings
from adaserve_jax.cluster.supervisor import SupervisorTiming

MEMBER = str(Path(__file__).parent / "member.py")

plan = ClusterPlan(
    int(sys.argv[2]), int(sys.argv[3]), RouterSettings(port=0, poll_every=0.05),
    target_command=("{python}", "-S", MEMBER, "{port}", f"--state={sys.argv[1]}/said", "{drafter}"),
    draft_command=("{python}", "-S", MEMBER, "{http_port}", "--listen={host}:{port}"),
    timing=SupervisorTiming(probe_interval_s=0.05, first_backoff_s=0.05),
)  # fmt: skip
folder = ClusterFolder(Path(sys.argv[1]))
if sys.argv[4:] == ["ray"]:
    from adaserve_jax.cluster.ray_cluster import run_up_on_ray

    run_up_on_ray(plan, folder, None, "SPREAD")  # on a Ray cluster of its own
else:
    run_up(plan, folder)
