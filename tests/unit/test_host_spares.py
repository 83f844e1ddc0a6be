"""Which of the actors that wait becomes a replica, and when missing ones are started."""

from __future__ import annotations

from serve_replica_host.adapters.ray_thread import RayActorHandle, SparePool


class World:
    """A pool whose actors are plain values."""

    def __init__(self, *, spares_max: int, starts_max: int = 2) -> None:
        self.made: list[RayActorHandle] = []
        self.pool = SparePool(self._create, spares_max=spares_max, starts_max=starts_max)

    def _create(self) -> RayActorHandle:
        held = RayActorHandle(actor=len(self.made), futures=[])
        self.made.append(held)
        return held

    def ready(self, *numbers: int) -> None:
        for number in numbers:
            self.made[number].pid = 100 + number
            self.pool.on_ready(self.made[number])


def test_half_of_the_spares_wait_at_first_and_as_many_as_replicas_run_later() -> None:
    world = World(spares_max=4, starts_max=10)
    world.pool.refill()
    assert world.pool.waiting == 2

    taken = [world.pool.take() for _ in range(3)]
    world.pool.refill()
    assert world.pool.waiting == 3
    for held in taken[:2]:
        world.pool.on_ended(held)
    assert world.pool.take()
    world.pool.refill()
    assert world.pool.waiting == 2


def test_a_pool_is_filled_a_few_at_a_time() -> None:
    world = World(spares_max=8)

    world.pool.refill()
    assert len(world.made) == 2
    world.pool.refill()
    assert len(world.made) == 2
    world.ready(0)
    assert len(world.made) == 3
    world.ready(1, 2, 3)
    assert (len(world.made), world.pool.waiting) == (4, 4)


def test_one_that_is_ready_is_taken_before_one_that_starts() -> None:
    world = World(spares_max=4)
    world.pool.refill()
    world.ready(1)

    assert world.pool.take() is world.made[1]
    assert world.pool.take() is world.made[0]
    assert world.pool.waiting == 0


def test_an_empty_pool_starts_one_on_the_spot_whatever_else_starts() -> None:
    world = World(spares_max=0)

    taken = [world.pool.take() for _ in range(5)]

    assert taken == world.made
    world.pool.refill()
    assert len(world.made) == 5


def test_what_replicas_wait_for_starts_before_the_pool_is_filled_again() -> None:
    world = World(spares_max=4)
    world.pool.refill()
    world.ready(0, 1)
    for _ in range(4):
        world.pool.take()

    world.pool.refill()
    assert len(world.made) == 4  # two replicas' processes start already
    world.ready(2)
    assert len(world.made) == 5


def test_one_that_ends_is_forgotten_and_replaced_at_the_next_filling() -> None:
    world = World(spares_max=4)
    world.pool.refill()
    world.ready(0)

    world.pool.on_ended(world.made[0])
    world.pool.on_ended(world.made[1])
    assert world.pool.waiting == 0
    assert len(world.made) == 2
    world.pool.refill()
    assert world.pool.waiting == 2


def test_the_end_of_one_that_was_taken_changes_nothing() -> None:
    world = World(spares_max=1)
    world.pool.refill()
    world.ready(0)
    taken = world.pool.take()

    world.pool.on_ended(taken)
    world.pool.refill()

    assert (len(world.made), world.pool.waiting) == (2, 1)
