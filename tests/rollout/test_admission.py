from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palaestra.envs.errors import UsageError
from palaestra.rollout.admission import AdmissionControl


@given(
    max_staleness=st.integers(0, 3),
    groups_per_batch=st.integers(1, 4),
    group_size=st.integers(1, 4),
    start=st.integers(0, 5),
    events=st.lists(st.sampled_from(["start", "accept", "drop", "train"]), max_size=60),
)
def test_accepted_plus_running_plus_group_never_exceeds_the_bound(
    max_staleness: int, groups_per_batch: int, group_size: int, start: int, events: list[str]
) -> None:
    async def scenario() -> None:
        batch = groups_per_batch * group_size
        control = AdmissionControl(max_staleness=max_staleness, batch_episodes=batch, version=start)
        control.check(group_size)
        running, untrained = 0, 0
        for event in events:
            if event == "start" and group_size <= control.room:
                await asyncio.wait_for(control.admit(group_size), 1)
                running += 1
            elif event in ("accept", "drop") and running:
                await control.settle(group_size, accepted=event == "accept")
                running -= 1
                untrained += group_size * (event == "accept")
            elif event == "train" and untrained >= batch:
                untrained -= batch
                await control.advance(control.version + 1)
            assert control.accepted + control.running <= (max_staleness + control.version + 1) * batch
            assert control.running == running * group_size
            # What waits for training is used within max_staleness updates: nothing is ever too old.
            assert untrained + control.running <= (max_staleness + 1) * batch
            # And nothing deadlocks: there is something to train on, something running, or room to start.
            assert untrained >= batch or running or control.room >= group_size

    asyncio.run(scenario())


async def test_a_group_waits_until_the_learner_has_caught_up() -> None:
    control = AdmissionControl(max_staleness=0, batch_episodes=4)
    await control.admit(4)
    await control.settle(4, accepted=True)
    waiting = asyncio.create_task(control.admit(4))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await control.advance(1)
    await waiting
    assert control.running == 4


async def test_a_dropped_group_gives_its_share_back() -> None:
    control = AdmissionControl(max_staleness=0, batch_episodes=4)
    await control.admit(4)
    assert control.room == 0
    await control.settle(4, accepted=False)
    assert control.room == 4


async def test_settings_that_would_deadlock_or_go_back_are_refused() -> None:
    with pytest.raises(UsageError, match="no multiple of group_size"):
        AdmissionControl(max_staleness=0, batch_episodes=10).check(4)
    with pytest.raises(UsageError, match="at least"):
        AdmissionControl(max_staleness=-1, batch_episodes=4)
    control = AdmissionControl(max_staleness=0, batch_episodes=4, version=3)
    with pytest.raises(UsageError, match="version 2 is older than 3"):
        await control.advance(2)
