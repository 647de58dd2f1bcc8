"""Where a memory group can be made: read from what the kernel says of mounts and groups."""

from pathlib import Path

import pytest

from composer_executors.sandbox.memory import MemoryGroup, MemoryGroups, _candidates

V1_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V1_GROUPS = "4:memory:/jobs/7\n1:cpu:/\n0::/\n"
V2_MOUNTS = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V2_GROUPS = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/shell.scope\n"


@pytest.mark.parametrize(
    ("mounts", "groups", "parents"),
    [
        (V1_MOUNTS, V1_GROUPS, ["/sys/fs/cgroup/memory/jobs/7", "/sys/fs/cgroup/unified"]),
        (V2_MOUNTS, V2_GROUPS, [f"/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice{end}"
                                for end in ("/shell.scope", "")]),
        # a container that sees its own part of the hierarchy under the host's path
        ("5 4 0:26 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n", "4:memory:/docker/abc\n",
         ["/sys/fs/cgroup/memory"]),
        ("", "", []),
    ],
    ids=["version-1", "version-2", "container", "no-groups"],
)  # fmt: skip
def test_the_places_are_this_process_own_group_and_in_version_2_its_parent(mounts, groups, parents):
    assert [str(found.parent) for found in _candidates(mounts, groups)] == parents


def test_where_no_group_can_be_made_there_is_none(tmp_path):
    mounts = f"35 31 0:32 / {tmp_path} rw - cgroup cgroup rw,memory\n"  # a folder which is no group of the kernel
    assert MemoryGroups.found(mounts=mounts, groups="4:memory:/gone\n") is None


@pytest.mark.parametrize(
    ("events", "oom"),
    [("oom_kill_disable 0\nunder_oom 1\noom_kill 0\n", False), ("low 0\noom 3\noom_kill 2\noom_group_kill 0\n", True)],
    ids=["version-1-none", "version-2-two"],
)
def test_a_kill_is_counted_and_not_a_near_miss(tmp_path, events, oom):
    (tmp_path / "events").write_text(events)
    assert MemoryGroup(Path(tmp_path), tmp_path / "events").oom() is oom
