"""RLinf's placement syntax, ratios and modes: what resolves, to which devices, and what is refused, with the reason."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla3_plugin.placement.spec import COMPONENTS, Cluster, SpecError, nearest, resolve

ALL3 = ("actor", "rollout", "env")
ROBOT = {"label": "franka", "node_ranks": 1, "hardware": {"type": "Franka", "configs": [{"node_rank": 1}]}}
ARMS = {**ROBOT, "node_ranks": "1-2", "hardware": {"type": "Franka", "configs": [{"node_rank": 1}, {"node_rank": 2}]}}
TUNED = {"label": "rollout", "node_ranks": "all", "env_configs": [{"node_ranks": "all"}]}


def span(first, last, node=0):
    return [(node, (device,)) for device in range(first, last + 1)]


def places(placement, name):
    return [(p.node, p.devices) for p in placement.components[name]]


# From RLinf's public configs: GPUs of the cluster they are for, the placement, and where each process of ours goes.
PUBLIC = {
    "embodied, all on all": ([8], {"actor,env,rollout": "all"}, [], "collocated", [span(0, 7)] * 3),
    "quickstart": ([2], {"actor,env,rollout": "0-1"}, [], "collocated", [span(0, 1)] * 3),
    "spaces in the names": ([8], {"actor, env, rollout": "0-7"}, [], "collocated", [span(0, 7)] * 3),
    "one GPU as a number": ([1], {"env,rollout,actor": 0}, [], "collocated", [span(0, 0)] * 3),
    "the second GPU": ([2], {"actor,env,rollout": "1-1"}, [], "collocated", [span(1, 1)] * 3),
    "maniskill_grpo_openvla": (
        [8], {"actor": "0-7", "env": "0-3", "rollout": "4-7"}, [], "hybrid", [span(0, 7), span(4, 7), span(0, 3)]),
    "behavior_ppo_openpi": (
        [4], {"rollout": "0-1", "env": "2-3", "actor": "all"}, [], "hybrid", [span(0, 3), span(0, 1), span(2, 3)]),
    "libero_spatial_dagger": (
        [8], {"actor": "0-3", "env": "4-7", "rollout": "4-7"}, [], "disaggregated",
        [span(0, 3), span(4, 7), span(4, 7)]),
    "sac_async_decoupled": (
        [4], {"actor": "0-1", "env": "0-3", "rollout": "0-1"}, [], "hybrid", [span(0, 1), span(0, 1), span(0, 3)]),
    "roboverse": (
        [4], {"actor": "0-1", "rollout": "0-1", "env": "2-3"}, [], "hybrid", [span(0, 1), span(0, 1), span(2, 3)]),
    "metaworld": ([2], {"actor": 0, "env": 0, "rollout": 1}, [], "hybrid", [span(0, 0), span(1, 1), span(0, 0)]),
    "async_ppo_openvla": (
        [2], {"actor": 0, "env": 1, "rollout": 1}, [], "disaggregated", [span(0, 0), span(1, 1), span(1, 1)]),
    "two nodes": (
        [8, 8], {"env": "0-7", "rollout": "8-15", "actor": "0-15"}, [], "hybrid",
        [span(0, 7) + span(0, 7, 1), span(0, 7, 1), span(0, 7)]),
    "processes shared": (
        [2], {"actor": 0, "rollout": "0:0-1", "env": "0:0-4, 1:5-9"}, [], "hybrid",
        [span(0, 0), span(0, 0) * 2, span(0, 0) * 5 + span(1, 1) * 5]),
    "processes shared elsewhere": (
        [2], {"actor": 0, "rollout": "1:0-1", "env": "1:0-1"}, [], "disaggregated",
        [span(0, 0), span(1, 1) * 2, span(1, 1) * 2]),
    "isaaclab, a node group": (
        [4], {"env": "0-3", "rollout": {"node_group": "rollout", "placement": "0-3"}, "actor": "0-3"}, [TUNED],
        "collocated", [span(0, 3)] * 3),
    "a robot's node": (
        [1, 0],
        {"actor,rollout": {"node_group": "4090", "placement": 0}, "env": {"node_group": "franka", "placement": 0}},
        [{"label": "4090", "node_ranks": 0}, ROBOT], "collocated", [span(0, 0), span(0, 0), [(1, ())]]),
    "two arms": (
        [1, 0, 0],
        {"actor": {"node_group": "4090", "placement": 0}, "env": {"node_group": "franka", "placement": "0-1"},
         "rollout": {"node_group": "4090", "placement": "0:0-1"}},
        [{"label": "4090", "node_ranks": "0-0"}, ARMS], "collocated",
        [span(0, 0), span(0, 0) * 2, [(1, ()), (2, ())]]),
    "separate GPUs of a group": (
        [2, 0],
        {"actor": {"node_group": "train", "placement": 1}, "rollout": {"node_group": "train", "placement": 0},
         "env": {"node_group": "franka", "placement": 0}},
        [{"label": "train", "node_ranks": 0}, ROBOT], "disaggregated", [span(1, 1), span(0, 0), [(1, ())]]),
    "groups one after another": (
        [4, 4], {"actor,rollout,env": {"node_group": "a800, 4090", "placement": "2-5"}},
        [{"label": "4090", "node_ranks": 1}, {"label": "a800", "node_ranks": 0}], "collocated",
        [span(2, 3) + span(0, 1, 1)] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_placement_resolves(name):
    gpus, placement, groups, mode, wanted = PUBLIC[name]
    found = resolve(Cluster(tuple(gpus)), placement, node_groups=groups)
    assert found.mode == mode
    assert [places(found, role) for role in ALL3] == wanted
    assert [p.rank for p in found.components["env"]] == list(range(len(wanted[2])))
    assert resolve(Cluster(tuple(gpus)), placement, node_groups=groups, mode=mode) == found


@pytest.mark.parametrize(
    ("gpus", "placement", "roles", "unplaced"),
    [
        ([8] * 8, {"rollout": "0-15", "inference": "16-23", "actor": "24-63", "reward": "0-15"}, 2, 2),
        ([8], {"actor,critic,rollout,reward": "all"}, 2, 2),
        ([8] * 32, {"actor,rollout,reward": "all"}, 2, 1),
        ([4], {"env,rollout": "all"}, 2, 0),
        ([2], {"actor": "0-0", "env": "0-0", "rollout": "0-0", "reward": "0-0", "reward_server": "0-1:0"}, 3, 2),
    ],
)
def test_roles_that_do_not_exist_here_are_read_and_named(gpus, placement, roles, unplaced):
    found = resolve(Cluster(tuple(gpus)), placement, required=())
    assert (len(found.components), len(found.notes)) == (roles, unplaced)


OK = {"actor": 0, "rollout": 1, "env": 1}
REFUSED = {
    "unknown component": ([2], {**OK, "actr": 0}, {}, r"'actr' is not a component; did you mean actor\?"),
    "empty component": ([2], {"actor,,env": 0, "rollout": 0}, {}, "'' is not a component; known: actor"),
    "placed twice": ([2], {"actor,env": 0, "rollout,env": 1}, {}, "env is placed twice"),
    "named twice in a key": ([2], {"actor,actor": 0, "rollout,env": 1}, {}, "actor is placed twice"),
    "beyond the cluster": ([4], {**OK, "actor": "0-7"}, {}, "GPU 7 of '0-7' does not exist: 0 to 3"),
    "beyond two nodes": ([4, 4], {**OK, "env": 8}, {}, "GPU 8 of 8 does not exist: 0 to 7"),
    "sexagesimal": ([2], {**OK, "env": 60}, {}, "YAML reads an unquoted 1:0 as 60"),
    "backwards": ([8], {**OK, "actor": "7-0"}, {}, "'7-0' runs backwards; write 0-7"),
    "negative": ([8], {**OK, "actor": -1}, {}, "'-1', expected a rank or a range"),
    "words": ([8], {**OK, "actor": "every"}, {}, "'every', expected a rank or a range"),
    "three ends": ([8], {**OK, "actor": "0-1-2"}, {}, "'0-1-2', expected a rank or a range"),
    "fraction": ([8], {**OK, "actor": 0.5}, {}, "0.5, expected ranks such as"),
    "switch": ([8], {**OK, "actor": True}, {}, "True, expected ranks such as"),
    "nothing": ([8], {**OK, "actor": None}, {}, "None, expected ranks such as"),
    "list": ([8], {**OK, "actor": [0, 1]}, {}, r"\[0, 1\], expected ranks such as"),
    "empty": ([8], {**OK, "actor": ""}, {}, "'' has an empty part"),
    "trailing comma": ([8], {**OK, "actor": "0-3,"}, {}, "'0-3,' has an empty part"),
    "two colons": ([8], {**OK, "env": "0:0:1"}, {}, "'0:0:1' has 2 colons"),
    "no processes": ([8], {**OK, "env": "0-3:"}, {}, "'', expected a rank or a range"),
    "all processes": ([8], {**OK, "env": "0-3:all"}, {}, "processes cannot be 'all'"),
    "duplicate device": ([8], {**OK, "env": "0-3,3-4"}, {}, "GPU 3 is named twice"),
    "descending": ([8], {**OK, "env": "4-5,0-1"}, {}, "GPU 0 is out of order"),
    "processes start at one": ([8], {**OK, "env": "0-1:1-2"}, {}, "process 1 leaves a gap or comes twice: they start"),
    "process gap": ([8], {**OK, "env": "0:0-1,1:3-4"}, {}, "process 3 leaves a gap or comes twice: after 1 comes 2"),
    "process twice": ([8], {**OK, "env": "0:0-1,1:1-2"}, {}, "process 1 leaves a gap or comes twice: after 1 comes 2"),
    "indivisible": ([8], {**OK, "env": "0-2:0-3"}, {}, r"4 processes on 3 GPUs: .* \(4 / 3 = 1.33\)"),
    "several GPUs a rank": ([8], {**OK, "actor": "0-3:0-1"}, {}, "learner rank 0 would have 2 GPUs.*4 processes"),
    "several GPUs a policy": ([8], {**OK, "rollout": "0-1:0", "env": 0}, {}, "policy worker 0 would have 2 GPUs"),
    "several GPUs a simulator": ([8], {**OK, "env": "0-3:0-1"}, {}, "env worker 0 would have 2 GPUs"),
    "spans nodes": ([1, 1], {**OK, "env": "0-1:0"}, {}, r"process 0 would span nodes \[0, 1\]"),
    "two ranks a GPU": ([2], {**OK, "actor": "0:0-1"}, {}, "two learner ranks on node 0 GPU 0"),
    "uneven ranks": ([4, 4], {**OK, "actor": "0-5"}, {}, r"6 learner ranks = 4 on node 0 \+ 2 on node 1"),
    "no actor": ([2], {"env,rollout": "all"}, {}, "actor is not placed; add it, such as actor: 0"),
    "no rollout": ([2], {"actor,env": "all"}, {}, "rollout is not placed"),
    "no env": ([2], {"actor,rollout": "all"}, {}, "env is not placed"),
    "few env workers": ([4], {**OK, "rollout": "0-3", "env": 0}, {}, "1 env workers for 4 policy.* such as 0-0:0-3"),
    "learner on a CPU node": (
        [2, 0], {**OK, "actor": {"node_group": "node", "placement": 1}}, {},
        r"a learner rank needs a GPU, and node 1 gives it none \(2 nodes with 2 \+ 0 GPUs\)"),
    "policy on a CPU node": (
        [2, 0], {**OK, "rollout": {"node_group": "cpu", "placement": 0}},
        {"node_groups": [{"label": "cpu", "node_ranks": 1}]}, "a policy worker needs a GPU, and node 1 gives it none"),
    "no GPUs": ([0], {"actor,rollout,env": 0}, {}, "a learner rank needs a GPU, and node 0 gives it none"),
    "unknown group": ([2], {**OK, "env": {"node_group": "gpus", "placement": 0}}, {}, "'gpus' is not a node group"),
    "group without ranks": ([2], {**OK, "env": {"node_group": "node"}}, {}, "expected the key placement"),
    "unknown key": ([2], {**OK, "env": {"nodes": 0, "placement": 0}}, {}, "nodes: unknown key, expected node_group"),
    "beyond the group": (
        [2, 2], {**OK, "env": {"node_group": "b", "placement": 2}}, {"node_groups": [{"label": "b", "node_ranks": 1}]},
        "GPU 2 of 2 does not exist: 0 to 1"),
    "groups overlap": (
        [2, 2], {**OK, "env": {"node_group": "b,cluster", "placement": 0}},
        {"node_groups": [{"label": "b", "node_ranks": 1}]}, "b, cluster have resources in common"),
    "reserved label": ([2], OK, {"node_groups": [{"label": "node", "node_ranks": 0}]}, "'node' is reserved"),
    "label twice": ([2], OK, {"node_groups": [{"label": "a", "node_ranks": 0}] * 2}, "'a' names two groups"),
    "group beyond": ([2], OK, {"node_groups": [{"label": "a", "node_ranks": "0-1"}]}, "node 1 of '0-1' does not exist"),
    "group misspelt": (
        [2], OK, {"node_groups": [{"label": "a", "node_ranks": 0, "hardwere": 1}]}, "did you mean hardware"),
    "group of nothing": ([2], OK, {"node_groups": ["a"]}, "'a', expected a mapping with the keys label and node_ranks"),
    "robot elsewhere": ([2, 0, 0], OK, {"node_groups": [{**ROBOT, "node_ranks": 2}]}, "node_rank 1 is not among"),
    "robot without a kind": (
        [2], OK, {"node_groups": [{"label": "a", "node_ranks": 0, "hardware": 3}]}, "expected a mapping with the keys"),
    "robot ignored": (
        [1, 0], {"actor,rollout,env": 0}, {"node_groups": [{**ROBOT, "ignore_hardware": True}]}, "remove one of them"),
    "mode misspelt": ([2], OK, {"mode": "colocated"}, "did you mean collocated"),
    "collocated, but apart": ([2], OK, {"mode": "collocated"}, "'collocated', but the placement is disaggregated"),
    "disaggregated, but shared": (
        [8], {"actor": "0-4", "rollout,env": "4-7"}, {"mode": "disaggregated"}, "node 0 GPU 4 is shared"),
    "hybrid, but all shared": ([2], {"actor,env,rollout": "all"}, {"mode": "hybrid"}, "the placement is collocated"),
    "disaggregated without a ratio": ([2], {}, {"mode": "disaggregated"}, "needs vla3.placement.ratio"),
    "disaggregated on one": ([1], {}, {"ratio": "rollout:actor = 1:1"}, "2 parts do not divide 1 devices; use 2"),
    "ratio does not divide": (
        [6], {}, {"ratio": "rollout:actor = 3:1"}, r"3 \+ 1 = 4 parts do not divide 6 devices; use 4 or 8"),
    "ratio does not divide a node": (
        [8, 6], {}, {"ratio": "rollout:actor = 3:1", "ratio_per_node": True}, "4 parts do not divide 6 devices"),
    "ratio without numbers": ([4], {}, {"ratio": "rollout:actor"}, "expected names and whole numbers"),
    "ratio of a fraction": ([4], {}, {"ratio": "rollout:actor = 1.5:1"}, "expected names and whole numbers"),
    "ratio of zero": ([4], {}, {"ratio": "rollout:actor = 4:0"}, "gives a component no device"),
    "ratio of strangers": ([4], {}, {"ratio": "rolout:actor = 3:1"}, "'rolout' is not one of .*did you mean rollout"),
    "ratio of one": ([4], {}, {"ratio": "actor = 1"}, "1 names and 1 numbers"),
    "ratio twice": ([4], {}, {"ratio": "actor:actor = 1:1"}, "names a component twice"),
    "ratio and place": ([4], {"actor": 0}, {"ratio": "rollout:actor = 3:1"}, "actor is in component_placement too"),
    "nothing left": ([2], {"actor": "all"}, {"ratio": "rollout:env = 1:1"}, "2 parts do not divide 0 devices; use 2"),
    "nothing left to share": ([2], {"actor,env": "all"}, {"mode": "disaggregated"}, "rollout gets no device"),
}  # fmt: skip


def test_there_are_fifty_refusals():
    assert len(REFUSED) >= 50


@pytest.mark.parametrize("name", REFUSED)
def test_an_impossible_placement_is_refused_with_the_reason(name):
    gpus, placement, options, reason = REFUSED[name]
    with pytest.raises(SpecError, match=reason) as caught:
        resolve(Cluster(tuple(gpus)), placement, **options)
    assert all(line.startswith("vla3.placement.") or line.startswith("vla3.placement:") for line in caught.value.faults)


@pytest.mark.parametrize(
    ("gpus", "options", "mode", "actor", "rollout", "env"),
    [
        ([8], {"mode": "collocated"}, "collocated", "0-7", "0-7", "0-7"),
        ([1], {"mode": "collocated"}, "collocated", "0", "0", "0"),
        ([8], {"mode": "collocated", "component_placement": {"env": "2-3:0-7"}}, "collocated", "2-3", "2-3", "2-3"),
        ([8], {"mode": "hybrid"}, "hybrid", "0-7", "4-7", "0-3"),
        ([8], {"mode": "hybrid", "ratio": "env:rollout = 1:3"}, "hybrid", "0-7", "2-7", "0-1"),
        (
            [8],
            {"mode": "disaggregated", "component_placement": {"actor": "0-1", "rollout": "2-5"}},
            "disaggregated",
            "0-1",
            "2-5",
            "2-5",
        ),
        ([8], {"ratio": "rollout:actor=3:1"}, "disaggregated", "6-7", "0-5", "0-5"),
        ([8], {"mode": "auto", "ratio": "env : rollout : actor = 2:1:1"}, "disaggregated", "6-7", "4-5", "0-3"),
    ],
)
def test_modes_and_ratios_place_what_component_placement_leaves_out(gpus, options, mode, actor, rollout, env):
    found = resolve(Cluster(tuple(gpus)), **options)
    texts = [f"node 0 GPU {numbers}" for numbers in (actor, rollout, env)]
    assert found.mode == mode
    assert [text.split(" on ", 1)[1] for text in found.describe().values()] == texts
    assert len(found.components["env"]) >= len(found.components["rollout"])


def test_every_node_is_a_cell_where_the_ratio_holds_per_node():
    found = resolve(Cluster((8, 8)), ratio="rollout:actor = 3:1", ratio_per_node=True)
    assert places(found, "actor") == span(6, 7) + span(6, 7, 1)
    assert places(found, "rollout") == span(0, 5) + span(0, 5, 1)


def test_simulators_on_nodes_without_gpus_beside_a_ratio():
    """LIBERO's: the simulators on a node of CPUs, the devices divided between the other two."""
    env = {"node_group": "node", "placement": "1:0-7"}
    found = resolve(Cluster((4, 0)), {"env": env}, ratio="rollout:actor = 3:1")
    assert (found.mode, places(found, "env")) == ("disaggregated", [(1, ())] * 8)
    assert [nearest(found).count(rank) for rank in range(3)] == [3, 3, 2]


