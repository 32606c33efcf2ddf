# SPDX-License-Identifier: Apache-2.0
"""Field report 71: a server far from its card says so; where the system names no node, nothing is far."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvgrpc.cli.checks import Verdict, numa_finding
from kvgrpc.transfer.placement import cpus_of_node, node_of_card


@pytest.fixture
def two_nodes(tmp_path: Path) -> Path:
    """A system of two nodes with a card at the second: our cores are at the first."""
    for bus_id, node in (("0000:3b:00.0", "1"), ("0000:af:00.0", "0"), ("0000:01:00.0", "-1")):
        device = tmp_path / "bus/pci/devices" / bus_id
        device.mkdir(parents=True)
        (device / "numa_node").write_text(node + "\n")
    ours = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    for node, cpus in ((0, ours), (1, "4000-4003,4008")):
        (tmp_path / f"devices/system/node/node{node}").mkdir(parents=True)
        (tmp_path / f"devices/system/node/node{node}/cpulist").write_text(cpus + "\n")
    return tmp_path


def test_nodes_and_their_cores_are_read(two_nodes: Path) -> None:
    assert node_of_card("0000:3B:00.0", two_nodes) == 1
    assert node_of_card("0000:01:00.0", two_nodes) is None
    assert node_of_card("0000:ff:00.0", two_nodes) is None
    assert cpus_of_node(1, two_nodes) == {4000, 4001, 4002, 4003, 4008}
    assert cpus_of_node(0, two_nodes) == os.sched_getaffinity(0)
    assert cpus_of_node(7, two_nodes) == frozenset()


def test_the_doctor_warns_of_a_card_that_is_far_only(two_nodes: Path) -> None:
    far = numa_finding(0, "0000:3B:00.0", two_nodes)
    assert far.verdict is Verdict.WARN and "numactl --cpunodebind=1" in far.text
    assert numa_finding(1, "0000:AF:00.0", two_nodes).verdict is Verdict.OK
    assert numa_finding(2, "0000:01:00.0", two_nodes).verdict is Verdict.OK
    assert numa_finding(0, "0000:3B:00.0", two_nodes / "none").verdict is Verdict.OK
