"""Each of several schedulers has its own part of every role's instances."""

from hypothesis import given
from hypothesis import strategies as st

from common.ids import Incarnation, InstanceId
from common.messages import Role
from scheduler.policy.grouping import others_instances

NAMES = st.text("abcdef0123456789", min_size=1, max_size=4)


@given(st.dictionaries(NAMES, st.sampled_from(["prefill", "decode", "mixed"])), st.sets(NAMES, min_size=1))
def test_every_instance_is_one_schedulers_and_the_parts_of_a_role_are_equal(
    roles: dict[str, Role], names: set[str]
) -> None:
    schedulers = [Incarnation(each) for each in names]
    instances = [(role, InstanceId(name)) for name, role in roles.items()]
    everyone = {name for _, name in instances}
    own = [everyone - others_instances(instances, schedulers, each) for each in schedulers]
    assert sorted(name for part in own for name in part) == sorted(everyone)
    for role in ("prefill", "decode", "mixed"):
        sizes = [sum(roles[name] == role for name in part) for part in own]
        assert max(sizes) - min(sizes) <= 1


@given(st.permutations([("decode", "d0"), ("prefill", "p0"), ("decode", "d1"), ("prefill", "p1")]))
def test_the_order_in_which_members_became_known_changes_nothing(order: list[tuple[Role, str]]) -> None:
    instances = [(role, InstanceId(name)) for role, name in order]
    first, second = Incarnation("1"), Incarnation("2")
    assert others_instances(instances, [second, first], first) == {"d1", "p1"}
    assert others_instances(instances, [first, second], second) == {"d0", "p0"}