def test_an_env_worker_asks_the_policy_worker_beside_it():
    found = resolve(Cluster((2, 2)), {"actor": "0,2", "rollout": "1,3", "env": "0:0-1,1:2-3,2:4-5,3:6-7"})
    assert nearest(found) == [0, 0, 0, 0, 1, 1, 1, 1]  # of its node
    mixed = resolve(Cluster((2,)), {"actor": 0, "rollout": "0-1", "env": "0:0-2,1:3"})
    assert nearest(mixed) == [0, 0, 1, 1]  # one of three had to go: as many a policy worker


@settings(max_examples=150, deadline=None)
@given(
    parts=st.lists(st.integers(1, 5), min_size=2, max_size=3),
    times=st.integers(1, 6),
    order=st.permutations(["actor", "rollout", "env"]),
)
def test_a_ratio_gives_out_every_device_once_in_the_parts_asked_for(parts, times, order):
    names = [n for n in order if len(parts) == 3 or n != "env"]
    cluster = Cluster((sum(parts) * times,))
    found = resolve(cluster, ratio=f"{':'.join(names)} = {':'.join(map(str, parts))}")
    each = {name: found.devices(name) for name in names}
    assert {name: len(own) for name, own in each.items()} == {n: p * times for n, p in zip(names, parts, strict=True)}
    assert sorted(device for own in each.values() for device in own) == cluster.devices  # none twice, none left
    if "env" not in names:
        assert found.devices("env") == found.devices("rollout")
    asked = nearest(found)
    assert set(asked) == {p.rank for p in found.components["rollout"]}
    assert max(map(asked.count, asked)) - min(map(asked.count, asked)) <= 1


@st.composite
def ranges(draw):
    """A cluster, and a placement of env in segments, with the places that it should come to."""
    gpus = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(sum))
    devices = Cluster(tuple(gpus)).devices
    cuts = sorted(draw(st.sets(st.integers(0, len(devices)), min_size=2)))
    text, wanted = [], []
    for first, end in zip(cuts, cuts[1:], strict=False):
        if wanted and draw(st.booleans()):
            continue  # left free
        each = draw(st.integers(1, 3))
        processes = (
            f":{len(wanted)}-{len(wanted) + each * (end - first) - 1}" if each > 1 or draw(st.booleans()) else ""
        )
        text.append(f"{first}-{end - 1}{processes}")
        wanted += [device for device in devices[first:end] for _ in range(each)]
    return gpus, ",".join(text), wanted


@settings(max_examples=200, deadline=None)
@given(ranges())
def test_ranges_give_every_device_exactly_the_processes_written(case):
    gpus, text, wanted = case
    found = resolve(Cluster(tuple(gpus)), {"env": text}, required=())
    assert [place for p in found.components["env"] for place in p.places] == wanted
    assert sum(len(found.on(device)) for device in found.devices()) == len(wanted)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats() | st.text("0123456789-:, alx", max_size=9),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["placement", "node_group"]), inner),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(
    placement=st.dictionaries(st.sampled_from([*COMPONENTS, "env,rollout"]), JUNK), groups=st.lists(JUNK, max_size=2)
)
def test_whatever_is_written_resolves_or_is_refused(placement, groups):
    try:
        found = resolve(Cluster((2, 0)), placement, node_groups=groups)
    except SpecError as error:
        assert error.faults
    else:
        assert math.prod(len(found.components[name]) for name in COMPONENTS) > 0
